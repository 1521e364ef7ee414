"""What can be had without a planner: one treatment for all layers, as peers offer it.

Each setting comes in its best variant that fits, priced by the same models: every way
to cut the batch, to save tensors, to hold tables and adapters, gathers merged or not.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning import sites
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts, passes
from mtuner_jax.planning.plans import Plan, Saved, SegmentPlan
from mtuner_jax.planning.searching import frames, options
from mtuner_jax.planning.searching.allowed import Allowed
from mtuner_jax.planning.searching.frames import Frame
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import Workload

_NO_TAIL = Allowed(tail=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticSetting:
    """A setting that needs no planner, in its best variant.

    Attributes:
      name: Such as `fsdp`.
      plan: The variant; None if none fits.
      step_s: Its seconds; 0 without one.
      total_bytes: Per device, of the variant, or the least that any variant takes.
    """

    name: str
    plan: Plan | None
    step_s: float
    total_bytes: int


def settings(axes: Axes) -> dict[str, SegmentPlan]:
    """The settings by name, each as the treatment of one layer.

    `fsdp` keeps nothing, `zero2` whole weights from forward to backward, `hsdp-1/4` a
    quarter of the weights for good and so on, `replicated` everything.
    """
    whole = axes.whole
    if axes.num_devices == 1:
        return {"replicated": _layer(whole, whole)}
    found = {"fsdp": _layer(0, 0), "zero2": _layer(0, whole)}
    for held in range(1, whole):
        devices = axes.sharing(held)
        if 1 < devices < axes.num_devices:
            found[f"hsdp-1/{devices}"] = _layer(held, held)
    return {**found, "replicated": _layer(whole, whole)}


def best(
    workload: Workload,
    hardware: Hardware,
    *,
    mesh_sizes: tuple[int, ...],
    budget_bytes: int,
) -> tuple[StaticSetting, ...]:
    """The best variant of each setting.

    Args:
      workload: Sizes and batch.
      hardware: The machine; its links those of the mesh's axes.
      mesh_sizes: Devices along each mesh axis, slowest link first; () is one device.
      budget_bytes: Bytes that a compiled step may take on a device.
    """
    axes = Axes(data=mesh_sizes or (1,))
    groups: dict[Site, list[Frame]] = {}
    for frame in frames.enumerate_frames(workload, hardware, axes, _NO_TAIL):
        groups.setdefault(sites.main(frame.chosen, workload), []).append(frame)
    return tuple(
        _best(name, list(_variants(layer, hardware, groups)), hardware, budget_bytes)
        for name, layer in settings(axes).items()
    )


def _layer(rest: int, fwd_keep: int) -> SegmentPlan:
    return SegmentPlan(
        num_layers=1, rest_axes=rest, fwd_keep_axes=fwd_keep, bwd_keep_axes=rest
    )


class _Variant(NamedTuple):
    """A plan and the seconds of its step, for sorting."""

    seconds: float
    plan: Plan
    workload: Workload


def _best(
    name: str, variants: list[_Variant], hardware: Hardware, budget_bytes: int
) -> StaticSetting:
    """Variants are tried from the fastest on, until one fits."""
    least = None
    for _, plan, workload in sorted(variants, key=lambda variant: variant.seconds):
        total_bytes = forecasts.forecast(plan, workload).total_bytes
        if total_bytes <= budget_bytes:
            step_s = passes.step_s(plan, workload, hardware)
            return StaticSetting(
                name=name, plan=plan, step_s=step_s, total_bytes=total_bytes
            )
        least = total_bytes if least is None else min(least, total_bytes)
    return StaticSetting(name=name, plan=None, step_s=0.0, total_bytes=least or 0)


def _variants(
    layer: SegmentPlan, hardware: Hardware, groups: dict[Site, list[Frame]]
) -> Iterator[_Variant]:
    """All variants of a setting."""
    for (site, group), saved in itertools.product(groups.items(), Saved):
        if not options.host_holds(site, hardware, saved):
            continue
        workload = site.workload
        segment = dataclasses.replace(
            layer,
            num_layers=workload.num_layers,
            saved=saved,
            prefetch=site.axes.sharing(layer.rest_axes) > 1,
        )
        layers_s = None
        for frame in group:
            plan = frame.plan(workload, (segment,))
            if layers_s is None:
                # The same for the whole group: its frames differ in other things.
                step_s = passes.step_s(plan, workload, hardware)
                layers_s = step_s - frame.seconds
            yield _Variant(frame.seconds + layers_s, plan, workload)
