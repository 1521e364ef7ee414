"""Makes the list of runs on a server: cases, plans, ablations, peers, their order.

The step `plan` of server_runs.py. Needs no GPU; the same request gives the same files.
"""

import itertools
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from models import llama_family
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.plans import Plan
from mtuner_jax.runs import requests, shapes
from scripts.benchmarks import (
    ablations,
    peer_runs,
    planned_cases,
    run_lists,
    server_machines,
)
from scripts.benchmarks.comparison_tables import PLANNED, STATIC
from scripts.benchmarks.planned_cases import PlannedCase
from scripts.benchmarks.run_lists import Case, Kind, ListedRun, RunList
from scripts.benchmarks.server_machines import SLOW, ListConfig

_DIGITS = 2
# A run before its steps: weights, first call; compiling, for each segment beyond one.
_LOAD_S, _COMPILE_S, _SEGMENT_S = 15.0, 15.0, 6.0
_LONG_STEP_S = 2.0  # profiled once only, see engines/profile_guided.py
_MOST_TAIL_STEP_S = 40.0  # a longer one is not worth the machine


class Rank(NamedTuple):
    """Where a run belongs in the list.

    Attributes:
      round: Of the model under its setting, 0 for its case with most to be won.
      setting: The setting's number.
      part: Within the round of a setting.
      gain: In time that is predicted, negative, so that most comes first.
      name: The run's.
    """

    round: int
    setting: int
    part: int
    gain: float
    name: str


def make(config: ListConfig) -> RunList:
    """Plans all cases and writes list, plans and machines into the folder.

    Raises:
      ConfigError: An unknown machine or model, or a cap that the card does not have.
    """
    return _Lister(config).make()


