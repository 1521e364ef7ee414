"""Where planning pays: sweeps model, length, batch, memory and link speed.

python scripts/benchmarks/sweep.py --quick --jobs 2
python scripts/benchmarks/sweep.py --output runs/sweep --jobs 2
python scripts/benchmarks/sweep.py --output runs/sweep --draw_only

A cell is planned, compared with the best static setting, and planned again without
each mechanism that the plan uses. Writes cells.jsonl and
maps: gain.png, mechanisms.png, bwd_keep.png, tail.png.
All figures are predictions of the cost model.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware.machines import Hardware, Link
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import passes
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import search, static_plans
from mtuner_jax.runs.requests import PlanningInputs
from mtuner_jax.settings import cli, programs
from scripts.benchmarks import grids, mechanisms, phase_plots

# Less is within what the cost model is wrong by; nothing counts as won below it.
LEAST_GAIN = 1.02
# What no static setting has, beside treating layers differently.
DRAWN_ALONE = ("bwd_keep", "tail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig(grids.GridConfig):
    """The grid of a sweep.

    Attributes:
      budgets: GiB per device.
      links: GB/s received over the slowest axis; the other links are scaled alike.
      mesh: As in train.py.
      hardware: As in train.py; its links are scaled.
      output: The folder to write to.
      jobs: Processes.
      quick: Take a grid of under two minutes, but for what is given.
      draw_only: Draw the cells.jsonl that is there.
    """

    models: tuple[str, ...] = ("llama2-7b", "llama2-13b", "llama2-70b")
    max_lengths: tuple[int, ...] = (1024, 4096)
    global_batch_sizes: tuple[int, ...] = (8, 64)
    budgets: tuple[float, ...] = (10.0, 14.0, 20.0, 28.0, 42.0, 75.0)
    links: tuple[float, ...] = (7.0, 14.0, 28.0, 100.0)
    mesh: str = "pcie8"
    hardware: str = "auto"
    output: str = "runs/sweep"
    jobs: int = 1
    quick: bool = False
    draw_only: bool = False

    def __post_init__(self):
        for name in ("budgets", "links"):
            values = getattr(self, name)
            if not all(math.isfinite(value) and value > 0 for value in values):
                raise ConfigError(f"{name}={values}: finite and above 0")
        if self.jobs < 1:
            raise ConfigError(f"jobs={self.jobs}: finite and above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickConfig(SweepConfig):
    """The grid of a quick sweep."""

    models: tuple[str, ...] = ("llama2-7b",)
    max_lengths: tuple[int, ...] = (1024,)
    global_batch_sizes: tuple[int, ...] = (8, 32)
    budgets: tuple[float, ...] = (12.0, 24.0, 36.0)
    links: tuple[float, ...] = (7.0, 14.0, 100.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """What the cells of a panel share.

    Attributes:
      inputs: Workload, machine and mesh; the budget is the cell's.
      budgets: GiB per device, of each cell.
      link_gb_s: Received bytes/s over the slowest axis, in 1e9; the other links
        are scaled alike.
    """

    inputs: PlanningInputs
    budgets: tuple[float, ...]
    link_gb_s: float


def main(argv: list[str]) -> int:
    """Sweeps and draws, or draws only; returns the exit code."""
    return programs.guarded(lambda: sweep_and_draw(parse(argv)))


def parse(argv: list[str]) -> SweepConfig:
    """The settings; `--quick` replaces the grid's defaults, not what was given."""
    config = cli.parse(argv, SweepConfig, description=__doc__)
    return cli.parse(argv, QuickConfig) if config.quick else config


def sweep_and_draw(config: SweepConfig) -> None:
    """Writes cells.jsonl, unless it is only drawn, and the maps."""
    folder = pathlib.Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    if not config.draw_only:
        sweep(config, folder / "cells.jsonl")
    draw(folder)


