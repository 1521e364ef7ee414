"""A plan and its price, as text for people and as data for files."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import forecasts
from mtuner_jax.planning.costs.forecasts import Forecast
from mtuner_jax.planning.costs.timelines import Timeline
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import limits
from mtuner_jax.planning.searching.limits import Limit
from mtuner_jax.planning.searching.search import Found
from mtuner_jax.planning.searching.static_plans import StaticSetting
from mtuner_jax.planning.workloads import Workload

VERSION = 1
# Figures of the hardware that step times rest on.
_TIME_FIELDS = (
    "links",
    "matmul_flops_per_s",
    "attention_flops_per_s",
    "memory_bytes_per_s",
    "kernel_s",
    "host_bytes_per_s",
    "overlap_slowdown",
)
_SECONDS = ("step_s", "compute_s", "communication_s", "exposed_s")
_SHOWN_BYTES = 2**30 // 200  # less prints as 0.00 GiB
_ATTENTION_NAMES = {"flash": "Flash", "cudnn": "cuDNN", "xla": "XLA"}
_WON = 1.005  # below it, two decimals of the gain show nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A plan with its price.

    Attributes:
      workload: What is trained.
      hardware: On which machine.
      budget_bytes: Per device, that the compiled step may take.
      plan: How.
      timeline: Its seconds.
      forecast: Its bytes.
      found: What the search said; None where nobody searched.
      statics: What it is compared with; empty where nobody did.
    """

    workload: Workload
    hardware: Hardware
    budget_bytes: int
    plan: Plan
    timeline: Timeline
    forecast: Forecast
    found: Found | None = None
    statics: tuple[StaticSetting, ...] = ()

    @functools.cached_property
    def limit(self) -> Limit | None:
        """What keeps the plan from being faster; takes further searches."""
        return limits.find(self.found) if self.found else None

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that the plan takes for a device."""
        return forecasts.host_bytes(self.plan, self.workload)

    @property
    def fits_host(self) -> bool:
        """Whether that is there, as far as anybody said."""
        limit = self.hardware.host_budget_bytes
        return not limit or self.host_bytes <= limit

    @property
    def fits(self) -> bool:
        """Whether the forecast is within the budget, and the host's memory enough."""
        return self.forecast.total_bytes <= self.budget_bytes and self.fits_host

    @property
    def best_static(self) -> StaticSetting | None:
        """The fastest static setting that fits."""
        fitting = [static for static in self.statics if static.plan is not None]
        return min(fitting, key=lambda static: static.step_s, default=None)

    @property
    def gain(self) -> float | None:
        """Seconds of the best static setting over those of the plan."""
        best = self.best_static
        return best.step_s / self.timeline.step_s if best else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiled step takes on a device, in bytes.

    Attributes:
      device: The card it was compiled for.
      inputs: What the step is called with.
      outputs: Results that reuse no input.
      temporaries: What lives within the step.
      cudnn_workspace: What cuDNN will ask for beside them; an estimate.
      compile_s: Seconds that tracing and compilation took.
    """

    device: str
    inputs: int
    outputs: int
    temporaries: int
    cudnn_workspace: int
    compile_s: float

    @property
    def step_bytes(self) -> int:
        """What XLA allocates."""
        return self.inputs + self.outputs + self.temporaries

    @property
    def total_bytes(self) -> int:
        """What the device needs."""
        return self.step_bytes + self.cudnn_workspace


def assumed(hardware: Hardware) -> tuple[str, ...]:
    """Figures behind a step's seconds that nobody measured, by their field."""
    return tuple(
        field
        for field in _TIME_FIELDS
        if "assumed" in hardware.sources.get(field, "assumed")
    )


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Aligns cells: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def text(report: Report) -> str:
    """All of it for people; a star marks what rests on assumed figures."""
    blocks = [
        _heading(report),
        plans.table(report.plan),
        _times(report),
        _memory(report.forecast, report.budget_bytes),
        _host(report),
        _verdict(report),
    ]
    if report.statics:
        blocks += [_statics(report), gain(report)]
    blocks.append(_notes(report))
    return "\n\n".join(block for block in blocks if block)


