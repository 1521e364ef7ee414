"""Measures this machine for the planner, in about a minute.

python scripts/calibrate.py
python scripts/calibrate.py --mesh 2x4 --name mybox --output mybox.json

Writes a JSON file that `--hardware` understands by name or path; a file of the same
name as a preset replaces the preset's figures. CPUs are measured with small sizes.
"""

import dataclasses
import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from models import llama_configs, llama_family
from mtuner_jax.calibration import benches, calibrations, layers
from mtuner_jax.configs import ConfigError, Platform
from mtuner_jax.devices import meshes, starting
from mtuner_jax.runs import requests
from mtuner_jax.settings import programs
from mtuner_jax.training import logs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Which devices to measure, and where to write what they can do.

    Attributes:
      mesh: Preset (`pcie8`, `nvlink8`, ...), `auto`, or sizes such as `2x2x2`.
      platform: `auto`, `cpu` or `gpu`.
      name: What the machine is called; empty for its preset's name, or one by card.
      output: JSON file to write; empty for where `--hardware` looks for the name.
      small: Whether GPUs are measured with small sizes too, for tests.
    """

    mesh: str = "auto"
    platform: Platform = Platform.AUTO
    name: str = ""
    output: str = ""
    small: bool = False

    def __post_init__(self):
        if self.output and not self.output.endswith(".json"):
            raise ConfigError(
                f"--output {self.output}: --hardware knows files as .json"
            )


def main(argv: list[str]) -> int:
    """Measures, writes, prints; 1 if a section failed."""
    return programs.run(argv, CalibrateConfig, run, description=__doc__)


def run(config: CalibrateConfig) -> int:
    """Measures section by section; what fails is taken from the card's preset."""
    with logs.to_console():
        return measure(config)


def measure(config: CalibrateConfig) -> int:
    """Measures, writes and prints; 1 if a section failed."""
    started = starting.start(config.mesh, config.platform)
    print(started.lines[0])
    sizes = benches.SMALL if config.small or not started.on_gpu else benches.FULL
    bench = bench_on(started.mesh, sizes, memory_fraction=started.memory_fraction)
    calibration = calibrations.prepare(bench, name=config.name, output=config.output)
    say = functools.partial(print, flush=True)
    failed = calibrations.calibrate(calibration, say=say)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    if sizes is benches.SMALL:
        print("small sizes: these figures say nothing of a training step")
    found_as = config.output or calibration.name
    print(f"wrote {calibration.path}: --hardware {found_as}")
    return 1 if failed else 0


def bench_on(
    mesh: jax.sharding.Mesh, sizes: benches.Sizes, *, memory_fraction: float
) -> benches.Bench:
    """Where and how it is measured, with a Llama's layer on started devices."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    config = llama_configs.LlamaConfig(
        vocab_size=128,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=1,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
    )
    request = requests.StepRequest(
        name="one layer",
        mesh=meshes.parse("1"),
        global_batch_size=1,
        max_length=sizes.row_tokens,
        lora=layers.LORA,
        dtype="float32" if on_cpu else "bfloat16",
        attention="xla" if on_cpu else "cudnn",
    )
    layer = requests.resolve(llama_family.LlamaShape(config), request)
    return benches.Bench(
        mesh=mesh,
        sizes=sizes,
        model=layer.decoder,
        workload=layer.workload,
        memory_fraction=memory_fraction,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
