"""Measures what a machine can do, in the figures that `planning.hardware` wants.

Letters: B batch, T tokens, D model, F feed-forward.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.calibration import benches, links
from mtuner_jax.calibration.benches import Bench, Section
from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.hardware import cards, machines
from mtuner_jax.ops import attention, lora_linear, tapes
from mtuner_jax.protocols.states import Batch

_CGROUP_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")
_TINY = (128, 16)  # an operand whose products take no time and are not split
_TINY_CHAIN = 16
# What a section may raise without ending the others: JAX, XLA and our own checks.
# XLA's errors are RuntimeErrors.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    OSError,
    MemoryError,
)


def sections(bench: Bench, names: Sequence[str] = ()) -> Iterator[Section]:
    """Measures section by section; one that fails does not end the others.

    Args:
      bench: Where and how.
      names: Of the sections, all if empty.
    """
    found: dict[str, Any] = {}
    for name in names or SECTIONS:
        start = time.perf_counter()
        try:
            section = SECTIONS[name](bench, found)
        except FAILURES as error:
            section = Section(error=f"{type(error).__name__}: {error}")
        found |= section.figures
        seconds = time.perf_counter() - start
        yield dataclasses.replace(section, name=name, seconds=seconds)


def describe(
    name: str,
    bench: Bench,
    results: Sequence[Section],
    *,
    base: machines.Hardware | None,
    stamp: str,
) -> machines.Hardware:
    """Joins what was measured into a machine's figures.

    Args:
      name: Of the machine.
      bench: Where it was measured.
      results: Of the sections.
      base: The card's preset, for figures without a measurement; None if there is
        none.
      stamp: When and with what it was measured.

    Raises:
      ConfigError: A figure that was neither measured nor is known of the card.
    """
    device = bench.mesh.devices.flat[0].device_kind
    sizes = tuple(bench.mesh.shape[axis] for axis in bench.axes)
    figures: dict[str, Any] = {"reserve_bytes": cards.RESERVE_BYTES}
    sources = {"reserve_bytes": cards.SHARED_SOURCES["reserve_bytes"]}
    for section in results:
        figures |= section.figures
        sources |= dict.fromkeys(section.figures, f"measured: {stamp}")
    missing = set(figure_names()) - set(figures)
    if missing and base is not None:
        preset = machines.fitted(base, sizes)
        figures |= {field: getattr(preset, field) for field in missing}
        sources |= {
            field: f"assumed: not measured, as in {base.name} ({base.sources[field]})"
            for field in missing
        }
    elif missing:
        raise ConfigError(
            f"{device} was not measured in {', '.join(sorted(missing))} and no preset "
            "knows it; see why these sections failed and calibrate again"
        )
    return machines.Hardware(
        name=name, device=device, mesh_sizes=sizes, sources=sources, **figures
    )


def figure_names() -> tuple[str, ...]:
    """Fields of `hardware.Hardware` that are figures."""
    others = ("name", "device", "mesh_sizes", "sources")
    names = (field.name for field in dataclasses.fields(machines.Hardware))
    return tuple(name for name in names if name not in others)


def host_bytes(*, limit: pathlib.Path = _CGROUP_LIMIT) -> int:
    """Memory of this host, or what its container may take of it.

    Args:
      limit: File with the container's limit in bytes, or `max`.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(pages, int(text)) if text.isdecimal() else pages


def _memory(bench: Bench, found: Mapping[str, Any]) -> Section:
    del found
    stats = bench.mesh.devices.flat[0].memory_stats() or {}
    pool = stats.get("bytes_limit", 0)
    if bench.on_gpu and pool and bench.memory_fraction:
        total, fraction = round(pool / bench.memory_fraction), bench.memory_fraction
    elif bench.on_gpu:
        raise ConfigError(f"memory_stats() of the GPU gives no bytes_limit: {stats}")
    else:
        total, fraction = host_bytes() // bench.mesh.size, 1.0
    figures = {
        "memory_bytes": total,
        "pool_fraction": fraction,
        "host_memory_bytes": host_bytes(),
    }
    return Section(
        figures=figures, details={key: int(value) for key, value in stats.items()}
    )


def _matmul(bench: Bench, found: Mapping[str, Any]) -> Section:
    """A chain of a layer's products, at each number of tokens."""
    del found
    sizes = bench.sizes
    d, f = sizes.hidden, sizes.intermediate
    shapes = [(d, d)] * 4 + [(d, f), (f, d)] * 2
    weights = [
        bench.random(i, shape, scale=shape[0] ** -0.5) for i, shape in enumerate(shapes)
    ]
    flops_per_token = 2 * sum(math.prod(shape) for shape in shapes)

    def chain(x_TD, weights):
        for weight in weights:
            x_TD = x_TD @ weight
        return x_TD

    rates = []
    for tokens in sizes.tokens:
        flops = tokens * flops_per_token
        x_TD = bench.random(9, (tokens, d))
        num = bench.num_steps(flops / sizes.expected_flops_per_s)
        seconds = benches.looped_s(chain, x_TD, weights, num=num, repeats=sizes.repeats)
        rates.append((tokens, flops / seconds))
    return Section(figures={"matmul_flops_per_s": tuple(rates)})


