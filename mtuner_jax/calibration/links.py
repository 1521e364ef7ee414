"""Measures links: gathers by axis and size, gathers beside products, the host."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.calibration.benches import Bench, Figures, MeasurementError, Section
from mtuner_jax.engines import compiling
from mtuner_jax.hardware.machines import Link
from mtuner_jax.ops import elastic

_COVERED = 0.9  # share of the products' time that gathers beside them shall take
_MOST_SLOWDOWN = 2.0


class LoopState(NamedTuple):
    """What a loop of products and gathers carries, its first dims split over the mesh.

    `operand_TD` is None for gathers alone, `shards` [devices, elements] for products
    alone; `marks` [devices] sums an element of each gather, so that none is dropped.
    """

    operand_TD: jax.Array | None
    shards: jax.Array | None
    marks: jax.Array


def gathers(bench: Bench, _: Figures) -> Section:
    """Gathers over each axis and all faster ones, at each size."""
    links, details = [], {}
    for first in range(len(bench.axes)):
        axes = bench.axes[first:]
        points = [_gather(bench, axes, output) for output in bench.sizes.gather_bytes]
        link = fit_link(points)
        links.append(link)
        details[axes[0]] = {
            "group": math.prod(bench.mesh.shape[axis] for axis in axes),
            "received_bytes_and_s": points,
            "fit_over_measured": [
                (link.latency_s + received / link.bytes_per_s) / seconds
                for received, seconds in points
            ],
        }
    return Section({"links": tuple(links)}, details)


def _gather(
    bench: Bench, axes: tuple[str, ...], output_bytes: int
) -> tuple[int, float]:
    """(received bytes, seconds) of one gather of a given output."""
    group = math.prod(bench.mesh.shape[axis] for axis in axes)
    elements = max(output_bytes // group // jnp.dtype(bench.dtype).itemsize, 1)
    num = min(max(2 * bench.sizes.gather_bytes[-1] // output_bytes, 8), 100)
    state = _state(bench, None, elements)
    run = _side_by_side(bench, axes, num)
    seconds = bench.call_s(run, state, ()) / num
    return (group - 1) * elements * jnp.dtype(bench.dtype).itemsize, seconds


def _state(bench: Bench, operand_TD: jax.Array | None, elements: int) -> LoopState:
    """The loop's first state, of so many elements to gather on each device."""
    devices = bench.mesh.size
    state = LoopState(
        operand_TD=operand_TD,
        shards=jnp.ones((devices, elements), bench.dtype) if elements else None,
        marks=jnp.zeros(devices, bench.dtype),
    )
    return jax.device_put(state, NamedSharding(bench.mesh, P(bench.axes)))


def _side_by_side(bench: Bench, axes: tuple[str, ...], num: int) -> Callable[..., Any]:
    """A loop of products, of gathers over `axes`, or of both, one beside the other.

    It takes a LoopState and the products' weights, () without products. Barriers tie
    each gather to one product, so that the two can only run at the same time or one
    after the other. Without them XLA makes one gather of a step's two, which yield the
    same (seen in the program compiled for H200).
    """

    def step(state: LoopState, weights: Sequence[jax.Array]) -> LoopState:
        operand_TD, shards, marks = state
        for weight in weights or (None,):
            whole = None
            operand_TD, shards = jax.lax.optimization_barrier((operand_TD, shards))
            if shards is not None:
                whole = elastic.gather(shards, axes=axes)
            if operand_TD is not None:
                operand_TD = operand_TD @ weight
            operand_TD, shards, whole = jax.lax.optimization_barrier(
                (operand_TD, shards, whole)
            )
            if whole is not None:
                marks = marks + whole[-1:, -1]
        return LoopState(operand_TD, shards, marks)

    def run(state: LoopState, weights: Sequence[jax.Array]) -> LoopState:
        return jax.lax.fori_loop(0, num, lambda _, s: step(s, weights), state)

    rows = P(bench.axes)
    mapped = jax.shard_map(run, mesh=bench.mesh, in_specs=(rows, P()), out_specs=rows)
    options = compiling.options(on_gpu=bench.on_gpu, num_devices=bench.mesh.size)
    return jax.jit(mapped, compiler_options=options)


