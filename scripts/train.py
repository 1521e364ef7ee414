"""Fine-tunes a Llama-family model with LoRA on a device mesh.

python scripts/train.py --mesh pcie8
python scripts/train.py --config run.yaml --learning_rate 1e-4 --lora.r 16
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from models import llama_family
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.runs import lora
from mtuner_jax.settings import cli
from mtuner_jax.training import logs, metrics

RECIPE = pathlib.Path(__file__).resolve().parent.parent / "examples/default.yaml"


def main(argv: list[str]) -> int:
    """Runs one training run; returns the exit code."""
    try:
        config = read_config(argv)
        with logs.to_console():
            return lora.train(config, llama_family.FAMILY, argv=argv)
    except (ConfigError, metrics.NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def read_config(argv: list[str]) -> RunConfig:
    """Flags and YAML; with neither model nor data, the shipped recipe."""

    def parse(arguments: list[str]) -> RunConfig:
        return cli.parse(
            arguments, RunConfig, prog="train.py", description=__doc__ or ""
        )

    if any(arg.startswith(("--config", "--help", "-h")) for arg in argv):
        return parse(argv)
    plain = [arg for arg in argv if not arg.startswith("--print")]
    config = parse(plain)
    if config.model or config.dataset.path:
        return parse(argv)
    return parse(["--config", str(RECIPE), *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
