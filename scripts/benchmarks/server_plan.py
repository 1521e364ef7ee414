"""Makes the list of runs on a server: cases, plans, ablations, peers, their order.

Used by `server_runs.py plan`. Needs no GPU; the same request gives the same files.
"""

import argparse
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from models import llama_family
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import search, static_plans
from mtuner_jax.runs import opening, requests
from scripts.benchmarks import ablations, peer_runs, run_lists
from scripts.benchmarks.run_lists import Kind, Run, RunList, Setting

PLANNED, STATIC = "planned", "static"
SLOW, FAST = "slow", "fast"
# Of a cap, given to the planner: the slow link's program holds up to a layer more than
# the forecast says (docs/benchmarks/h200-planned.md).
BUDGET_SHARE = 0.97
_NUM_STATICS = 2
_DIGITS = 2
_GAIN_STEP, _MOST_GAIN = 0.05, 99.0
# A run before its steps: weights, first call; compiling, for each segment beyond one.
_LOAD_S, _COMPILE_S, _SEGMENT_S = 15.0, 15.0, 6.0
_LONG_STEP_S = 2.0  # profiled once only, see engines/profile_guided.py
_MOST_TAIL_STEP_S = 40.0  # a longer one is not worth the machine


class Cell(NamedTuple):
    """A case with what is planned for it.

    Attributes:
      case: (setting, model, max_length, global_batch_size).
      place: What plans are made for.
      planned: The fastest plan.
      statics: (name, plan) of the fastest static plans, best first.
    """

    case: tuple[str, str, int, int]
    place: ablations.Place
    planned: Plan
    statics: tuple[tuple[str, Plan], ...]

    @property
    def gain(self) -> float:
        """How many times faster than the best static plan; infinite without one."""
        if not self.statics:
            return math.inf
        return self.place.step_s(self.statics[0][1]) / self.place.step_s(self.planned)


class Ranked(NamedTuple):
    """A run and where it belongs.

    Attributes:
      round: Of the model under its setting, 0 for its case with most to be won.
      place: Of the setting.
      part: Within the round of a setting.
      gain: In time that is predicted, negative, so that most comes first.
      run: The run.
    """

    round: int
    place: int
    part: int
    gain: float
    run: Run


def make(args: argparse.Namespace, folder: pathlib.Path) -> RunList:
    """Plans all cases and writes list, plans and machines into the folder.

    Raises:
      ConfigError: An unknown machine or model, or a cap that the card does not have.
    """
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    mesh = meshes.parse(mesh_text(args.devices))
    described = {name: machine(args, mesh, name) for name in args.settings}
    for name, found in described.items():
        machines.write(folder / machine_file(name), found)
    cells, unplanned = [], []
    for case in itertools.product(
        args.settings, args.models, args.max_lengths, args.global_batch_sizes
    ):
        place = _place(args, mesh, described, case)
        try:
            cells.append(_cell(case, place))
            print(f"{describe(case)}: {cells[-1].gain:.2f}x predicted", flush=True)
        except ConfigError as error:
            unplanned.append((describe(case), str(error)))
            print(f"{describe(case)}: {error}", flush=True)
    ranked = sorted(
        _ranked(args, mesh, cells, folder), key=lambda r: (r[:4], r[4].name)
    )
    listed = RunList(
        mesh=mesh_text(args.devices),
        num_devices=args.devices,
        platform=args.platform,
        settings=tuple(_setting(args, name, described[name]) for name in args.settings),
        runs=tuple(place.run for place in ranked),
        unplanned=tuple(unplanned),
    )
    (folder / run_lists.FILE).write_text(run_lists.to_json(listed), encoding="utf-8")
    return listed


def mesh_text(devices: int) -> str:
    """The mesh of so many devices in axes as small as possible, for `--mesh`."""
    return "x".join(map(str, meshes.parse("auto", num_devices=devices).sizes))


def machine_file(setting: str) -> str:
    """Name of the file with a setting's machine."""
    return f"hardware-{setting}.json"


def describe(case: tuple[str, str, int, int]) -> str:
    """A case for people."""
    setting, model, max_length, rows = case
    return f"{setting} {pathlib.Path(model).name} {rows} x {max_length}"


