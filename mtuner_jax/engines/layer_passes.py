"""Forward and backward loops over the layers of a segment, inside `shard_map`.

Weights arrive as this device's shards and are gathered a layer at a time, in the
forward and again in the backward loop. The backward loop is written out with
`jax.vjp` of one layer instead of differentiating through the scan, so that what
lives when is decided here and nowhere else.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from mtuner_jax import shardings
from mtuner_jax.engines.protocols import Decoder
from mtuner_jax.engines.states import Params
from mtuner_jax.ops import arena as arenas
from mtuner_jax.ops import dropout, elastic, lora_linear, remat
from mtuner_jax.planning.plans import SAVED_TENSORS, SegmentPlan


class SegmentInputs(NamedTuple):
    """What a segment's loops scan over, each leaf [layers of the segment, ...].

    Attributes:
      shards: Frozen weights, this device's share.
      adapters: {module: {"lora_a", "lora_b"}}, marked as varying over the mesh.
      scalings: {module: scaling}.
      layer: Index of the layer in the model.
    """

    shards: Params
    adapters: Params
    scalings: dict[str, jax.Array]
    layer: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRun:
    """What is the same for all layers of a microbatch.

    Attributes:
      model: The decoder.
      axes: All mesh axes, slowest link first.
      context: What `model.context` returned.
      drop: Randomness of the step, or None.
    """

    model: Decoder
    axes: tuple[str, ...]
    context: Any
    drop: lora_linear.Dropout | None

    def gather(self, shards: Params, segment: SegmentPlan) -> Params:
        """The whole weights of one layer."""
        axes = self.axes[segment.rest_axes :]
        return {
            module: {
                leaf: elastic.gather(value, axes=axes)
                if shardings.is_sharded(leaf)
                else value
                for leaf, value in leaves.items()
            }
            for module, leaves in shards.items()
        }

    def apply(
        self, weights: Params, inputs: SegmentInputs, x_BTD: jax.Array, tape: remat.Tape
    ) -> jax.Array:
        """One layer on whole weights, [B, T, D] -> [B, T, D]."""
        loras = {
            module: lora_linear.Lora(
                adapter["lora_a"], adapter["lora_b"], inputs.scalings[module]
            )
            for module, adapter in inputs.adapters.items()
        }
        drop = self.drop
        if drop is not None:
            drop = drop._replace(key=dropout.fold_in(drop.key, inputs.layer))
        layer_adapters = lora_linear.LayerAdapters(loras, drop)
        return self.model.layer(
            weights, layer_adapters, x_BTD, context=self.context, tape=tape
        )


def forward(
    run: LayerRun,
    segment: SegmentPlan,
    inputs: SegmentInputs,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Runs a segment's layers.

    Args:
      run: The microbatch.
      segment: The plan of these layers.
      inputs: Their weights and adapters.
      carry: (x [B, T, D], arena of layer inputs).

    Returns:
      The carry after the last layer, and the saved tensors stacked over layers. One
      all-gather per sharded weight and layer.
    """
    names = _names(segment)

    def body(carry, layer_inputs):
        x_BTD, arena = carry
        arena = arenas.write(arena, layer_inputs.layer, x_BTD)
        weights = run.gather(layer_inputs.shards, segment)
        tape = remat.Tape(names)
        x_BTD = run.apply(weights, layer_inputs, x_BTD, tape)
        return (x_BTD, arena), tape.recorded

    return jax.lax.scan(body, carry, inputs)


def forward_only(
    run: LayerRun, segment: SegmentPlan, inputs: SegmentInputs, x_BTD: jax.Array
) -> jax.Array:
    """`forward` for evaluation: nothing is saved."""

    def body(x_BTD, layer_inputs):
        weights = run.gather(layer_inputs.shards, segment)
        return run.apply(weights, layer_inputs, x_BTD, remat.Tape()), None

    return jax.lax.scan(body, x_BTD, inputs)[0]


def backward(
    run: LayerRun,
    segment: SegmentPlan,
    inputs: SegmentInputs,
    saved: dict[str, jax.Array],
    carry: tuple[jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], Params]:
    """Runs a segment's layers backwards.

    Args:
      run: The microbatch.
      segment: The plan of these layers.
      inputs: Their weights and adapters.
      saved: What `forward` saved.
      carry: (gradient of the segment's output [B, T, D], arena of layer inputs).

    Returns:
      The carry before the first layer, and the gradients of this device's rows to
      the adapters, float32, stacked over layers. Gathers as in `forward`.
    """
    names = _names(segment)

    def body(carry, scanned):
        dx_BTD, arena = carry
        layer_inputs, layer_saved = scanned
        shards = layer_inputs.shards
        if segment.rest_axes < len(run.axes):
            # Without it XLA merges this gather with the forward's where a loop of
            # one trip was unrolled, and so keeps the weight.
            shards = jax.lax.optimization_barrier(shards)
        weights = run.gather(shards, segment)

        def layer(adapters, x_BTD):
            tape = remat.Tape(names, saved=layer_saved)
            changed = layer_inputs._replace(adapters=adapters)
            return run.apply(weights, changed, x_BTD, tape)

        x_BTD = arenas.read(arena, layer_inputs.layer)
        _, pullback = jax.vjp(layer, layer_inputs.adapters, x_BTD)
        d_adapters, dx_BTD = pullback(dx_BTD)
        return (dx_BTD, arena), d_adapters

    return jax.lax.scan(body, carry, (inputs, saved), reverse=True)


def _names(segment: SegmentPlan) -> tuple[str, ...]:
    return SAVED_TENSORS[segment.saved]