def _attention(bench: Bench, found: Mapping[str, Any]) -> Section:
    """Forward and backward, causal; half of the scores counted."""
    del found
    sizes = bench.sizes
    shape = (sizes.rows, sizes.row_tokens, sizes.num_heads, sizes.head_dim)
    qkv = tuple(bench.random(i, shape) for i in range(3))
    ids = jnp.ones(shape[:2], jnp.int32)
    spec = attention.Spec(implementation="cudnn" if bench.on_gpu else "xla")

    def run(q, k, v):
        return attention.attend(q, k, v, ids, spec)[0]

    # Barriers and a number that takes part of each result keep the loop's steps, which
    # all do the same, apart; results carried on would be copied.
    def forward(mark, constants):
        qkv, mark = jax.lax.optimization_barrier((constants[:3], mark))
        return mark + jax.lax.optimization_barrier(run(*qkv))[0, 0, 0, 0]

    def both(mark, constants):
        (*qkv, grad), mark = jax.lax.optimization_barrier((constants, mark))
        grads = jax.lax.optimization_barrier(jax.vjp(run, *qkv)[1](grad))
        return mark + sum(grad[0, 0, 0, 0] for grad in grads)

    product = sizes.rows * sizes.row_tokens**2 * sizes.num_heads * sizes.head_dim
    num = bench.num_steps(7 * product / (0.5 * sizes.expected_flops_per_s))
    mark, constants = jnp.zeros((), bench.dtype), (*qkv, bench.random(4, shape))
    forward_s, both_s = (
        benches.looped_s(step, mark, constants, num=num, repeats=sizes.repeats)
        for step in (forward, both)
    )
    details = {"forward_s": forward_s, "forward_and_backward_s": both_s}
    figures = {"attention_flops_per_s": 7 * product / both_s}
    return Section(figures=figures, details=details)


def _elementwise(bench: Bench, found: Mapping[str, Any]) -> Section:
    """Two tensors read and one written, larger than any cache."""
    del found
    sizes = bench.sizes
    shape = (max(sizes.tokens), 2 * sizes.intermediate)
    x, y = (bench.random(i, shape) for i in range(2))
    moved = 3 * x.nbytes
    num = bench.num_steps(moved / sizes.expected_bytes_per_s)
    seconds = benches.looped_s(
        lambda x, y: 0.5 * x + y, x, y, num=num, repeats=sizes.repeats
    )
    return Section(figures={"memory_bytes_per_s": moved / seconds})


def _kernel(bench: Bench, found: Mapping[str, Any]) -> Section:
    """Products too small to take time, each waiting for the one before."""
    del found
    rows, width = _TINY
    x = bench.random(0, (rows, width))
    weight = bench.random(1, (width, width), scale=width**-0.5)

    def chain(x, weight):
        for _ in range(_TINY_CHAIN):
            x = x @ weight
        return x

    seconds = benches.looped_s(chain, x, weight, num=64, repeats=bench.sizes.repeats)
    return Section(figures={"kernel_s": seconds / _TINY_CHAIN})


def _layer(bench: Bench, found: Mapping[str, Any]) -> Section:
    """One decoder layer with adapters, to check a cost model against; no figure."""
    del found
    apply, weights, adapters = _decoder_layer(bench)
    sizes = bench.sizes
    x_BTD = bench.random(3, (1, sizes.row_tokens, sizes.hidden))

    def forward(x_BTD, constants):
        weights, adapters = constants
        return apply(weights, adapters, x_BTD)

    def both(state, constants):
        x_BTD, sums = state
        weights, adapters = constants
        pulled = jax.vjp(lambda *args: apply(weights, *args), adapters, x_BTD)[1](x_BTD)
        return pulled[1], jax.tree.map(jnp.add, sums, pulled[0])

    constants = (weights, adapters)
    flops = 6 * sizes.row_tokens * sum(a.size for a in jax.tree.leaves(weights))
    num = bench.num_steps(flops / sizes.expected_flops_per_s)
    forward_s = benches.looped_s(
        forward, x_BTD, constants, num=num, repeats=sizes.repeats
    )
    state = (x_BTD, jax.tree.map(jnp.zeros_like, adapters))
    both_s = benches.looped_s(both, state, constants, num=num, repeats=sizes.repeats)
    details = {"forward_s": forward_s, "forward_and_backward_s": both_s}
    return Section(details={**details, "tokens": sizes.row_tokens})


def _decoder_layer(bench):
    """(apply(weights, adapters, x) -> x, random weights, adapters) of one layer."""
    model, tokens = bench.model, bench.sizes.row_tokens
    numbers = itertools.count()
    weights = jax.tree.map(
        lambda shape: (
            bench.random(next(numbers), shape[1:], scale=shape[1] ** -0.5)
            if len(shape) > 2
            else jnp.ones(shape[1:], bench.dtype)
        ),
        model.shapes()["layers"],
        is_leaf=lambda node: isinstance(node, tuple),
    )
    specs = lora.resolve(LoraConfig(r=16), model.linears(), num_layers=1)
    drawn = lora.init(specs, jax.random.key(0))
    loras = {
        spec.module: lora_linear.Lora(
            drawn[spec.module]["lora_a"][0],
            drawn[spec.module]["lora_b"][0],
            jnp.float32(spec.scalings[0]),
        )
        for spec in specs
    }
    ids = np.ones((1, tokens), np.int32)
    positions = np.arange(tokens, dtype=np.int32)[None]
    fields = {**dict.fromkeys(Batch._fields, ids), "positions": positions}
    context = jax.tree.map(jnp.asarray, model.context(Batch(**fields)))

    def apply(weights, loras, x_BTD):
        adapters = lora_linear.LayerAdapters(loras)
        return model.layer(weights, adapters, x_BTD, context=context, tape=tapes.Tape())

    return apply, weights, loras


SECTIONS: dict[str, Callable[[Bench, Mapping[str, Any]], Section]] = {
    "memory": _memory,
    "matmul": _matmul,
    "elementwise": _elementwise,
    "kernel": _kernel,
    "host": links.host,
    "links": links.links,
    "overlap": links.overlap,
    "attention": _attention,
    "layer": _layer,
}
