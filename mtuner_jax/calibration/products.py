"""Measures a card's kernels: products, attention, elementwise, and the smallest.

Letters: B batch, T tokens, D model, F feed-forward.
"""

import math

import jax
import jax.numpy as jnp

from mtuner_jax.calibration.benches import Bench, Figures, Section
from mtuner_jax.ops.attention import api as attention_ops
from mtuner_jax.ops.attention.operands import Documents, Qkv

_TINY = (128, 16)  # an operand whose products take no time and are not split
_TINY_CHAIN = 16


def matmul(bench: Bench, _: Figures) -> Section:
    """A chain of a layer's products, at each number of tokens."""
    sizes = bench.sizes
    d, f = sizes.hidden, sizes.intermediate
    shapes = [(d, d)] * 4 + [(d, f), (f, d)] * 2
    weights = bench.weights(*shapes)
    flops_per_token = 2 * sum(math.prod(shape) for shape in shapes)
    rates = []
    for tokens in sizes.tokens:
        flops = tokens * flops_per_token
        num = bench.num_steps(flops / sizes.expected_flops_per_s)
        seconds = bench.looped_s(_chain, bench.random(9, (tokens, d)), weights, num=num)
        rates.append((tokens, flops / seconds))
    return Section({"matmul_flops_per_s": tuple(rates)})


def attention(bench: Bench, _: Figures) -> Section:
    """Forward and backward, causal; half of the scores counted."""
    sizes = bench.sizes
    shape = (sizes.rows, sizes.row_tokens, sizes.num_heads, sizes.head_dim)
    qkv = tuple(bench.random(i, shape) for i in range(3))
    ids = jnp.ones(shape[:2], jnp.int32)
    spec = attention_ops.Spec(implementation="cudnn" if bench.on_gpu else "xla")

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention_ops.attend(Qkv(q, k, v), Documents(ids), spec).out_BTNH

    # Barriers and a number that takes part of each result keep the loop's steps, which
    # all do the same, apart; results carried on would be copied.
    def forward(mark: jax.Array, constants: tuple[jax.Array, ...]) -> jax.Array:
        qkv, mark = jax.lax.optimization_barrier((constants[:3], mark))
        return mark + jax.lax.optimization_barrier(run(*qkv))[0, 0, 0, 0]

    def both(mark: jax.Array, constants: tuple[jax.Array, ...]) -> jax.Array:
        (*qkv, grad), mark = jax.lax.optimization_barrier((constants, mark))
        grads = jax.lax.optimization_barrier(jax.vjp(run, *qkv)[1](grad))
        return mark + sum(grad[0, 0, 0, 0] for grad in grads)

    product = sizes.rows * sizes.row_tokens**2 * sizes.num_heads * sizes.head_dim
    num = bench.num_steps(7 * product / (0.5 * sizes.expected_flops_per_s))
    mark, constants = jnp.zeros((), bench.dtype), (*qkv, bench.random(4, shape))
    forward_s, both_s = (
        bench.looped_s(step, mark, constants, num=num) for step in (forward, both)
    )
    details = {"forward_s": forward_s, "forward_and_backward_s": both_s}
    return Section({"attention_flops_per_s": 7 * product / both_s}, details)


def elementwise(bench: Bench, _: Figures) -> Section:
    """Two tensors read and one written, larger than any cache."""
    sizes = bench.sizes
    shape = (max(sizes.tokens), 2 * sizes.intermediate)
    x, y = (bench.random(i, shape) for i in range(2))
    moved = 3 * x.nbytes
    num = bench.num_steps(moved / sizes.expected_bytes_per_s)
    seconds = bench.looped_s(lambda x, y: 0.5 * x + y, x, y, num=num)
    return Section({"memory_bytes_per_s": moved / seconds})


def kernel(bench: Bench, _: Figures) -> Section:
    """Products too small to take time, each waiting for the one before."""
    (weight,) = bench.weights((_TINY[1], _TINY[1]))
    chain = [weight] * _TINY_CHAIN
    seconds = bench.looped_s(_chain, bench.random(1, _TINY), chain, num=64)
    return Section({"kernel_s": seconds / _TINY_CHAIN})


def _chain(x_TD: jax.Array, weights: list[jax.Array]) -> jax.Array:
    for weight in weights:
        x_TD = x_TD @ weight
    return x_TD
