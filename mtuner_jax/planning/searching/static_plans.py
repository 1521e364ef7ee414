"""What can be had without a planner: one treatment for all layers, as peers offer it.

Each setting comes in its best variant that fits, priced by the same models: every way
to cut the batch, to save tensors, to hold tables and adapters, gathers merged or not.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.costs import forecasts, passes
from mtuner_jax.planning.plans import Plan, Saved, SegmentPlan
from mtuner_jax.planning.searching import frames, options
from mtuner_jax.planning.searching.frames import Frame
from mtuner_jax.planning.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
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


def settings(mesh_sizes: tuple[int, ...]) -> dict[str, SegmentPlan]:
    """The settings by name, each as the treatment of one layer.

    `fsdp` keeps nothing, `zero2` whole weights from forward to backward, `hsdp-1/4` a
    quarter of the weights for good and so on, `replicated` everything.
    """
    whole = len(mesh_sizes)
    if math.prod(mesh_sizes) == 1:
        return {"replicated": _layer(whole, whole)}
    found = {"fsdp": _layer(0, 0), "zero2": _layer(0, whole)}
    for axes in range(1, whole):
        devices = math.prod(mesh_sizes[axes:])
        if 1 < devices < math.prod(mesh_sizes):
            found[f"hsdp-1/{devices}"] = _layer(axes, axes)
    return {**found, "replicated": _layer(whole, whole)}


def best(
    workload: Workload,
    hardware: Hardware,
    *,
    mesh_sizes: tuple[int, ...],
    budget_bytes: int,
) -> tuple[Static, ...]:
    """The best variant of each setting.

    Args:
      workload: Sizes and batch.
      hardware: The machine; its links those of the mesh's axes.
      mesh_sizes: Devices along each mesh axis, slowest link first; () is one device.
      budget_bytes: That a compiled step may take on a device.
    """
    mesh_sizes = mesh_sizes or (1,)
    groups: dict[tuple[int, bool], list[Frame]] = {}
    for frame in frames.enumerate_frames(workload, hardware, mesh_sizes):
        if frame.chosen.tail_chunks == 1:
            key = (frame.chosen.microbatch, frame.merge_gathers)
            groups.setdefault(key, []).append(frame)
    return tuple(
        _best(name, layer, (workload, hardware, groups), budget_bytes)
        for name, layer in settings(mesh_sizes).items()
    )


def _layer(rest: int, fwd_keep: int) -> SegmentPlan:
    return SegmentPlan(
        num_layers=1, rest_axes=rest, fwd_keep_axes=fwd_keep, bwd_keep_axes=rest
    )


def _best(name, layer, priced, budget_bytes):
    """Variants are tried from the fastest on, until one fits."""
    workload, hardware, _ = priced
    variants = sorted(_variants(layer, priced), key=lambda variant: variant[0])
    least = None
    for _, plan in variants:
        total_bytes = forecasts.forecast(plan, workload).total_bytes
        if total_bytes <= budget_bytes:
            step_s = passes.step_s(plan, workload, hardware)
            return Static(name=name, plan=plan, step_s=step_s, total_bytes=total_bytes)
        least = total_bytes if least is None else min(least, total_bytes)
    return Static(name=name, plan=None, step_s=0.0, total_bytes=least or 0)


def _variants(layer, priced) -> Iterator[tuple[float, Plan]]:
    """(seconds of a step, plan) of all variants."""
    workload, hardware, groups = priced
    for group, saved in itertools.product(groups.values(), Saved):
        rows = group[0].chosen.microbatch
        on_host = saved is Saved.LAYER_INPUT_ON_HOST
        if on_host and not options.host_holds(workload, hardware, rows=rows):
            continue
        layers_s = None
        for frame in group:
            plan = _plan(workload, frame, layer, saved)
            if layers_s is None:
                # The same for the whole group: its frames differ in other things.
                step_s = passes.step_s(plan, workload, hardware)
                layers_s = step_s - frame.seconds
            yield frame.seconds + layers_s, plan


def _plan(workload, frame, layer, saved):
    mesh_sizes = frame.chosen.mesh_sizes
    gathers = layer.rest_axes < len(mesh_sizes)
    segment = dataclasses.replace(
        layer,
        num_layers=workload.num_layers,
        saved=saved,
        prefetch=gathers and math.prod(mesh_sizes) > 1,
    )
    return frame.plan(workload, (segment,))
