"""What an engine needs to know of a model; `models` implements it."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from mtuner_jax.adapters import lora
from mtuner_jax.ops import tapes
from mtuner_jax.ops.attention import cached
from mtuner_jax.ops.low_rank.operands import LayerAdapters
from mtuner_jax.protocols.states import Batch, Params


class Decoder(Protocol):
    """A stack of equal layers between an embedding and a head.

    Parameters are {"embed": {"table": [V, D]}, "layers": {name: {...: [L, ...]}},
    "head": {"norm": {...}, "table": [V, D]}}; a tied head has no table of its own.
    """

    @property
    def num_layers(self) -> int:
        """Layers in the stack (L)."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens known to the model (V)."""
        ...

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model."""
        ...

    def shapes(self) -> Params:
        """The parameter tree as tuples of sizes."""
        ...

    def linears(self) -> Sequence[lora.LinearSite]:
        """The linears of a layer that adapters may sit on."""
        ...

    def context(self, batch: Batch, *, cache: cached.KeyValues | None = None) -> Any:
        """What all layers share for a batch: rotary angles, segments, places.

        With a cache, a layer attends to what is in it, too, and records the cache with
        the new tokens on its tape, by the names of its fields.
        """
        ...

    def cache_shape(self) -> tuple[int, int]:
        """Key and value heads (K) and their features (H)."""
        ...

    def embed(self, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        """Token vectors, [B, T, D]."""
        ...

    def layer(
        self,
        weights: Params,
        adapters: LayerAdapters,
        x_BTD: jax.Array,
        *,
        context: Any,
        tape: tapes.Tape,
    ) -> jax.Array:
        """One decoder layer, [B, T, D] -> [B, T, D]."""
        ...

    def final_norm(self, norm: Params, x_BTD: jax.Array) -> jax.Array:
        """The norm before the head, [B, T, D] -> [B, T, D]."""
        ...