class _Lister:
    """A request with the machines of its settings."""

    def __init__(self, config: ListConfig):
        self.config = config
        self.folder = pathlib.Path(config.folder)
        self.mesh = meshes.parse(server_machines.mesh_text(config.devices))
        self.machines = {
            name: server_machines.machine(config, self.mesh, name)
            for name in config.settings
        }

    def make(self) -> RunList:
        """Plans, ranks and writes."""
        (self.folder / "plans").mkdir(parents=True, exist_ok=True)
        for name, found in self.machines.items():
            machines.write(self.folder / server_machines.machine_file(name), found)
        planned, unplanned = self.cases()
        ranked = sorted(self.ranked(planned), key=lambda pair: pair[0])
        listed = RunList(
            mesh=server_machines.mesh_text(self.config.devices),
            num_devices=self.config.devices,
            platform=self.config.platform,
            settings=tuple(
                server_machines.setting(self.config, name, found)
                for name, found in self.machines.items()
            ),
            runs=tuple(run for _, run in ranked),
            unplanned=tuple(unplanned),
        )
        text = run_lists.FORMAT.to_json(listed)
        (self.folder / run_lists.FILE).write_text(text, encoding="utf-8")
        return listed

    def cases(self) -> tuple[list[PlannedCase], list[tuple[str, str]]]:
        """The cases that have a plan, and (case, reason) of those that have none."""
        config, planned, unplanned = self.config, [], []
        for setting, cell in itertools.product(config.settings, config.cells()):
            case = Case(setting, *cell)
            place = self.place(case)
            try:
                planned.append(planned_cases.make(case, place))
                print(f"{case}: {planned[-1].gain:.2f}x predicted", flush=True)
            except ConfigError as error:
                unplanned.append((str(case), str(error)))
                print(f"{case}: {error}", flush=True)
        return planned, unplanned

    def place(self, case: Case) -> ablations.Place:
        """What plans of a case are made for."""
        shape = shapes.shape(llama_family.FAMILY, case.model)
        if self.config.layers:
            shape = shape.with_layers(self.config.layers)
        on_cpu = self.config.platform == "cpu"
        request = requests.StepRequest(
            name=case.model,
            mesh=self.mesh,
            global_batch_size=case.global_batch_size,
            max_length=case.max_length,
            dtype="float32" if on_cpu else "bfloat16",
            attention="xla" if on_cpu else "cudnn",
        )
        inputs = requests.make(shape, request)
        hardware = self.machines[case.setting]
        return ablations.Place(
            workload=inputs.workload,
            hardware=hardware,
            mesh_sizes=inputs.mesh_sizes,
            budget_bytes=hardware.budget_bytes,
        )

    def ranked(self, cases: Sequence[PlannedCase]) -> Iterator[tuple[Rank, ListedRun]]:
        """All runs with their ranks."""
        rounds = planned_cases.rounds(cases)
        order = {name: number for number, name in enumerate(self.config.settings)}

        def rank(
            run: ListedRun, number: int, part: int, gain: float = 0.0
        ) -> tuple[Rank, ListedRun]:
            return Rank(number, order[run.setting], part, gain, run.name), run

        for name in order:
            yield rank(
                ListedRun(name=f"{name}/links", kind=Kind.LINKS, setting=name), 0, 0
            )
        for one in cases:
            named = [(f"{STATIC} {name}", plan) for name, plan in one.statics]
            steps = self.steps(one.case, one.place, [(PLANNED, one.planned), *named])
            for number, run in enumerate(steps):
                later = number > 1  # the second static plan
                gain = -min(one.gain, planned_cases.MOST_GAIN)
                yield rank(run, rounds[one.case] + later, 1, gain)
        for run in self.fillings(cases):
            yield rank(run, 0, 2)
        for run in self.tails():
            yield rank(run, 0, 3)
        for run, least in peer_runs.listed(cases, rounds, devices=self.config.devices):
            yield rank(run, least, 4)

    def fillings(self, cases: Iterable[PlannedCase]) -> Iterator[ListedRun]:
        """The fillings of the case in which progressive filling wins most, by model."""
        best: dict[str, tuple[list[float], PlannedCase, dict[str, Plan]]] = {}
        for one in cases:
            found = ablations.fillings(one.place) if one.case.setting == SLOW else {}
            several = len(one.place.mesh_sizes) > 1
            alike = len(set(found.values())) < len(found)
            if not found or (several and alike):
                continue
            nothing_s, one_s, best_s = (
                one.place.step_s(plan) for plan in found.values()
            )
            gains = [round(seconds / best_s, _DIGITS) for seconds in (one_s, nothing_s)]
            if gains > best.get(one.case.model, ([1.0, 1.0],))[0]:
                best[one.case.model] = (gains, one, found)
        for _, one, found in best.values():
            yield from self.steps(one.case, one.place, found.items(), trace=True)

    def tails(self) -> list[ListedRun]:
        """With and without a tail, of the last model, in the best batch for a tail."""
        best_gain, best = 1.0, []
        for rows in self.config.tail_rows if SLOW in self.machines else ():
            case = Case(
                SLOW,
                self.config.models[-1],
                min(self.config.max_lengths),
                rows * self.config.devices,
            )
            place = self.place(case)
            found = ablations.tails(place)
            if not found:
                continue
            without_s, with_s = (place.step_s(plan) for plan in found.values())
            if without_s / with_s > best_gain and without_s < _MOST_TAIL_STEP_S:
                best_gain, best = without_s / with_s, [(case, place, found)]
        return [
            run
            for case, place, found in best
            for run in self.steps(case, place, found.items())
        ]

    def steps(
        self,
        case: Case,
        place: ablations.Place,
        named: Iterable[tuple[str, Plan]],
        *,
        trace: bool = False,
    ) -> list[ListedRun]:
        """A run of each plan, once though it has several names; writes the plans."""
        roles: dict[Plan, list[str]] = {}
        for name, plan in named:
            roles.setdefault(plan, []).append(name)
        runs = []
        for plan, own in roles.items():
            played = timelines.replay(plan, place.workload, place.hardware)
            forecast = forecasts.forecast(plan, place.workload)
            shape = f"{case.shape}/{case.global_batch_size}x{case.max_length}"
            name = f"{case.setting}/{shape}/{own[0].replace(' ', '-')}"
            file = f"plans/{name.replace('/', '-')}.json"
            (self.folder / file).write_text(plans.to_json(plan), encoding="utf-8")
            runs.append(
                ListedRun(
                    **case._asdict(),
                    name=name,
                    kind=Kind.STEP,
                    roles=tuple(own),
                    plan=file,
                    arguments=self.arguments(case, trace=trace),
                    predicted_ms=round(1e3 * played.step_s, _DIGITS),
                    predicted_gib=round(forecast.total_bytes / 2**30, _DIGITS),
                    predicted_communication_ms=round(
                        1e3 * played.communication_s, _DIGITS
                    ),
                    expected_s=round(self.expected_s(plan, played.step_s), 1),
                )
            )
        return runs

    def arguments(self, case: Case, *, trace: bool) -> tuple[str, ...]:
        """Flags of bench.py, but for files, mesh and platform."""
        flags = ["--random_init", "--packing=false", "--model", case.model]
        flags += ["--max_length", str(case.max_length)]
        flags += ["--global_batch_size", str(case.global_batch_size)]
        flags += ["--seconds", f"{self.config.seconds:g}"]
        if self.config.platform == "cpu":
            flags += ["--dtype", "float32"]
        if self.config.layers:
            flags += ["--layers", str(self.config.layers)]
        return (*flags, *(["--trace"] if trace else []))

    def expected_s(self, plan: Plan, step_s: float) -> float:
        """Loading, compiling twice, all steps: as bench.py and its guided step do."""
        profiled = 1 if step_s > _LONG_STEP_S else 3
        timed = max(3, math.ceil(self.config.seconds / step_s))
        compile_s = _COMPILE_S + _SEGMENT_S * (len(plan.segments) - 1)
        return _LOAD_S + 2 * compile_s + (2 + profiled + 2 + timed + 1) * step_s
