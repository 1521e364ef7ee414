"""What to say when no plan fits: how much is needed, and what would free most."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware.machines import Hardware, Link
from mtuner_jax.numbers import sizes
from mtuner_jax.planning.costs import forecasts
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import frames, options
from mtuner_jax.planning.workloads import Workload

_SHOWN = 3


def error(
    workload: Workload,
    hardware: Hardware,
    mesh_sizes: tuple[int, ...],
    *,
    budget_bytes: int,
) -> ConfigError:
    """The error for a budget that no plan keeps, with the knobs that free most."""
    needed = least_bytes(workload, hardware, mesh_sizes)
    changes = sorted(
        (least_bytes(*changed), text)
        for text, changed in _changes(workload, hardware, mesh_sizes)
    )
    knobs = [
        f"{text} (then {sizes.gib(num_bytes)})"
        for num_bytes, text in changes[:_SHOWN]
        if num_bytes < needed
    ]
    devices = "x".join(map(str, mesh_sizes))
    return ConfigError(
        f"no plan fits: {workload.model} with max_length={workload.max_length} on "
        f"{devices} devices needs at least {needed:,} bytes ({sizes.gib(needed)}) per "
        f"device, the budget is {budget_bytes:,} ({sizes.gib(budget_bytes)}); raise "
        f"memory_budget, or {', or '.join(knobs)}; a smaller global batch frees next "
        "to nothing"
    )


def least_bytes(
    workload: Workload, hardware: Hardware, mesh_sizes: tuple[int, ...]
) -> int:
    """Bytes per device of the smallest plan: single rows, one treatment of all layers.

    Copies only add to what a layer takes, so the smallest plan keeps none, and then
    bytes add up over layers: mixing treatments cannot be smaller.
    """
    rows = -(-workload.global_batch_size // math.prod(mesh_sizes))
    treatments = [
        dataclasses.replace(treatment, num_layers=workload.num_layers)
        for treatment in options.allowed(
            workload, hardware, mesh_sizes=mesh_sizes, rows=1
        )
        if max(treatment.fwd_keep_axes, treatment.bwd_keep_axes) == treatment.rest_axes
    ]
    chosen = [
        {
            field.name: getattr(choice, field.name)
            for field in dataclasses.fields(choice)
        }
        for choice in frames.choices(workload, mesh_sizes, (1, rows), 1)
    ]
    return min(
        forecasts.forecast(Plan(segments=(treatment,), **fields), workload).total_bytes
        for treatment, fields in itertools.product(treatments, chosen)
    )


def _changes(workload, hardware, mesh_sizes) -> Iterator[tuple[str, tuple]]:
    """(what a user could change, what the search would then be given)."""
    if workload.max_length > 1:
        half = workload.max_length // 2
        shorter = dataclasses.replace(workload, max_length=half)
        yield f"lower max_length to {half}", (shorter, hardware, mesh_sizes)
    ranks = [linear.rank for linear in workload.linears]
    if max(ranks) > 1:
        linears = tuple(
            dataclasses.replace(linear, rank=-(-linear.rank // 2))
            for linear in workload.linears
        )
        smaller = dataclasses.replace(workload, linears=linears)
        text = f"lower lora.r to {-(-max(ranks) // 2)}"
        yield text, (smaller, hardware, mesh_sizes)
    if workload.element_bytes > 2:
        narrow = dataclasses.replace(workload, element_bytes=2)
        yield "set dtype=bfloat16", (narrow, hardware, mesh_sizes)
    # Only bytes are asked for: the speed of the further link does not matter.
    links = (Link(bytes_per_s=1.0, latency_s=0.0), *hardware.links)
    twice = (2, *(size for size in mesh_sizes if size > 1))
    larger = dataclasses.replace(hardware, links=links, mesh_sizes=twice)
    yield "use twice the devices", (workload, larger, twice)