def sweep(config: SweepConfig, path: pathlib.Path) -> None:
    """Plans all cells; one JSON line each, in the order of the grid."""
    todo = list(panels(config))
    started = time.monotonic()
    # Not forked: the parent has threads (JAX) that a fork would leave stuck.
    context = multiprocessing.get_context("spawn")
    with (
        path.open("w", encoding="utf-8") as file,
        concurrent.futures.ProcessPoolExecutor(config.jobs, context) as pool,
    ):
        done = map(cells, todo) if config.jobs == 1 else pool.map(cells, todo)
        for number, (panel, records) in enumerate(zip(todo, done, strict=True), 1):
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            workload = panel.inputs.workload
            print(
                f"[{number}/{len(todo)}, {time.monotonic() - started:.0f} s] "
                f"{workload.model} {workload.global_batch_size} x "
                f"{workload.max_length} at {panel.link_gb_s:g} GB/s: "
                + ", ".join(f"{r['budget_gib']:g} GiB {summary(r)}" for r in records)
            )
    print(f"wrote {path}")


def panels(config: SweepConfig) -> Iterator[Panel]:
    """The grid, but for budgets.

    Raises:
      ConfigError: An unknown model, mesh or machine.
    """
    mesh = meshes.parse(config.mesh, num_devices=0)
    for inputs in grids.inputs(config, mesh, hardware=config.hardware):
        for link in config.links:
            hardware = with_link(inputs.hardware, link * 1e9)
            yield Panel(
                inputs=dataclasses.replace(inputs, hardware=hardware),
                budgets=tuple(sorted(config.budgets)),
                link_gb_s=link,
            )