def compiled_text(compiled: Compiled, report: Report) -> str:
    """Predicted beside compiled bytes, and whether the compiled step fits."""
    forecast = report.forecast
    parts = (
        ("inputs", forecast.arguments_bytes, compiled.inputs),
        ("temporaries", forecast.temporaries_bytes, compiled.temporaries),
        ("outputs", forecast.outputs, compiled.outputs),
        ("step", forecast.total_bytes, compiled.step_bytes),
    )
    rows = [("per device", "predicted GiB", "compiled GiB", "ratio")]
    for name, predicted, found in parts:
        ratio = f"{predicted / found:.3f}" if found else ""
        rows.append((name, _gib(predicted), _gib(found), ratio))
    rows.append(("cuDNN workspace", "", _gib(compiled.cudnn_workspace), ""))
    rows.append(("with workspace", "", _gib(compiled.total_bytes), ""))
    rows.append(("budget", "", _gib(report.budget_bytes), ""))
    over = compiled.total_bytes - report.budget_bytes
    verdict = f"does not fit: {_gib(over)} GiB above the budget" if over > 0 else "fits"
    return (
        f"compiled for {compiled.device} in {compiled.compile_s:.0f} s\n"
        f"{columns(rows)}\n{verdict}"
    )


def gain(report: Report) -> str:
    """One line: what planning wins over the best static setting, or that it does not.

    Returns:
      Such as `gain 1.21x over hsdp (13.2 s)`, `gain 1.00x: compute-bound, ...`.
    """
    value, best = report.gain, report.best_static
    if value is None or best is None:
        return "gain: no static setting fits"
    if value < 1 / _WON:
        return f"gain {value:.2f}x: slower than {best.name} ({_seconds(best.step_s)})"
    if value < _WON:
        why = f"{report.limit.binds}, " if report.limit else ""
        return f"gain 1.00x: {why}nothing to be won over {best.name}"
    return f"gain {value:.2f}x over {best.name} ({_seconds(best.step_s)})"


def variant(plan: Plan) -> str:
    """A plan of equal layers in a few words: `1 x 4 rows, layer_input`."""
    segment = plan.segments[0]
    words = [f"{plan.accumulation} x {plan.microbatch} rows", segment.saved.value]
    tables = {plan.embedding.value, plan.head.value}
    words += [f"tables {' and '.join(sorted(tables))}", f"adapters {plan.adapters}"]
    if plan.merge_gathers:
        words.append("gathers merged")
    return ", ".join(words)


def to_data(report: Report) -> dict[str, Any]:
    """All of it for JSON: bytes, seconds, and the plan as in its own file."""
    timeline = report.timeline
    return {
        "version": VERSION,
        "workload": dataclasses.asdict(report.workload),
        "hardware": report.hardware.name,
        "device": report.hardware.device,
        "assumed": list(assumed(report.hardware)),
        "budget_bytes": report.budget_bytes,
        "fits": report.fits,
        "plan": json.loads(plans.to_json(report.plan)),
        "forecast": _bytes_by_kind(report.forecast),
        "host": {
            "bytes_per_device": report.host_bytes,
            "bytes_per_host": report.host_bytes * report.hardware.devices_per_host,
            "limit_bytes_per_device": report.hardware.host_budget_bytes or None,
        },
        "timeline": {
            name: getattr(timeline, name) for name in (*_SECONDS, "tokens_per_s")
        },
        "binds": report.limit.binds if report.limit else "",
        "reason": report.limit.reason if report.limit else "",
        "statics": [_static_data(static) for static in report.statics],
        "gain": report.gain,
        "num_scored": report.found.num_scored if report.found else 0,
        "search_s": report.found.search_s if report.found else 0.0,
    }


def _bytes_by_kind(forecast: Forecast) -> dict[str, int]:
    return {**dataclasses.asdict(forecast), "total": forecast.total_bytes}