def machine(args: argparse.Namespace, mesh: meshes.MeshSpec, setting: str) -> Hardware:
    """The machine of a setting, its pool the cap.

    Raises:
      ConfigError: Nothing of that name, or a cap that the card does not have.
    """
    name = getattr(args, f"{setting}_hardware")
    if name == "auto":
        slow = {"NCCL_P2P_DISABLE": str(int(setting == SLOW))}
        # Fewer cards of a larger machine are priced as they are in it.
        count = args.devices if args.devices == 2 else 8
        name = machines.name_for("NVIDIA H200", count, environ=slow)
    found = machines.find(name, mesh_sizes=mesh.sizes, mesh=mesh.name)
    pool_bytes = int(_pool_gib(args, setting, found) * 2**30)
    if not requests.LEAST_BUDGET_BYTES <= pool_bytes <= found.memory_bytes:
        raise ConfigError(
            f"{setting}_cap={pool_bytes / 2**30:g} GiB per device: {found.device} has "
            f"{found.memory_bytes / 2**30:.1f}; from 1/16 to that, or 0 for no cap"
        )
    margin = f"{1 - BUDGET_SHARE:.0%} of the pool, see docs/server-runs.md"
    return dataclasses.replace(
        found,
        pool_fraction=pool_bytes / found.memory_bytes,
        reserve_bytes=pool_bytes - int(BUDGET_SHARE * pool_bytes),
        sources={**found.sources, "pool_fraction": "the cap", "reserve_bytes": margin},
    )


def _pool_gib(args, setting, found):
    cap = getattr(args, f"{setting}_cap")
    return cap or args.uncapped_fraction * found.memory_bytes / 2**30


def _setting(args, name, found) -> Setting:
    return Setting(
        name=name,
        environment={
            "NCCL_P2P_DISABLE": str(int(name == SLOW)),
            "NCCL_NVLS_ENABLE": "0",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{found.pool_fraction:.4f}",
        },
        pool_gib=round(found.pool_fraction * found.memory_bytes / 2**30, _DIGITS),
        capped=bool(getattr(args, f"{name}_cap")),
        hardware=found.name,
    )


def _cell(case, place: ablations.Place) -> Cell:
    """Raises a ConfigError if no plan fits."""
    priced = (place.workload, place.hardware)
    limits = {"mesh_sizes": place.mesh_sizes, "budget_bytes": place.budget_bytes}
    planned = search.fastest(*priced, **limits).plan
    found = [s for s in static_plans.best(*priced, **limits) if s.plan is not None]
    fastest = sorted(found, key=lambda static: (static.step_s, static.name))
    return Cell(
        case=case,
        place=place,
        planned=planned,
        statics=tuple((s.name, s.plan) for s in fastest[:_NUM_STATICS] if s.plan),
    )


def _place(args, mesh, machines, case) -> ablations.Place:
    setting, model, max_length, rows = case
    shape = opening.shape(llama_family.FAMILY, model)
    if args.layers:
        shape = shape.with_layers(args.layers)
    on_cpu = args.platform == "cpu"
    request = requests.StepRequest(
        name=model,
        mesh=mesh,
        global_batch_size=rows,
        max_length=max_length,
        dtype="float32" if on_cpu else "bfloat16",
        attention="xla" if on_cpu else "cudnn",
    )
    inputs = requests.make(shape, request)
    return ablations.Place(
        workload=inputs.workload,
        hardware=machines[setting],
        mesh_sizes=inputs.mesh_sizes,
        budget_bytes=machines[setting].budget_bytes,
    )


def _ranked(args, mesh, cells: Sequence[Cell], folder) -> Iterator[Ranked]:
    """All runs with their ranks."""
    machines = {cell.case[0]: cell.place.hardware for cell in cells}
    rounds = _rounds(cells)
    order = {name: place for place, name in enumerate(args.settings)}
    for name, place in order.items():
        links = Run(name=f"{name}/links", kind=Kind.LINKS, setting=name)
        yield Ranked(0, place, 0, 0.0, links)
    for cell in cells:
        first, place = rounds[cell.case], order[cell.case[0]]
        for number, run in enumerate(_steps(args, cell, folder)):
            later = number > 1  # the second static plan
            yield Ranked(first + later, place, 1, -min(cell.gain, _MOST_GAIN), run)
    for run in _fillings(args, cells, folder):
        yield Ranked(0, order[run.setting], 2, 0.0, run)
    for run in _tails(args, mesh, machines, folder):
        yield Ranked(0, order[run.setting], 3, 0.0, run)
    for run, least in peer_runs.listed(args, cells, rounds):
        yield Ranked(least, order[run.setting], 4, 0.0, run)


