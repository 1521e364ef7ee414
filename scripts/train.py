"""Fine-tunes a Llama-family model with LoRA on a device mesh.

python scripts/train.py --mesh pcie8
python scripts/train.py --config run.yaml --learning_rate 1e-4 --lora.r 16
"""

import dataclasses
import logging
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax.configs import RunConfig
from mtuner_jax.settings import cli, programs, written_settings

RECIPE = pathlib.Path(__file__).resolve().parent.parent / "examples/default.yaml"
# Its memory_budget is for so many; fewer may take as much together.
RECIPE_DEVICES = 8
_logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Runs one training run; returns the exit code."""
    return programs.guarded(lambda: train(read_config(argv), argv))


def train(config: RunConfig, argv: list[str]) -> int | None:
    """Trains; JAX is imported here, so that a wrong setting is told without it."""
    from models import llama_family
    from mtuner_jax.runs import lora
    from mtuner_jax.training import logs

    with logs.to_console():
        if config.show_samples:
            for text in lora.shown_samples(config, llama_family.FAMILY):
                print(f"{text}\n{'-' * 40}")
            return 0
        if takes_recipe(argv):
            config = for_mesh(config, argv)
        return lora.train(config, llama_family.FAMILY, argv=argv)


def read_config(argv: list[str]) -> RunConfig:
    """Flags and YAML; with neither model nor data, the shipped recipe."""
    recipe = ["--config", str(RECIPE)] if takes_recipe(argv) else []
    return parse([*recipe, *argv])


def parse(argv: list[str]) -> RunConfig:
    """Flags and YAML."""
    return cli.parse(argv, RunConfig, prog="train.py", description=__doc__ or "")


def takes_recipe(argv: list[str]) -> bool:
    """Whether the command names no file of settings, no model and no data."""
    if any(arg.startswith(("--config", "--help", "-h")) for arg in argv):
        return False
    config = parse([arg for arg in argv if not arg.startswith("--print")])
    return not (config.model or config.dataset.path)


def for_mesh(config: RunConfig, argv: list[str]) -> RunConfig:
    """The recipe with its memory_budget scaled to the mesh, unless a flag sets it."""
    from mtuner_jax.devices import detection, starting

    _, flags = written_settings.read_flags(argv, RunConfig)
    spec = starting.mesh_spec(config.mesh, config.platform, found=detection.look())
    if spec.num_devices >= RECIPE_DEVICES or "memory_budget" in {f.name for f in flags}:
        return config
    budget = config.memory_budget * RECIPE_DEVICES / spec.num_devices
    _logger.info(
        "memory_budget: %g GiB per device, the recipe's %g GiB for %d devices on %d",
        budget,
        config.memory_budget,
        RECIPE_DEVICES,
        spec.num_devices,
    )
    return dataclasses.replace(config, memory_budget=budget)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
