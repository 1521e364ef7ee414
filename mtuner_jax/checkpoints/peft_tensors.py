"""Adapters to and from the tensors of `adapter_model.safetensors`.

D input features of a linear, F output features, R rank, L layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import matching
from mtuner_jax.configs import UserError

Adapters = Mapping[str, Mapping[str, Any]]


class AdapterTensorsError(UserError):
    """Adapters that must not be written, or tensors that are not the ones wanted."""


def pack(
    adapters: Adapters, specs: Sequence[lora.AdapterSpec], dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Cuts stacked adapters into PEFT's tensors, A [r, D] and B [F, r].

    Args:
      adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}.
      specs: Rank of each module in each layer.
      dtype: The tensors' dtype.

    Raises:
      AdapterTensorsError: NaN or infinity, before or after the cast to `dtype`, or no
        adapter at all.
    """
    tensors, padding = {}, {}
    for spec in specs:
        a_LDR = np.asarray(adapters[spec.module]["lora_a"])
        b_LRF = np.asarray(adapters[spec.module]["lora_b"])
        for layer, r in enumerate(spec.ranks):
            key_a, key_b = keys(spec.module, layer)
            padding |= {key_a: a_LDR[layer, :, r:], key_b: b_LRF[layer, r:]}
            if r:
                tensors[key_a] = a_LDR[layer, :, :r].T.astype(dtype)
                tensors[key_b] = b_LRF[layer, :r].T.astype(dtype)
    broken = [key for key, x in tensors.items() if not _finite(x)]
    if broken:
        raise AdapterTensorsError(
            f"{len(broken)} of {len(tensors)} adapter tensors hold NaN or infinity as "
            f"{dtype.name} ({matching.listing(broken)}); nothing was written. Go back "
            f"to an earlier checkpoint, or lower learning_rate"
        )
    if not tensors:
        raise AdapterTensorsError(
            "there is no adapter to write: no linear has one; nothing was written"
        )
    assert not any(np.any(x) for x in padding.values()), "weights beyond the rank"
    return tensors


def unpack(
    tensors: Mapping[str, np.ndarray], specs: Sequence[lora.AdapterSpec]
) -> dict[str, dict[str, np.ndarray]]:
    """Stacks PEFT's tensors again, in float32, zero beyond a layer's rank.

    Returns:
      {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}.

    Raises:
      AdapterTensorsError: Lists the keys that are missing, unexpected or misshapen.
    """
    _check(tensors, specs)
    adapters = {}
    for spec in specs:
        num_layers, rank = len(spec.ranks), spec.max_rank
        a_LDR = np.zeros((num_layers, spec.in_dim, rank), np.float32)
        b_LRF = np.zeros((num_layers, rank, spec.out_dim), np.float32)
        for layer, r in enumerate(spec.ranks):
            if r:
                key_a, key_b = keys(spec.module, layer)
                a_LDR[layer, :, :r] = tensors[key_a].T
                b_LRF[layer, :r] = tensors[key_b].T
        adapters[spec.module] = {"lora_a": a_LDR, "lora_b": b_LRF}
    return adapters


def keys(module: str, layer: int) -> tuple[str, str]:
    """PEFT's names of A and B; the adapter's own name is not part of them."""
    stem = f"base_model.model.{lora.module_path(module, layer)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def _check(
    tensors: Mapping[str, np.ndarray], specs: Sequence[lora.AdapterSpec]
) -> None:
    wanted: dict[str, tuple[int, int]] = {}
    for spec in specs:
        for layer, r in enumerate(spec.ranks):
            if r:
                key_a, key_b = keys(spec.module, layer)
                wanted |= {key_a: (r, spec.in_dim), key_b: (spec.out_dim, r)}
    found = {key: tensor.shape for key, tensor in tensors.items()}
    problems = matching.compare(wanted, found)
    if any(problems.values()):
        raise AdapterTensorsError(
            f"not the adapter of its config and this base model: of {len(wanted)} "
            f"tensors wanted and {len(found)} found, {matching.told(problems)}"
        )


def _finite(x: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(x.astype(np.float32))))