def _static_data(static: StaticSetting) -> dict[str, Any]:
    return {
        "name": static.name,
        "fits": static.plan is not None,
        "step_s": static.step_s,
        "total_bytes": static.total_bytes,
        "plan": json.loads(plans.to_json(static.plan)) if static.plan else None,
    }


def _heading(report: Report) -> str:
    workload, hardware = report.workload, report.hardware
    mesh = " x ".join(map(str, report.plan.mesh_sizes))
    adapters = f"{workload.num_adapter_weights:,} adapter weights"
    attention = _ATTENTION_NAMES[workload.attention]
    return (
        f"{workload.model}: {workload.num_layers} layers, {adapters}, {attention} "
        f"attention; {workload.global_batch_size} rows of {workload.max_length:,} "
        f"tokens a step\n"
        f"hardware {hardware.name}: mesh {mesh} of {hardware.device}"
    )


def _times(report: Report) -> str:
    timeline, star = report.timeline, _star(report.hardware)
    labels = ("step", "computation", "communication", "not overlapped")
    rows = [
        (label, f"{_seconds(getattr(timeline, name))}{star}")
        for label, name in zip(labels, _SECONDS, strict=True)
    ]
    rate = f"{timeline.tokens_per_s:,.0f} tokens/s{star}"
    return f"{columns(rows)}\n{rate}"


def _memory(forecast: Forecast, budget_bytes: int) -> str:
    kinds = dataclasses.asdict(forecast)
    shown = {kind: size for kind, size in kinds.items() if size >= _SHOWN_BYTES}
    other = forecast.total_bytes - sum(shown.values())
    rows = [("per device", "GiB")]
    rows += [(kind.replace("_", " "), _gib(size)) for kind, size in shown.items()]
    rows += [("other", _gib(other)), ("total", _gib(forecast.total_bytes))]
    rows.append(("budget", _gib(budget_bytes)))
    return columns(rows)


def _host(report: Report) -> str:
    """Pinned host memory, where a plan takes any."""
    machine, taken = report.hardware, report.host_bytes
    if not taken:
        return ""
    devices = machine.devices_per_host
    line = (
        f"pinned host memory: {_gib(taken)} GiB per device, {_gib(devices * taken)} "
        f"GiB per host of {devices}"
    )
    if not machine.host_memory_bytes:
        return f"{line}; hardware {machine.name} does not say what a host has"
    limit = devices * machine.host_budget_bytes
    return f"{line}, of {_gib(limit)} GiB that may be pinned"


def _verdict(report: Report) -> str:
    lines = []
    if not report.fits_host:
        lines.append(
            "does not fit: the host has less memory than layer_input_on_host pins; "
            "plan again, or lower max_length"
        )
    over = report.forecast.total_bytes - report.budget_bytes
    if over > 0:
        lines.append(
            f"does not fit: {_gib(over)} GiB above the budget; plan again, or raise "
            "memory_budget"
        )
    if report.limit:
        lines.append(f"{report.limit.binds}: {report.limit.reason}")
    return "\n".join(lines)


def _statics(report: Report) -> str:
    rows = [("static setting", "best variant", "step", "GiB")]
    for static in report.statics:
        if static.plan is None:
            least = f"does not fit: needs {_gib(static.total_bytes)} GiB"
            rows.append((static.name, least, "", ""))
            continue
        rows.append(
            (
                static.name,
                variant(static.plan),
                f"{_seconds(static.step_s)}{_star(report.hardware)}",
                _gib(static.total_bytes),
            )
        )
    return columns(rows, left=2)


def _notes(report: Report) -> str:
    lines = []
    if report.found:
        scored, search_s = report.found.num_scored, report.found.search_s
        lines.append(f"{scored:,} plans compared in {search_s:.1f} s")
    fields = assumed(report.hardware)
    if fields:
        lines.append(
            f"* rests on figures of {report.hardware.name} that nobody measured: "
            f"{', '.join(fields)}; scripts/calibrate.py measures a machine"
        )
    return "\n".join(lines)


def _star(hardware: Hardware) -> str:
    return " *" if assumed(hardware) else ""


def _seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
