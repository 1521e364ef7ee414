"""Rows of the layout import only from rows above (CONTRIBUTING.md)."""

import ast
import pathlib
import subprocess
import sys

import pytest

import mtuner_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = (
    {"mtuner_jax.configs"},
    {"mtuner_jax.numbers"},
    {"mtuner_jax.hardware", "mtuner_jax.settings"},
    {"mtuner_jax.planning", "mtuner_jax.scheduling"},
    {"mtuner_jax.devices", "mtuner_jax.plots"},
    {"mtuner_jax.ops"},
    {"mtuner_jax.adapters"},
    {"mtuner_jax.protocols"},
    {"mtuner_jax.weights", "mtuner_jax.data", "models"},
    {"mtuner_jax.engines", "mtuner_jax.checkpoints"},
    {"mtuner_jax.inspection", "mtuner_jax.calibration", "mtuner_jax.generation"},
    {"mtuner_jax.training"},
    {"mtuner_jax.runs"},
    {"scripts"},
)
ROW_OF = {unit: row for row, units in enumerate(ROWS) for unit in units}
OURS = {"mtuner_jax", "models", "scripts", "tests"}
# Planning runs anywhere: these parts need no more than numpy (and scipy to schedule).
WITHOUT_JAX = {
    "mtuner_jax": set(),  # it looks its public names up when they are used
    "mtuner_jax.configs": set(),
    "mtuner_jax.numbers": set(),
    "mtuner_jax.hardware": set(),
    "mtuner_jax.planning": {"numpy"},
    "mtuner_jax.scheduling": {"numpy", "scipy"},
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module):
    """The row's entry that a module belongs to, such as mtuner_jax.ops."""
    depth = 2 if module.startswith("mtuner_jax") else 1
    return ".".join(module.split(".")[:depth])


def imported_modules(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")
        elif isinstance(node, ast.ImportFrom):
            package = node.module == "mtuner_jax"
            names = [f".{alias.name}" for alias in node.names] if package else [""]
            yield from (node.module + name for name in names)


def is_allowed(unit, imported):
    root = imported.split(".")[0]
    if not root:
        return False  # relative
    if root not in OURS:
        libraries = WITHOUT_JAX.get(unit)
        stdlib = root in sys.stdlib_module_names
        return libraries is None or stdlib or root in libraries
    target = unit_of(imported)
    if target in (unit, "mtuner_jax"):  # importing the package imports nothing
        return True
    return target in ROW_OF and ROW_OF[target] < ROW_OF.get(unit, 0)


def violations(module, source):
    unit = unit_of(module)
    imports = imported_modules(source)
    return [f"{module} -> {name}" for name in imports if not is_allowed(unit, name)]


def test_costs_know_nothing_of_the_search():
    for path in sorted((ROOT / "mtuner_jax/planning/costs").glob("*.py")):
        imports = imported_modules(path.read_text())
        assert not [name for name in imports if "planning.searching" in name], path


def test_no_file_imports_upwards():
    found, units = [], set()
    for package in ("mtuner_jax", "models", "scripts"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = module_name(path)
            units.add(unit_of(module))
            found += violations(module, path.read_text())
    assert not found
    assert units - {"mtuner_jax"} <= ROW_OF.keys(), "a file that no row names"
    assert {"mtuner_jax.planning", "mtuner_jax.training", "models"} <= units


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mtuner_jax.ops.x", "from mtuner_jax.engines import states"),
        ("mtuner_jax.ops.x", "from mtuner_jax import engines"),
        ("mtuner_jax.ops.x", "import mtuner_jax.adapters.lora"),
        ("mtuner_jax.ops.x", "def f():\n  from mtuner_jax.training import cli"),
        ("mtuner_jax.ops.x", "from .. import engines"),
        ("mtuner_jax.weights.x", "from models import llama"),
        ("models.x", "from mtuner_jax.data import samples"),
        ("models.x", "from mtuner_jax.checkpoints import sources"),
        ("mtuner_jax.training.x", "from scripts import train"),
        ("mtuner_jax.training.x", "from tests import tiny"),
        ("mtuner_jax.planning.x", "import jax.numpy as jnp"),
        ("mtuner_jax.planning.x", "import scipy"),
        ("mtuner_jax.planning.x", "from mtuner_jax import meshes"),
        ("mtuner_jax.planning.x", "from mtuner_jax import scheduling"),
        ("mtuner_jax.configs", "import numpy"),
        ("mtuner_jax", "import jax"),
        ("mtuner_jax", "from mtuner_jax import configs"),
    ],
)
def test_an_upward_import_is_found(module, source):
    assert len(violations(module, source)) == 1


def test_downward_imports_are_allowed():
    source = "import jax\nfrom mtuner_jax.ops import remat\nfrom models import llama"
    assert not violations("scripts.x", source)
    assert not violations("models.x", source)
    source = (
        "import numpy as np\nimport math\nfrom mtuner_jax.configs import ConfigError"
    )
    assert not violations("mtuner_jax.planning.x", source)


def test_importing_the_package_starts_nothing():
    code = (
        "import sys, mtuner_jax; mtuner_jax.RunConfig; "
        "sys.exit(bool({'jax', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_public_name_is_there():
    for name in mtuner_jax.__all__:
        assert getattr(mtuner_jax, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mtuner_jax.trian