def _rounds(cells):
    """By case: its number among those of its model and setting, most gain first."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.case[:2], []).append(cell)
    found = {}
    for group in groups.values():
        ordered = sorted(
            group,
            key=lambda c: (-_steps_of_gain(c), c.place.step_s(c.planned), c.case),
        )
        found |= {cell.case: number for number, cell in enumerate(ordered)}
    return found


def _steps_of_gain(cell: Cell) -> int:
    """Gains that differ by less are the same, and the shorter step decides."""
    return round(min(cell.gain, _MOST_GAIN) / _GAIN_STEP)


def _steps(args, cell: Cell, folder) -> list[Run]:
    """The planned run and the best static ones; one plan is run once."""
    named = [(f"{STATIC} {name}", plan) for name, plan in cell.statics]
    return [
        _step(args, cell.case, cell.place, variant, folder)
        for variant in _by_plan([(PLANNED, cell.planned), *named])
    ]


def _fillings(args, cells, folder) -> list[Run]:
    """The fillings of the case in which progressive filling wins most, by model."""
    best: dict[str, tuple[list[float], Cell, dict[str, Plan]]] = {}
    for cell in cells:
        found = ablations.fillings(cell.place) if cell.case[0] == SLOW else {}
        several = len(cell.place.mesh_sizes) > 1
        alike = len(set(found.values())) < len(found)
        if not found or (several and alike):
            continue
        nothing_s, one_s, best_s = (cell.place.step_s(plan) for plan in found.values())
        gains = [round(seconds / best_s, _DIGITS) for seconds in (one_s, nothing_s)]
        if gains > best.get(cell.case[1], ([1.0, 1.0],))[0]:
            best[cell.case[1]] = (gains, cell, found)
    return [
        _step(args, cell.case, cell.place, variant, folder, trace=True)
        for _, cell, found in best.values()
        for variant in _by_plan(found.items())
    ]


def _by_plan(named: Iterable[tuple[str, Plan]]) -> list[tuple[Plan, tuple[str, ...]]]:
    """(plan, all its names), for plans that are run once under several names."""
    names: dict[Plan, list[str]] = {}
    for name, plan in named:
        names.setdefault(plan, []).append(name)
    return [(plan, tuple(own)) for plan, own in names.items()]


def _tails(args, mesh, machines, folder) -> list[Run]:
    """With and without a tail, of the last model, in the batch where it wins most."""
    best_gain, best = 1.0, []
    if SLOW not in machines:
        return best
    for rows in args.tail_rows:
        shape = (min(args.max_lengths), rows * args.devices)
        case = (SLOW, args.models[-1], *shape)
        place = _place(args, mesh, machines, case)
        found = ablations.tails(place)
        if not found:
            continue
        without_s, with_s = (place.step_s(plan) for plan in found.values())
        if without_s / with_s > best_gain and without_s < _MOST_TAIL_STEP_S:
            best_gain, best = without_s / with_s, [(case, place, found)]
    return [
        _step(args, case, place, (plan, (name,)), folder)
        for case, place, found in best
        for name, plan in found.items()
    ]


def _step(args, case, place, variant, folder, *, trace=False) -> Run:
    """A run of a plan; writes the plan."""
    plan, roles = variant
    played = timelines.replay(plan, place.workload, place.hardware)
    forecast = forecasts.forecast(plan, place.workload)
    setting, model, max_length, rows = case
    shape = f"{pathlib.Path(model).name}/{rows}x{max_length}"
    name = f"{setting}/{shape}/{roles[0].replace(' ', '-')}"
    file = f"plans/{name.replace('/', '-')}.json"
    (folder / file).write_text(plans.to_json(plan), encoding="utf-8")
    return Run(
        name=name,
        kind=Kind.STEP,
        setting=setting,
        model=model,
        max_length=max_length,
        global_batch_size=rows,
        roles=roles,
        plan=file,
        arguments=_arguments(args, case, trace=trace),
        predicted_ms=round(1e3 * played.step_s, _DIGITS),
        predicted_gib=round(forecast.total_bytes / 2**30, _DIGITS),
        predicted_communication_ms=round(1e3 * played.communication_s, _DIGITS),
        expected_s=round(_expected_s(args, plan, played.step_s), 1),
    )


def _arguments(args, case, *, trace):
    """Flags of bench.py, but for files, mesh and platform."""
    _, model, max_length, rows = case
    flags = ["--random_init", "--model", model, "--max_length", str(max_length)]
    flags += ["--global_batch_size", str(rows), "--seconds", f"{args.seconds:g}"]
    if args.platform == "cpu":
        flags += ["--dtype", "float32"]
    if args.layers:
        flags += ["--layers", str(args.layers)]
    return (*flags, *(["--trace"] if trace else []))


def _expected_s(args, plan, step_s):
    """Loading, compiling twice, and all steps: as bench.py and its guided step do."""
    profiled = 1 if step_s > _LONG_STEP_S else 3
    timed = max(3, math.ceil(args.seconds / step_s))
    compile_s = _COMPILE_S + _SEGMENT_S * (len(plan.segments) - 1)
    return _LOAD_S + 2 * compile_s + (2 + profiled + 2 + timed + 1) * step_s
