"""One decoder layer with adapters: as measured, and as the cost model prices it.

Letters: B batch, T tokens, D model.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.calibration import benches
from mtuner_jax.calibration.benches import Bench, Figures, Section
from mtuner_jax.configs import LoraConfig
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.ops import lora_linear, tapes
from mtuner_jax.planning.costs import kernels
from mtuner_jax.planning.plans import Saved
from mtuner_jax.planning.workloads import Workload
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Batch, Params

Adapters = dict[str, lora_linear.Lora]


class _Backward(NamedTuple):
    """A layer's input (and its output's gradient), and sums of adapter gradients."""

    x_BTD: jax.Array
    sums: dict[str, lora_linear.Lora]


def measure(bench: Bench, _: Figures) -> Section:
    """Times one decoder layer; no figure of a machine comes of it, only details."""
    sizes, apply = bench.sizes, _apply(bench)
    constants = (_weights(bench), _adapters(bench))
    x_BTD = bench.random(3, (1, sizes.row_tokens, sizes.hidden))

    def forward(x_BTD: jax.Array, constants: tuple[Params, Adapters]) -> jax.Array:
        return apply(*constants, x_BTD)

    def both(state: _Backward, constants: tuple[Params, Adapters]) -> _Backward:
        weights, adapters = constants
        _, pullback = jax.vjp(
            lambda *inputs: apply(weights, *inputs), adapters, state.x_BTD
        )
        grads, grad_BTD = pullback(state.x_BTD)
        return _Backward(grad_BTD, jax.tree.map(jnp.add, state.sums, grads))

    num_weights = sum(leaf.size for leaf in jax.tree.leaves(constants[0]))
    flops = 6 * sizes.row_tokens * num_weights
    num = bench.num_steps(flops / sizes.expected_flops_per_s)
    state = _Backward(x_BTD, jax.tree.map(jnp.zeros_like, constants[1]))
    forward_s, both_s = (
        benches.looped_s(step, first, constants, num=num, repeats=sizes.repeats)
        for step, first in ((forward, x_BTD), (both, state))
    )
    details = {"forward_s": forward_s, "forward_and_backward_s": both_s}
    return Section(details={**details, "tokens": sizes.row_tokens})


def compared(workload: Workload, machine: Hardware, section: Section) -> str:
    """The layer as measured beside what the cost model makes of the figures.

    Args:
      workload: The layer and a row, as the planner is told of a model.
      machine: The figures that the calibration came to.
      section: What `measure` returned.
    """
    forward_s, backward_s = kernels.layer(workload, machine, Saved.LINEARS, rows=1)
    measured = section.details
    lines = (
        f"layer of {workload.max_length} tokens, {what}: {1e3 * here_s:.3f} ms "
        f"measured, {1e3 * model_s:.3f} ms by the cost model ({model_s / here_s:.2f}x)"
        for what, here_s, model_s in (
            ("forward", measured["forward_s"], forward_s),
            (
                "forward and backward",
                measured["forward_and_backward_s"],
                forward_s + backward_s,
            ),
        )
    )
    return "\n".join(lines)


def specs(model: Decoder) -> tuple[lora.AdapterSpec, ...]:
    """The adapters that the layer has: of rank 16 on every linear."""
    return lora.resolve(LoraConfig(r=16), model.linears(), num_layers=1)


def _weights(bench: Bench) -> Params:
    """Random frozen weights of one layer, without a dim of layers."""
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
    """Fresh adapters of one layer."""
    resolved = specs(bench.model)
    drawn = lora.init(resolved, jax.random.key(0))
    return {
        spec.module: lora_linear.Lora(
            drawn[spec.module]["lora_a"][0],
            drawn[spec.module]["lora_b"][0],
            jnp.float32(spec.scalings[0]),
        )
        for spec in resolved
    }


def _apply(bench: Bench) -> Callable[[Params, Adapters, jax.Array], jax.Array]:
    """The layer as a function of its weights, its adapters and x_BTD."""
    model, tokens = bench.model, bench.sizes.row_tokens
    ids = np.ones((1, tokens), np.int32)
    positions = np.arange(tokens, dtype=np.int32)[None]
    fields = {**dict.fromkeys(Batch._fields, ids), "positions": positions}
    context = jax.tree.map(jnp.asarray, model.context(Batch(**fields)))

    def apply(weights: Params, adapters: Adapters, x_BTD: jax.Array) -> jax.Array:
        layer_adapters = lora_linear.LayerAdapters(adapters)
        tape = tapes.Tape()
        return model.layer(weights, layer_adapters, x_BTD, context=context, tape=tape)

    return apply
