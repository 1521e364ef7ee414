"""What to say when no plan fits: how much is needed, and what would free most."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware.machines import Hardware, Link
from mtuner_jax.numbers import sizes
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import frames, options
from mtuner_jax.planning.searching.allowed import Allowed
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import Workload

_SHOWN = 3
_NO_COPIES = Allowed(fwd_copies=False, bwd_copies=False)


def error(
    workload: Workload, hardware: Hardware, axes: Axes, *, budget_bytes: int
) -> ConfigError:
    """The error for a budget that no plan keeps, with the knobs that free most."""
    needed = least_bytes(workload, hardware, axes)
    changes = sorted(
        (least_bytes(change.workload, change.hardware, change.axes), change.text)
        for change in _changes(workload, hardware, axes)
    )
    knobs = [
        f"{text} (then {sizes.gib(num_bytes)})"
        for num_bytes, text in changes[:_SHOWN]
        if num_bytes < needed
    ]
    devices = "x".join(map(str, axes.data))
    return ConfigError(
        f"no plan fits: {workload.model} with max_length={workload.max_length} on "
        f"{devices} devices needs at least {needed:,} bytes ({sizes.gib(needed)}) per "
        f"device, the budget is {budget_bytes:,} ({sizes.gib(budget_bytes)}); raise "
        f"memory_budget, or {', or '.join(knobs)}; a smaller global batch frees next "
        "to nothing"
    )


def least_bytes(workload: Workload, hardware: Hardware, axes: Axes) -> int:
    """Bytes per device of the smallest plan: single rows, one treatment of all layers.

    Copies only add to what a layer takes, so the smallest plan keeps none, and then
    bytes add up over layers: mixing treatments cannot be smaller.
    """
    rows = -(-workload.global_batch_size // axes.num_devices)
    site = Site(workload=workload, axes=axes, rows=1, merge_gathers=False)
    treatments = [
        dataclasses.replace(treatment, num_layers=workload.num_layers)
        for treatment in options.possible(site, hardware, _NO_COPIES)
    ]
    return min(
        forecasts.forecast(
            Plan(**vars(chosen), segments=(treatment,)), workload
        ).total_bytes
        for treatment, chosen in itertools.product(
            treatments, frames.choices(workload, axes, (1, rows), 1)
        )
    )


class _Change(NamedTuple):
    """What a user could change, and what the search would then be given."""

    text: str
    workload: Workload
    hardware: Hardware
    axes: Axes


def _changes(workload: Workload, hardware: Hardware, axes: Axes) -> Iterator[_Change]:
    def change(text: str, **changed: Any) -> _Change:
        changed_workload = dataclasses.replace(workload, **changed)
        return _Change(text, changed_workload, hardware, axes)

    if workload.max_length > 1:
        half = workload.max_length // 2
        yield change(f"lower max_length to {half}", max_length=half)
    ranks = [linear.rank for linear in workload.linears]
    if max(ranks) > 1:
        linears = tuple(
            dataclasses.replace(linear, rank=-(-linear.rank // 2))
            for linear in workload.linears
        )
        yield change(f"lower lora.r to {-(-max(ranks) // 2)}", linears=linears)
    if max(workload.weight_bytes, workload.activation_bytes) > 2:
        narrow = dict.fromkeys(("weight_dtype", "activation_dtype"), "bfloat16")
        yield change("set dtype=bfloat16", **narrow)
    # Only bytes are asked for: the speed of the further link does not matter.
    links = (Link(bytes_per_s=1.0, latency_s=0.0), *hardware.links)
    twice = Axes(data=(2, *(size for size in axes.data if size > 1)))
    larger = dataclasses.replace(hardware, links=links, mesh_sizes=twice.data)
    yield _Change("use twice the devices", workload, larger, twice)
