"""Token after token on one device, with a cache of keys and values.

Letters: B rows, T tokens, S room for tokens, V vocabulary, L layers.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.generation import sampling
from mtuner_jax.ops import tapes
from mtuner_jax.ops.attention.cached import KeyValues
from mtuner_jax.ops.low_rank.operands import LayerAdapters, Lora
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Batch, Params

_SMALLEST_ROOM = 64


class Adapted(NamedTuple):
    """Adapters to answer with.

    Attributes:
      adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}.
      scalings: {module: [L]}.
    """

    adapters: Params
    scalings: dict[str, jax.Array]


class Generator:
    """Answers of one model; programs are compiled once for each room of tokens.

    Attributes:
      model: The decoder.
      weights: {"embed", "layers", "head"}, layers stacked, whole on one device.
      adapted: Adapters beside the weights, or None.
    """

    def __init__(self, model: Decoder, weights: Params, adapted: Adapted | None = None):
        self.model, self.weights, self.adapted = model, weights, adapted
        self._run = jax.jit(self._forward, donate_argnums=3)
        self._sample = jax.jit(sampling.sample, static_argnums=2)

    def stream(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        choice: sampling.Choice,
        seed: int = 0,
    ) -> Iterator[int]:
        """Tokens of the answer to one prompt, as they come; the last may be a stop.

        Args:
          prompt_ids: At least one token.
          max_new_tokens: Tokens after which it ends in any case.
          stop_ids: Tokens that end it.
          choice: How tokens are chosen.
          seed: Of the choice.
        """
        room = _room(len(prompt_ids) + max_new_tokens)
        width = _room(len(prompt_ids))
        ids = np.zeros((1, width), np.int32)
        ids[0, : len(prompt_ids)] = prompt_ids
        cache = self._empty_cache(room)
        last = np.asarray([len(prompt_ids) - 1], np.int32)
        logits_BV, cache = self._run(self.weights, self.adapted, ids, cache, 0, last)
        key = jax.random.key(seed)
        for number in range(max_new_tokens):
            token = self._sample(logits_BV, jax.random.fold_in(key, number), choice)
            found = int(token[0])
            yield found
            if found in stop_ids or number + 1 == max_new_tokens:
                return
            logits_BV, cache = self._run(
                self.weights,
                self.adapted,
                token[:, None],
                cache,
                len(prompt_ids) + number,
                np.zeros(1, np.int32),
            )

    def _forward(
        self,
        weights: Params,
        adapted: Adapted | None,
        ids_BT: jax.Array,
        cache: KeyValues,
        start: jax.Array,
        last_B: jax.Array,
    ) -> tuple[jax.Array, KeyValues]:
        """Runs T tokens from position `start` on.

        Args:
          weights: The model's.
          adapted: Its adapters.
          ids_BT: New tokens; padding at the end does no harm.
          cache: [L, B, S, K, H] each; donated.
          start: Position of the first new token.
          last_B: The new token of each row whose prediction is wanted.

        Returns:
          (logits [B, V] in at least float32, the cache with the new tokens).
        """
        model = self.model
        positions = start + jnp.arange(ids_BT.shape[1], dtype=jnp.int32)
        positions_BT = jnp.broadcast_to(positions[None], ids_BT.shape)
        ones_BT = jnp.ones_like(ids_BT)
        rows = Batch(ids_BT, ids_BT, ones_BT, ones_BT, positions_BT, ones_BT)
        context = functools.partial(model.context, rows)

        def body(x_BTD: jax.Array, layer: Any) -> tuple[jax.Array, KeyValues]:
            layer_weights, layer_adapted, layer_cache = layer
            loras = {}
            if layer_adapted is not None:
                loras = {
                    module: Lora(
                        leaf["lora_a"], leaf["lora_b"], layer_adapted.scalings[module]
                    )
                    for module, leaf in layer_adapted.adapters.items()
                }
            tape = tapes.Tape()
            x_BTD = model.layer(
                layer_weights,
                LayerAdapters(loras, None),
                x_BTD,
                context=context(cache=layer_cache),
                tape=tape,
            )
            return x_BTD, KeyValues(**tape.recorded)

        x_BTD = model.embed(weights["embed"]["table"], ids_BT)
        x_BTD, cache = jax.lax.scan(body, x_BTD, (weights["layers"], adapted, cache))
        x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
        normed_BTD = model.final_norm(weights["head"]["norm"], x_BD)
        table_VD = weights["head"].get("table", weights["embed"]["table"])
        wide = np.promote_types(table_VD.dtype, jnp.float32)
        logits = jnp.einsum(
            "btd,vd->btv", normed_BTD, table_VD, preferred_element_type=wide
        )
        return logits[:, 0, : model.vocab_size], cache

    def _empty_cache(self, room: int) -> KeyValues:
        heads, head_dim = self.model.cache_shape()
        shape = (self.model.num_layers, 1, room, heads, head_dim)
        dtype = self.weights["embed"]["table"].dtype
        return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _room(num_tokens: int) -> int:
    """Tokens to compile for: the next power of two, so that programs are few."""
    return max(_SMALLEST_ROOM, 1 << (num_tokens - 1).bit_length())