def with_link(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """The machine with its slowest link at that speed, all others scaled alike.

    Raises:
      ConfigError: One device, which has no link.
    """
    if not hardware.links:
        raise ConfigError(
            f"hardware {hardware.name} is one device, without links to sweep over; "
            "--mesh with several devices"
        )
    factor = bytes_per_s / hardware.links[0].bytes_per_s
    links = tuple(
        Link(bytes_per_s=link.bytes_per_s * factor, latency_s=link.latency_s)
        for link in hardware.links
    )
    return dataclasses.replace(hardware, links=links)


def cells(panel: Panel) -> list[dict[str, Any]]:
    """Records of a panel's cells, smallest budget first."""
    workload = panel.inputs.workload
    searchers: dict[str, search.Searcher] = {}
    records = []
    for budget_gib in panel.budgets:
        place = dataclasses.replace(panel.inputs, budget_bytes=int(budget_gib * 2**30))
        record: dict[str, Any] = {
            "model": workload.model,
            "max_length": workload.max_length,
            "global_batch_size": workload.global_batch_size,
            "mesh_sizes": place.mesh_sizes,
            "hardware": place.hardware.name,
            "link_gb_s": panel.link_gb_s,
            "budget_gib": budget_gib,
        }
        try:
            found = search.fastest(**vars(place))
        except ConfigError as error:  # nothing else is wrong with checked inputs
            reason = {"status": phase_plots.NOTHING_FITS, "reason": str(error)}
            records.append(record | reason)
            continue
        record |= priced(found) | against_static(place, found)
        record |= attribution(place, found.plan, searchers)
        records.append(record | {"winner": winner(record)})
    return records


def priced(found: search.Found) -> dict[str, Any]:
    """What a plan comes to, and the plan."""
    played = found.timeline
    return {
        "step_s": played.step_s,
        "tokens_per_s": played.tokens_per_s,
        "exposed_s": played.exposed_s,
        "total_bytes": found.forecast.total_bytes,
        "search_s": found.search_s,
        "plan": json.loads(plans.to_json(found.plan)),
    }


def against_static(place: PlanningInputs, found: search.Found) -> dict[str, Any]:
    """The best static setting and the gain over it."""
    statics = static_plans.best(**vars(place))
    fitting = [static for static in statics if static.plan is not None]
    if not fitting:
        return {"status": phase_plots.ONLY_PLANNED, "static": "", "gain": None}
    best = min(fitting, key=lambda static: static.step_s)
    return {
        "status": phase_plots.PLANNED,
        "static": best.name,
        "static_s": best.step_s,
        "gain": best.step_s / found.timeline.step_s,
    }


def attribution(
    place: PlanningInputs,
    plan: Plan,
    searchers: dict[str, search.Searcher],
) -> dict[str, Any]:
    """Which mechanisms a plan uses, and what its step takes without each.

    Args:
      place: Workload, machine, mesh and budget.
      plan: The fastest plan.
      searchers: Searches by mechanism, made when first needed; they serve any budget.

    Returns:
      Shares of layers by mechanism; seconds without it, None where nothing fits.
    """
    shares = {name: m.share(plan) for name, m in mechanisms.ALL.items()}
    used = {name: share for name, share in shares.items() if share > 0}
    without_s: dict[str, float | None] = dict.fromkeys(used)
    for name in used:
        if name not in searchers:
            searchers[name] = search.Searcher(
                place.workload,
                place.hardware,
                mesh_sizes=place.mesh_sizes,
                allowed=mechanisms.ALL[name].without,
            )
        left = searchers[name].fitting(place.budget_bytes)
        if left is not None:
            without_s[name] = passes.step_s(left.plan, place.workload, place.hardware)
    return {"used": used, "without_s": without_s}


def winner(record: dict[str, Any]) -> str:
    """The mechanism without which most is lost, if the plan wins anything."""
    if record["status"] == phase_plots.PLANNED and record["gain"] < LEAST_GAIN:
        return phase_plots.NOTHING_WON
    lost = {
        name: math.inf if seconds is None else seconds / record["step_s"]
        for name, seconds in record["without_s"].items()
    }
    name = max(lost, key=lambda name: lost[name], default="")
    return name if lost.get(name, 0.0) >= LEAST_GAIN else phase_plots.NONE_ALONE


def without(name: str, record: dict[str, Any]) -> float | None:
    """How many times longer a step takes without a mechanism; None if none fits."""
    seconds = record["without_s"].get(name, record["step_s"])
    return None if seconds is None else seconds / record["step_s"]


def summary(record: dict[str, Any]) -> str:
    """A cell in a word."""
    if record["status"] == phase_plots.NOTHING_FITS:
        return record["status"]
    if record["status"] == phase_plots.ONLY_PLANNED:
        return f"{record['status']} ({record['winner']})"
    return f"{record['gain']:.2f}x ({record['winner']})"


def draw(folder: pathlib.Path) -> None:
    """Draws the maps of a folder's cells.

    Raises:
      ConfigError: No cells there.
    """
    path = folder / "cells.jsonl"
    text = path.read_text() if path.is_file() else ""
    if not text:
        found = "no cells" if path.is_file() else "no such file"
        raise ConfigError(f"{path}: {found}; run without --draw_only first")
    records = [json.loads(line) for line in text.splitlines()]
    where = f"({records[0]['hardware']}, links scaled; predicted by the cost model)"
    titles = {name: m.title for name, m in mechanisms.ALL.items()}
    phase_plots.write_winners(
        folder / "mechanisms.png",
        records,
        names=titles,
        title="The mechanism that the planned step needs most, and how many times\n"
        f"longer it takes without {where}",
    )
    phase_plots.write_factors(
        folder / "gain.png",
        records,
        factor=lambda record: record["gain"],
        title=f"Planned step against the best static setting\n{where}",
        label="best static setting's step / planned step",
    )
    for name in DRAWN_ALONE:
        phase_plots.write_factors(
            folder / f"{name}.png",
            records,
            factor=functools.partial(without, name),
            title=f"The planned step without: {titles[name]}\n{where}",
            label="step without / planned step",
        )
    for name in ("gain", "mechanisms", *DRAWN_ALONE):
        print(f"wrote {folder / name}.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
