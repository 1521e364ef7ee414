"""One decoder layer with adapters: as measured, and as the cost model prices it.

Letters: B batch, T tokens, D model.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.calibration.benches import Bench, Figures, Section
from mtuner_jax.configs import LoraConfig
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.ops import tapes
from mtuner_jax.ops.low_rank.operands import LayerAdapters, Lora
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import kernels
from mtuner_jax.planning.plans import Saved
from mtuner_jax.planning.sites import Site
from mtuner_jax.protocols.states import Batch, Params

LORA = LoraConfig(r=16)  # on every linear
Adapters = dict[str, Lora]


class _Layer(NamedTuple):
    """Random frozen weights and fresh adapters of one layer, which loops only read."""

    weights: Params
    adapters: Adapters


class _Backward(NamedTuple):
    """A layer's input (and its output's gradient), and sums of adapter gradients."""

    x_BTD: jax.Array
    sums: Adapters


def measure(bench: Bench, _: Figures) -> Section:
    """Times one decoder layer; no figure of a machine comes of it, only details."""
    sizes, apply = bench.sizes, _apply(bench)
    layer = _Layer(_weights(bench), _adapters(bench))
    x_BTD = bench.random(3, (1, sizes.row_tokens, sizes.hidden))

    def forward(x_BTD: jax.Array, layer: _Layer) -> jax.Array:
        return apply(layer.weights, layer.adapters, x_BTD)

    def both(state: _Backward, layer: _Layer) -> _Backward:
        with_weights = functools.partial(apply, layer.weights)
        _, pullback = jax.vjp(with_weights, layer.adapters, state.x_BTD)
        grads, grad_BTD = pullback(state.x_BTD)
        return _Backward(grad_BTD, jax.tree.map(jnp.add, state.sums, grads))

    num_weights = sum(leaf.size for leaf in jax.tree.leaves(layer.weights))
    flops = 6 * sizes.row_tokens * num_weights
    num = bench.num_steps(flops / sizes.expected_flops_per_s)
    state = _Backward(x_BTD, jax.tree.map(jnp.zeros_like, layer.adapters))
    details = {
        "forward_s": bench.looped_s(forward, x_BTD, layer, num=num),
        "forward_and_backward_s": bench.looped_s(both, state, layer, num=num),
        "tokens": sizes.row_tokens,
    }
    return Section(details=details)


def compared(bench: Bench, machine: Hardware, section: Section) -> str:
    """The layer as `measure` found it beside what the cost model makes of the figures.

    Args:
      bench: Where it was measured.
      machine: The figures that the calibration came to.
      section: What `measure` returned.
    """
    one = Axes(data=(1,))
    site = Site(workload=bench.workload, axes=one, rows=1, merge_gathers=False)
    forward_s, backward_s = kernels.layer(site, machine, Saved.LINEARS)
    modelled = {
        "forward": (section.details["forward_s"], forward_s),
        "forward and backward": (
            section.details["forward_and_backward_s"],
            forward_s + backward_s,
        ),
    }
    return "\n".join(
        f"layer of {bench.sizes.row_tokens} tokens, {what}: {1e3 * here_s:.3f} ms "
        f"measured, {1e3 * model_s:.3f} ms by the cost model ({model_s / here_s:.2f}x)"
        for what, (here_s, model_s) in modelled.items()
    )


def _weights(bench: Bench) -> Params:
    """Frozen weights, without a dim of layers."""
    numbers = itertools.count()
    return jax.tree.map(
        lambda shape: (
            bench.random(next(numbers), shape[1:], scale=shape[1] ** -0.5)
            if len(shape) > 2
            else jnp.ones(shape[1:], bench.dtype)
        ),
        bench.model.shapes()["layers"],
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _adapters(bench: Bench) -> Adapters:
    """Adapters by module, without a dim of layers."""
    specs = lora.resolve(LORA, bench.model.linears(), num_layers=1)
    drawn = lora.init(specs, jax.random.key(0))
    return {
        spec.module: Lora(
            drawn[spec.module]["lora_a"][0],
            drawn[spec.module]["lora_b"][0],
            jnp.float32(spec.scalings[0]),
        )
        for spec in specs
    }


def _apply(bench: Bench) -> Callable[[Params, Adapters, jax.Array], jax.Array]:
    """The layer as a function of its weights, its adapters and x_BTD."""
    model, tokens = bench.model, bench.sizes.row_tokens
    ids = np.ones((1, tokens), np.int32)
    positions = np.arange(tokens, dtype=np.int32)[None]
    fields = {**dict.fromkeys(Batch._fields, ids), "positions": positions}
    context = jax.tree.map(jnp.asarray, model.context(Batch(**fields)))

    def apply(weights: Params, adapters: Adapters, x_BTD: jax.Array) -> jax.Array:
        layer_adapters = LayerAdapters(adapters)
        tape = tapes.Tape()
        return model.layer(weights, layer_adapters, x_BTD, context=context, tape=tape)

    return apply
