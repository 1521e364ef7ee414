"""Writes what a run has trained for other programs.

python scripts/export.py --run runs/default --format merged --output merged/
python scripts/export.py --run runs/default --format gguf --output model.gguf \
    --dtype q8_0
python scripts/export.py --run runs/default --format peft --readers all --output out/
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax.configs import ExportConfig
from mtuner_jax.settings import programs


def main(argv: list[str]) -> int:
    """Exports; returns the exit code."""
    return programs.run(argv, ExportConfig, export, description=__doc__)


def export(config: ExportConfig) -> None:
    """Exports; JAX is imported here, so that a wrong setting is told without it."""
    from models import llama_family
    from mtuner_jax.runs import exporting
    from mtuner_jax.training import logs

    with logs.to_console():
        written = exporting.export(config, llama_family.FAMILY)
    print(f"written: {written}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
