"""A base model with an adapter added to its weights, tensor by tensor.

D input features of a linear, F output features, R rank, L layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.weights import sources


class Merged:
    """The tensors of a model whose adapters are part of its weights (`TensorSource`).

    Each is computed when it is read, W + scaling * (A B)^T in float32, so that host
    memory holds one tensor. Rounding is left to whoever writes it: it happens once.
    """

    def __init__(
        self,
        base: sources.TensorSource,
        adapters: Mapping[str, Mapping[str, Any]],
        specs: Sequence[lora.AdapterSpec],
    ):
        """Takes a base and what is to be added.

        Args:
          base: The frozen weights.
          adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}.
          specs: Scaling of each module in each layer.
        """
        self._base = base
        self._updates = {
            f"{lora.module_path(spec.module, layer)}.weight": (
                np.asarray(adapters[spec.module]["lora_a"][layer], np.float32),
                np.asarray(adapters[spec.module]["lora_b"][layer], np.float32),
                np.float32(scaling),
            )
            for spec in specs
            for layer, scaling in enumerate(spec.scalings)
            if scaling
        }
        unknown = sorted(self._updates.keys() - base.infos().keys())
        assert not unknown, f"adapters of {unknown[:3]}, which the base lacks"

    def infos(self) -> Mapping[str, sources.TensorInfo]:
        """Shapes of the base; merged tensors are float32."""
        return {
            name: sources.TensorInfo(
                shape=info.shape, dtype="F32" if name in self._updates else info.dtype
            )
            for name, info in self._base.infos().items()
        }

    def read(self, name: str, box: sources.Box) -> np.ndarray:
        """One part of one tensor, [F, D] for a linear's weight."""
        part = self._base.read(name, box)
        if name not in self._updates:
            return part
        a_DR, b_RF, scaling = self._updates[name]
        update = b_RF[:, box[0]].T @ a_DR[box[1]].T
        return part.astype(np.float32) + scaling * update
