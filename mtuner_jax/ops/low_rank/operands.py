"""The adapters of a layer and the randomness of their inputs.

Letters: D input features, F output features, R rank.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from mtuner_jax.ops import dropout


class Lora(NamedTuple):
    """One linear's adapter, or several side by side, each for tokens of its own.

    Attributes:
      a_DR: [D, R], float32; of several adapters, R is the sum of their ranks.
      b_RF: [R, F], float32.
      scaling: Scalar, float32; of several adapters [B, T, R], 0 where a column is of
        another adapter than the token.
    """

    a_DR: jax.Array
    b_RF: jax.Array
    scaling: jax.Array


class Linear(NamedTuple):
    """A frozen linear and the adapter on it.

    Attributes:
      kernel_DF: The frozen weights, [D, F].
      bias_F: The frozen bias, [F]; None is no bias.
      lora: The adapter; None is no adapter.
    """

    kernel_DF: jax.Array
    bias_F: jax.Array | None = None
    lora: Lora | None = None


class Dropout(NamedTuple):
    """Randomness of an adapter's input; rate 0 is no dropout.

    Attributes:
      key: Of all tokens, or of each.
      places: Where each token comes from.
      rate: Share that is dropped; a number, or [B, T] of each token.
    """

    key: dropout.Key
    places: dropout.Places
    rate: float | jax.Array


class LayerAdapters(NamedTuple):
    """The adapters of one layer, by module name, and their randomness.

    Attributes:
      loras: Only the modules that have an adapter.
      drop: Keyed by layer and step; each input derives its own key. None is no
        dropout.
    """

    loras: Mapping[str, Lora]
    drop: Dropout | None = None

    def drop_of(self, name: str) -> Dropout | None:
        """The randomness of an input, whichever linears read it.

        Args:
          name: Of the input within the layer.
        """
        if self.drop is None:
            return None
        key = dropout.fold_in(self.drop.key, dropout.stable_hash(name))
        return self.drop._replace(key=key)
