"""The adapters of a layer and the randomness of their inputs.

Letters: D input features, F output features, R rank.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from mtuner_jax.ops import dropout


class Lora(NamedTuple):
    """One linear's adapter.

    Attributes:
      a_DR: [D, R], float32.
      b_RF: [R, F], float32.
      scaling: Scalar, float32.
    """

    a_DR: jax.Array
    b_RF: jax.Array
    scaling: jax.Array


class Dropout(NamedTuple):
    """Randomness of an adapter's input; rate 0 is no dropout."""

    key: dropout.Key
    places: dropout.Places
    rate: float


class LayerAdapters(NamedTuple):
    """The adapters of one layer, by module name, and their randomness.

    Attributes:
      loras: Only the modules that have an adapter.
      drop: Keyed by layer and step; each module derives its own key. None is no
        dropout.
    """

    loras: Mapping[str, Lora]
    drop: Dropout | None = None

    def of(self, module: str) -> tuple[Lora | None, Dropout | None]:
        """The adapter and the randomness of one linear."""
        lora = self.loras.get(module)
        if lora is None or self.drop is None:
            return lora, None
        key = dropout.fold_in(self.drop.key, dropout.stable_hash(module))
        return lora, self.drop._replace(key=key)
