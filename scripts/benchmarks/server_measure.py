"""Measures runs of one link and cap in this process, until the time is over.

Started by `server_runs.py run`, which sets the environment that NCCL and XLA read.
"""

import argparse
import gc
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax

from mtuner_jax.calibration import benches, sections
from mtuner_jax.configs import ConfigError
from scripts import bench, calibrate
from scripts.benchmarks import run_lists, run_records, server_plan
from scripts.benchmarks.run_lists import Kind, Run, RunList
from scripts.benchmarks.run_records import Event


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags, as `server_runs.py` gives them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON lines")
    parser.add_argument("--results", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--until", type=float, required=True, help="Unix time")
    parser.add_argument("--runs", nargs="+", required=True, help="names")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Runs what fits into the time; a run that fails does not end the others."""
    args = parse(argv)
    listed = run_lists.read(args.folder)
    writer = run_records.Writer(args.output, listed)
    runs = [listed.named(name) for name in args.runs]
    place = bench.start(bench.parse_args(_flags(runs[0], listed, args.folder)))
    peak_gib = 0.0
    for run in runs:
        progress = run_records.read(listed, args.results)
        if time.time() + progress.expected_s(run) > args.until:
            print(f"{run.name}: no time left for it", flush=True)
            continue
        writer.write(run, Event.STARTED)
        started = time.monotonic()
        result, error = _measured(run, listed, args.folder, place)
        seconds = round(time.monotonic() - started, 1)
        if error:
            writer.write(run, Event.FAILED, error=error, seconds=seconds)
            continue
        # The allocator knows the highest of the process only.
        highest = result.pop("peak_gib", 0.0)
        if highest > peak_gib:
            result["measured_gib"] = peak_gib = highest
        writer.write(run, Event.DONE, result=result, seconds=seconds)
    return 0


def _measured(
    run: Run, listed: RunList, folder: pathlib.Path, place: bench.Place
) -> tuple[dict[str, Any], str]:
    """(what was measured, why nothing was); frees what the run used."""
    result, text = {}, ""
    try:
        if run.kind is Kind.LINKS:
            result = links(place)
        else:
            args = bench.parse_args(_flags(run, listed, folder))
            result = bench.measure(args, place)
    except (RuntimeError, ConfigError) as error:  # XLA's errors are RuntimeErrors
        text = f"{type(error).__name__}: {error}"
    jax.clear_caches()
    gc.collect()
    return result, text


def links(place: bench.Place) -> dict[str, Any]:
    """Gathers over each axis and all faster ones, that is at each local ratio.

    Raises:
      ConfigError: They failed.
    """
    sizes = benches.FULL if place.on_gpu else benches.SMALL
    where = calibrate.bench_on(place.mesh, sizes, memory_fraction=place.memory_fraction)
    (section,) = sections.measure(where, ["links"])
    if section.error:
        raise ConfigError(section.error)
    device = place.mesh.devices.flat[0].device_kind
    return {
        "axes": section.details,
        "device": f"{place.mesh.size} x {device}",
        "versions": f"jax {jax.__version__}",
    }


def _flags(run: Run, listed: RunList, folder: pathlib.Path) -> list[str]:
    flags = [*run.arguments, "--mesh", listed.mesh, "--platform", listed.platform]
    if run.kind is Kind.LINKS:
        return [*flags, "--random_init"]
    machine = folder / server_plan.machine_file(run.setting)
    return [*flags, "--plan", str(folder / run.plan), "--hardware", str(machine)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
