"""What a layer takes to run beside its weights, and what its run leaves."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from mtuner_jax.engines.elastic import segment_weights
from mtuner_jax.engines.elastic.segment_weights import Blocks
from mtuner_jax.engines.elastic.token_adapters import Owners
from mtuner_jax.ops import dropout, tapes
from mtuner_jax.ops.low_rank.operands import Dropout, LayerAdapters, Lora
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRun:
    """What is the same for all layers of a part of the batch.

    Attributes:
      model: The decoder.
      axes: Data axes of the mesh, slowest link first.
      context: What `model.context` returned.
      drop: Randomness of the step, or None.
      adapters: {module: {"lora_a": [L, ...], "lora_b": [L, ...]}}, marked as varying
        over them.
      scalings: {module: [L]}, of a stack [L, S].
      owners: Which columns each token uses, where there is a stack of adapters.
    """

    model: Decoder
    axes: tuple[str, ...]
    context: Any
    drop: Dropout | None
    adapters: Params
    scalings: dict[str, jax.Array]
    owners: Owners | None = None

    def layer_adapters(self, layer: jax.Array) -> Params:
        """The adapters of one layer."""
        return jax.tree.map(
            lambda stack: segment_weights.at(stack, layer), self.adapters
        )

    def apply(
        self,
        weights: Params,
        adapters: Params,
        x_BTD: jax.Array,
        *,
        layer: jax.Array,
        tape: tapes.Tape,
    ) -> jax.Array:
        """One layer on whole weights, [B, T, D] -> [B, T, D]."""
        loras = {}
        for module, adapter in adapters.items():
            scaling = segment_weights.at(self.scalings[module], layer)
            if self.owners is not None:
                scaling = self.owners.scale(module, scaling)
            loras[module] = Lora(adapter["lora_a"], adapter["lora_b"], scaling)
        drop = self.drop
        if drop is not None:
            drop = drop._replace(key=dropout.fold_in(drop.key, layer))
        return self.model.layer(
            weights,
            LayerAdapters(loras, drop),
            x_BTD,
            context=self.context,
            tape=tape,
        )


class Kept(NamedTuple):
    """What a segment's forward loop leaves for its backward loop, stacked by layer.

    Attributes:
      tensors: The tensors that the plan saves, by name.
      blocks: Weights kept by `fwd_keep`.
      inputs: Layer inputs on the host: one stack, or nothing if they are in the arena.
        With `prefetch`, the stack of all layers but the last, if there are any, and
        the last layer's input by itself.
    """

    tensors: Mapping[str, jax.Array]
    blocks: Blocks
    inputs: list[jax.Array]

    def saved(self, index: jax.Array) -> dict[str, jax.Array]:
        """Layer `index`'s saved tensors, by name."""
        return {
            name: segment_weights.at(stack, index)
            for name, stack in self.tensors.items()
        }

    def fetched(self, index: jax.Array) -> jax.Array | None:
        """Layer `index`'s input from the stack on the host, None if in the arena."""
        if not self.inputs:
            return None
        x_BTD = segment_weights.at(self.inputs[0], index)
        return jax.device_put(x_BTD, jax.memory.Space.Device)

    def put(self, one: "Kept", index: jax.Array) -> "Kept":
        """These stacks with what layer `index` left on the device."""
        return jax.tree.map(
            lambda stack, leaf: jax.lax.dynamic_update_index_in_dim(
                stack, leaf, index, 0
            ),
            self,
            one._replace(inputs=[]),
        )
