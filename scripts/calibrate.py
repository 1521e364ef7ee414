"""Measures this machine for the planner, in about a minute.

python scripts/calibrate.py
python scripts/calibrate.py --mesh 2x4 --name mybox --output mybox.json

Writes a JSON file that `--hardware` understands by name or path; a file of the same
name as a preset replaces the preset's figures. CPUs are measured with small sizes.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from models import llama, llama_configs
from mtuner_jax.calibration import benches, calibrations, layers
from mtuner_jax.configs import ConfigError, Platform
from mtuner_jax.devices import starting
from mtuner_jax.hardware import machines
from mtuner_jax.planning import workloads
from mtuner_jax.settings import cli
from mtuner_jax.training import logs
from scripts import sizing


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
    config = cli.parse(
        argv, CalibrateConfig, prog="calibrate.py", description=__doc__ or ""
    )
    with logs.to_console():
        return run(config)


def run(config: CalibrateConfig) -> int:
    """Measures section by section; what fails is taken from the card's preset."""
    started = starting.start(config.mesh, config.platform)
    print(started.lines[0])
    bench = bench_on(
        started.mesh, memory_fraction=started.memory_fraction, small=config.small
    )
    calibration = calibrations.prepare(bench, name=config.name, output=config.output)
    results = []
    for section in calibrations.measure(calibration):
        state = f"FAILED: {section.error}" if section.error else "done"
        print(f"{section.name:12} {section.seconds:6.1f} s  {state}", flush=True)
        results.append(section)
    failed = [section.name for section in results if section.error]
    print(f"single measurements: {calibration.raw_path}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    machine = calibrations.describe(calibration, results)
    machines.write(calibration.path, machine)
    print(calibrations.table(calibration, machine))
    for section in results:
        if section.name == "layer" and not section.error:
            print(layers.compared(layer_workload(bench), machine, section))
    if bench.sizes is benches.SMALL:
        print("small sizes: these figures say nothing of a training step")
    found_as = config.output or calibration.name
    print(f"wrote {calibration.path}: --hardware {found_as}")
    return 1 if failed else 0


def bench_on(
    mesh: jax.sharding.Mesh, *, memory_fraction: float, small: bool = False
) -> benches.Bench:
    """Where and how it is measured, on devices that JAX has started; CPUs small."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    sizes = benches.SMALL if on_cpu or small else benches.FULL
    implementation = "xla" if on_cpu else "cudnn"
    return benches.Bench(
        mesh=mesh,
        sizes=sizes,
        model=llama.Llama(shape(sizes), attention_implementation=implementation),
        memory_fraction=memory_fraction,
    )


def shape(sizes: benches.Sizes) -> llama_configs.LlamaConfig:
    """A decoder of one layer."""
    return llama_configs.LlamaConfig(
        vocab_size=128,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=1,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
    )


def layer_workload(bench: benches.Bench) -> workloads.Workload:
    """The layer and one row, as the planner is told of a model."""
    return sizing.workload(
        shape(bench.sizes),
        layers.specs(bench.model),
        name="one layer",
        rows=(1, bench.sizes.row_tokens),
        dtype=str(jax.numpy.dtype(bench.dtype)),
        attention="cudnn" if bench.on_gpu else "xla",
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as problem:
        sys.exit(f"error: {problem}")
