"""What ruff and pyrefly cannot check of the deep rooms (CONTRIBUTING.md, Style)."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOMS = ("engines", "ops", "planning", "weights", "protocols")
ORDERING = "mtuner_jax/ops/ordering.py"


def unlike(annotation):
    """Whether a parameter so annotated may be a tuple of unlike things."""
    if annotation is None:
        return True
    if isinstance(annotation, ast.Name):
        return annotation.id in ("tuple", "Any", "object")
    if not isinstance(annotation, ast.Subscript):
        return False
    if not (isinstance(annotation.value, ast.Name) and annotation.value.id == "tuple"):
        return False
    parts = annotation.slice
    elements = parts.elts if isinstance(parts, ast.Tuple) else [parts]
    kinds = {ast.unparse(element) for element in elements} - {"..."}
    return len(kinds) > 1


def unpacked(function):
    """Parameters of unlike things that a function's statements take apart."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    refused = {argument.arg for argument in every if unlike(argument.annotation)}
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)):
            continue
        targets = node.targets
        if any(isinstance(target, ast.Tuple | ast.List) for target in targets):
            if node.value.id in refused:
                yield node.lineno, f"{function.name} takes {node.value.id} apart"


def barriers(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "optimization_barrier":
            yield node.lineno, "a bare optimization_barrier"


def violations(name, source):
    tree = ast.parse(source)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    found = [pair for function in functions for pair in unpacked(function)]
    if name != ORDERING:
        found += barriers(tree)
    return [f"{name}:{line}: {what}" for line, what in sorted(set(found))]


def test_carries_have_names_and_barriers_reasons():
    """Carries are NamedTuples; `ops.ordering` says what a barrier is for."""
    found, seen = [], 0
    for room in ROOMS:
        for path in sorted((ROOT / "mtuner_jax" / room).rglob("*.py")):
            name, seen = path.relative_to(ROOT).as_posix(), seen + 1
            found += violations(name, path.read_text())
    assert not found, "\n".join(found)
    assert seen > len(ROOMS)


@pytest.mark.parametrize(
    "source",
    [
        "def f(carry):\n  a, b = carry",
        "def f(carry: tuple):\n  a, b = carry",
        "def f(carry: Any):\n  (a, b), c = carry",
        "def f(carry: tuple[jax.Array, int]):\n  x = 1\n  a, b = carry",
        "def f():\n  def g(_: None, *, carry: tuple[A, B]):\n    a, b = carry",
        "x = jax.lax.optimization_barrier(x)",
    ],
)
def test_what_is_refused_is_found(source):
    assert len(violations("mtuner_jax/ops/x.py", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f(carry: Carry):\n  a, b = carry",
        "def f(shape: tuple[int, ...]):\n  a, b = shape",
        "def f(pair: tuple[Phase, Phase]):\n  a, b = pair",
        "def f(carry: tuple[A, B]):\n  a, b = carry.parts",
    ],
)
def test_what_is_alike_or_named_may_be_unpacked(source):
    assert not violations("mtuner_jax/ops/x.py", source)


def test_barriers_are_allowed_where_their_reasons_are():
    assert not violations(ORDERING, "x = jax.lax.optimization_barrier(x)")
