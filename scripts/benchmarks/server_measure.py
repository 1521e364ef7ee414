"""Measures runs of one link and cap in this process, until the time is over.

Started by `server_runs.py run`, which sets the environment that NCCL and XLA read.
"""

import dataclasses
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax

from mtuner_jax.calibration import benches, sections
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import starting
from mtuner_jax.devices.starting import StartedDevices
from mtuner_jax.settings import programs
from scripts import calibrate
from scripts.benchmarks import (
    bench_configs,
    run_lists,
    run_records,
    server_machines,
    step_benches,
)
from scripts.benchmarks.run_lists import Kind, ListedRun, RunList
from scripts.benchmarks.run_records import RunEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What this process measures, as `server_calls` tells it.

    Attributes:
      folder: Of the list.
      output: JSON lines to append to.
      results: Folders with what was measured so far.
      until: Unix time by which everything ends.
      runs: Names.
    """

    folder: str = ""
    output: str = ""
    results: tuple[str, ...] = ()
    until: float = 0.0
    runs: tuple[str, ...] = ()


def main(argv: list[str]) -> int:
    """Measures; returns the exit code."""
    return programs.run(argv, MeasureConfig, measure, description=__doc__)


def measure(config: MeasureConfig) -> None:
    """Runs what fits into the time; a run that fails does not end the others."""
    folder = pathlib.Path(config.folder)
    listed = run_lists.read(folder)
    writer = run_records.Writer(pathlib.Path(config.output), listed)
    runs = [listed.named(name) for name in config.runs]
    first = bench_configs.parse(_flags(runs[0], listed, folder))
    devices = starting.start(first.mesh, first.platform)
    print(devices.lines[0])
    peak_gib = 0.0
    for run in runs:
        progress = run_records.read(listed, map(pathlib.Path, config.results))
        if time.time() + progress.expected_s(run) > config.until:
            print(f"{run.name}: no time left for it", flush=True)
            continue
        writer.write(run, RunEvent.STARTED)
        started = time.monotonic()
        result, error = _measured(run, listed, folder, devices)
        seconds = round(time.monotonic() - started, 1)
        if error:
            writer.write(run, RunEvent.FAILED, error=error, seconds=seconds)
            continue
        # The allocator knows the highest of the process only.
        highest = result.pop("peak_gib", 0.0)
        if highest > peak_gib:
            result["measured_gib"] = peak_gib = highest
        writer.write(run, RunEvent.DONE, result=result, seconds=seconds)


def _measured(
    run: ListedRun, listed: RunList, folder: pathlib.Path, devices: StartedDevices
) -> tuple[dict[str, Any], str]:
    """(what was measured, why nothing was); frees what the run used."""
    result, text = {}, ""
    try:
        if run.kind is Kind.LINKS:
            result = links(devices)
        else:
            config = bench_configs.parse(_flags(run, listed, folder))
            result = step_benches.measure(config, devices)
    except (RuntimeError, ConfigError) as error:  # XLA's errors are RuntimeErrors
        text = f"{type(error).__name__}: {error}"
    step_benches.free()
    return result, text


def links(devices: StartedDevices) -> dict[str, Any]:
    """Gathers over each axis and all faster ones, that is at each local ratio.

    Raises:
      ConfigError: They failed.
    """
    sizes = benches.FULL if devices.on_gpu else benches.SMALL
    where = calibrate.bench_on(
        devices.mesh, sizes, memory_fraction=devices.memory_fraction
    )
    (section,) = sections.measure(where, ["links"])
    if section.error:
        raise ConfigError(section.error)
    return {
        "axes": section.details,
        "device": f"{devices.mesh.size} x {devices.device_kind}",
        "versions": f"jax {jax.__version__}",
    }


def _flags(run: ListedRun, listed: RunList, folder: pathlib.Path) -> list[str]:
    flags = [*run.arguments, "--mesh", listed.mesh, "--platform", listed.platform]
    if run.kind is Kind.LINKS:
        return [*flags, "--random_init"]
    machine = folder / server_machines.machine_file(run.setting)
    return [*flags, "--plan", str(folder / run.plan), "--hardware", str(machine)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