def overlap(bench: Bench, found: Figures) -> Section:
    """How much longer products take beside gathers that last as long as they do."""
    if not bench.axes:
        return Section({"overlap_slowdown": 1.0}, {"devices": 1})
    if "links" not in found:
        raise MeasurementError(
            "overlap: the section links has no result to choose sizes by"
        )
    sizes, link = bench.sizes, found["links"][0]
    d, f = sizes.hidden, sizes.intermediate
    whole = NamedSharding(bench.mesh, P())
    weights = jax.device_put(bench.weights((d, f), (f, d)), whole)
    operand_TD = bench.random(2, (bench.mesh.size * sizes.tokens[-1], d))
    flops = 2 * len(weights) * sizes.tokens[-1] * d * f
    num = bench.num_steps(flops / sizes.expected_flops_per_s)
    run = _side_by_side(bench, bench.axes, num)

    def seconds(operand_TD: jax.Array | None, elements: int) -> float:
        state = _state(bench, operand_TD, elements)
        return bench.call_s(run, state, weights) / num

    products_s, gathers_s, elements = seconds(operand_TD, 0), 0.0, 0
    wanted_s = _COVERED * products_s / len(weights) - link.latency_s
    received = max(wanted_s * link.bytes_per_s, sizes.gather_bytes[0])
    for _ in range(2):  # the second size goes by the time that the first took
        elements = int(received) // (bench.mesh.size - 1) // operand_TD.dtype.itemsize
        elements = max(elements, 1)
        gathers_s = seconds(None, elements)
        received *= _COVERED * products_s / gathers_s
    both_s = seconds(operand_TD, elements)
    details = {"products_s": products_s, "gathers_s": gathers_s, "both_s": both_s}
    found_slowdown = slowdown(products_s, gathers_s, both_s)
    if bench.on_gpu and found_slowdown >= _MOST_SLOWDOWN:
        raise MeasurementError(
            f"overlap: gathers did not run beside products: {details}"
        )
    return Section({"overlap_slowdown": found_slowdown}, details)


def slowdown(products_s: float, gathers_s: float, both_s: float) -> float:
    """How many times longer products take while a gather runs; 1 to 2.

    What is lost is lost while gathers run: `both_s - products_s` is
    `gathers_s x (1 - 1 / slowdown)`. Half of the gathers' time or more is no overlap.

    Args:
      products_s: Seconds of the products alone.
      gathers_s: Seconds of the gathers alone, no more than those.
      both_s: Seconds of both side by side.
    """
    lost = max(both_s - products_s, 0.0) / gathers_s
    return 1.0 / (1.0 - min(lost, 1.0 - 1.0 / _MOST_SLOWDOWN))


def host(bench: Bench, _: Figures) -> Section:
    """All devices at once to pinned host memory, and back; the slower way counts."""
    size, itemsize = bench.sizes.host_bytes, jnp.dtype(bench.dtype).itemsize
    on_device = _state(bench, None, size // itemsize).shards
    assert on_device is not None
    pinned = on_device.sharding.with_memory_kind("pinned_host")
    to_host_s = bench.call_s(jax.device_put, on_device, pinned)
    on_host = jax.device_put(on_device, pinned)
    to_device_s = bench.call_s(jax.device_put, on_host, on_device.sharding)
    details = {"to_host_s": to_host_s, "to_device_s": to_device_s, "bytes": size}
    return Section({"host_bytes_per_s": size / max(to_host_s, to_device_s)}, details)


def fit_link(points: Sequence[tuple[float, float]]) -> Link:
    """Latency and bandwidth whose times are, relatively, closest to those measured.

    Args:
      points: (bytes received, seconds), two or more sizes.

    Raises:
      MeasurementError: Fewer sizes.
    """
    if len(points) < 2:
        raise MeasurementError(
            f"a link is fitted to two sizes or more, not to {points}"
        )
    received, seconds = np.asarray(points, float).T
    rows = np.stack([1.0 / seconds, received / seconds], axis=1)
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(points)))
    if latency_s < 0.0 or s_per_byte <= 0.0:  # noise: a bandwidth alone, then
        ratio = received / seconds
        latency_s, s_per_byte = 0.0, ratio.sum() / np.square(ratio).sum()
    return Link(bytes_per_s=float(1.0 / s_per_byte), latency_s=float(latency_s))
