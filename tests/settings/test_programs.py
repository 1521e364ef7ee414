import ast
import dataclasses
import importlib
import pathlib

import pytest

import mtuner_jax
from mtuner_jax.configs import ConfigError, RunError, UserError
from mtuner_jax.settings import programs

ROOT = pathlib.Path(mtuner_jax.__file__).parent.parent
# What is no mistake of a user: a measurement of the machine that failed.
OTHERS = {"mtuner_jax.calibration.benches.MeasurementError"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A program's settings.

    Attributes:
      runs: Some words.
      sizes: Some numbers.
    """

    runs: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (8,)


def run(*argv, do):
    return programs.run(argv, Asked, do, positional="runs")


def test_words_before_the_first_flag_are_the_positional_setting():
    got = []
    assert run("a", "b", "--sizes", "1", "2", do=got.append) == 0
    assert run("--sizes", "3,4", do=got.append) == 0
    assert run("--sizes=[]", do=got.append) == 0
    assert got == [
        Asked(runs=("a", "b"), sizes=(1, 2)),
        Asked(sizes=(3, 4)),
        Asked(sizes=()),
    ]


def test_the_exit_code_is_the_programs_own():
    assert run(do=lambda asked: 3) == 3


def test_what_a_user_can_change_is_told_and_the_code_is_2(capsys):
    def refuse(asked):
        raise ConfigError(f"sizes={asked.sizes}: too many")

    assert run("--sizes", "1,2", do=refuse) == programs.BAD_INPUT == 2
    assert capsys.readouterr().err == "error: sizes=(1, 2): too many\n"
    assert run("--sizes", "1,x", do=refuse) == 2
    assert "sizes[1]='x' is a str, expected int" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(UserError, 2), (ConfigError, 2), (RunError, 1)]
)
def test_each_kind_of_mistake_is_one_line_with_its_exit_code(error, code, capsys):
    def refuse(asked):
        raise error("weights are damaged; copy them again")

    assert run(do=refuse) == code
    assert capsys.readouterr().err == "error: weights are damaged; copy them again\n"


def test_a_fault_of_ours_keeps_its_traceback():
    def fail(asked):
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        run(do=fail)


def error_classes():
    """Dotted names of all classes of the tree that are called an error."""
    for folder in ("mtuner_jax", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                is_class = isinstance(node, ast.ClassDef)
                if is_class and node.name.endswith(("Error", "Mismatch")):
                    yield f"{module}.{node.name}"


@pytest.mark.parametrize("name", sorted(set(error_classes()) - OTHERS))
def test_every_error_class_is_one_that_programs_tell(name):
    module, _, kind = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), kind), UserError)
