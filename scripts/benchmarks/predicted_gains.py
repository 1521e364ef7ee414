"""Writes what planning is predicted to win on the paper's machine, as a document.

python scripts/benchmarks/predicted_gains.py
python scripts/benchmarks/predicted_gains.py --models llama2-7b --output -

Each step is planned and compared with the best static setting and with plain FSDP, in
their best variants, at the same global batch on the same machine. Nothing is measured.
"""

import dataclasses
import itertools
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mtuner_jax.devices import meshes
from mtuner_jax.numbers import tables
from mtuner_jax.planning import reports
from mtuner_jax.planning.costs import timelines
from mtuner_jax.planning.costs.timelines import Timeline
from mtuner_jax.planning.searching.static_plans import StaticSetting
from mtuner_jax.runs import pricing
from mtuner_jax.runs.requests import PlanningInputs
from mtuner_jax.settings import programs
from scripts.benchmarks import grids

OUTPUT = "docs/benchmarks/predicted-pcie8.md"
PLAIN = "fsdp"
MESH = meshes.PRESETS["pcie8"]
# What the mTuner paper reports of this machine.
PAPER = {
    "gain": "28.3 % on average, 51.2 % at most, over DeepSpeed",
    "communication_cut": "41 % less communication",
}
_SUMMED = {
    "gain": "gain over",
    "communication_cut": "communication cut against",
    "exposed_cut": "exposed cut against",
}
_HEAD = (
    "model | tokens: | batch: | best static | static s: | FSDP s: | planned s: | "
    "gain over static: | over FSDP: | communication cut against static: | "
    "against FSDP: | exposed cut against static: | against FSDP:"
)
_TEXT = """\
# What planning is predicted to win on `pcie8`

<!-- Written by scripts/benchmarks/predicted_gains.py; change that, not this. -->

**Predictions of the cost model, nothing here was measured**, for 8 x A100-PCIe-40GB
with the figures of the preset `pcie8`, most of which are assumed
([../hardware.md](../hardware.md)). LoRA r=16 on all linears, bfloat16, cuDNN attention.
Written by

    {command}

*Static*: the fastest setting that treats all layers alike and fits. *FSDP*: nothing
kept. Both are taken in the best variant of this engine (saved tensors, cut of the
batch, tables, adapters, merged gathers; gathers one layer ahead), at the same global
batch and budget as the plan. Gain: their step over the planned one, less 1.
Communication: seconds in which collectives run; exposed: seconds in which nothing
computes. A cut is the share of them that is gone; a negative one means more.

{table}
## Beside the paper

{summary}
The paper's speed is measured against DeepSpeed, each at its largest batch; its cut is
that of progressive residency against none. FSDP here is another baseline than
DeepSpeed: it has the same kernels, merged gathers, profile-guided overlap and layer
inputs on the host; and where a model fits whole (7B on 40 GB), the best static
setting needs no gathers at all. So the columns stand beside each other, they do not
confirm each other. Where plain sharding hides its gathers behind computation, the
gain is what recomputing less wins.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GainsConfig(grids.GridConfig):
    """The steps of the document; without any flag, that of the repository.

    Attributes:
      output: The file to write; `-` prints it.
    """

    output: str = OUTPUT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Against:
    """A planned step beside a static one.

    Attributes:
      static: The setting.
      gain: Its seconds over the planned ones, less 1.
      communication_cut: Share of its communication that is gone.
      exposed_cut: Share of its seconds without computation that is gone.
    """

    static: StaticSetting
    gain: float
    communication_cut: float
    exposed_cut: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A step with its price and its baselines; None where a setting does not fit."""

    report: reports.Report
    best: Against | None
    plain: Against | None


def main(argv: list[str]) -> int:
    """Plans all steps and writes the document; returns the exit code."""

    def document(config: GainsConfig) -> None:
        found = []
        for inputs in grids.inputs(config, MESH, hardware=MESH.name):
            found.append(compared(inputs))
            print(line(found[-1]), file=sys.stderr, flush=True)
        command = " ".join(["python scripts/benchmarks/predicted_gains.py", *argv])
        text = _TEXT.format(command=command, table=table(found), summary=summary(found))
        if config.output == "-":
            sys.stdout.write(text)
        else:
            pathlib.Path(config.output).write_text(text, encoding="utf-8")

    return programs.run(argv, GainsConfig, document, description=__doc__)


def compared(inputs: PlanningInputs) -> Comparison:
    """Plans a step and compares it.

    Raises:
      ConfigError: No plan fits.
    """
    report = pricing.search_plan(inputs)
    plain = next(static for static in report.statics if static.name == PLAIN)
    return Comparison(
        report=report,
        best=against(report, report.best_static),
        plain=against(report, plain),
    )


def against(report: reports.Report, static: StaticSetting | None) -> Against | None:
    """The plan of a report beside a static setting; None if that does not fit."""
    if static is None or static.plan is None:
        return None
    planned = report.timeline
    played = timelines.replay(static.plan, report.workload, report.hardware)
    return Against(
        static=static,
        gain=played.step_s / planned.step_s - 1.0,
        communication_cut=_cut(played, planned, "communication_s"),
        exposed_cut=_cut(played, planned, "exposed_s"),
    )


def _cut(before: Timeline, after: Timeline, field: str) -> float:
    return 1.0 - getattr(after, field) / getattr(before, field)


def table(found: Iterable[Comparison]) -> str:
    """One line a step, in Markdown."""
    return tables.markdown(_HEAD, map(_cells, found))


def _cells(one: Comparison) -> Sequence[str]:
    workload, best, plain = one.report.workload, one.best, one.plain
    both = (best, plain)
    seconds = [f"{found.static.step_s:.2f}" if found else "-" for found in both]
    shares = [
        _percent(getattr(found, field)) if found else "-"
        for field in ("gain", "communication_cut", "exposed_cut")
        for found in both
    ]
    return (
        workload.model,
        f"{workload.max_length}",
        f"{workload.global_batch_size}",
        f"`{best.static.name}`" if best else "none fits",
        *seconds,
        f"{one.report.timeline.step_s:.2f}",
        *shares,
    )


def summary(found: Sequence[Comparison]) -> str:
    """Means, medians and maxima beside the paper's figures, in Markdown."""
    rows = []
    baselines = {
        "the best static setting": [one.best for one in found],
        "FSDP": [one.plain for one in found],
    }
    for (field, title), (name, gains) in itertools.product(
        _SUMMED.items(), baselines.items()
    ):
        values = [getattr(one, field) for one in gains if one is not None]
        if values:
            numbers = statistics.fmean(values), statistics.median(values), max(values)
            words = map(_percent, numbers)
            rows.append([f"{title} {name}", *words, PAPER.get(field, "")])
    return tables.markdown("predicted | mean: | median: | most: | paper", rows)


def line(one: Comparison) -> str:
    """A comparison for the terminal."""
    workload = one.report.workload
    return (
        f"{workload.model} {workload.global_batch_size} x {workload.max_length}: "
        f"{reports.gain(one.report)}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
