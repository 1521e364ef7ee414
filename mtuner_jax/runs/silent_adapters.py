"""Names the adapters that got no gradient: nothing they could learn from."""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from mtuner_jax.adapters import lora
from mtuner_jax.protocols.states import TrainState
from mtuner_jax.training import loops

_logger = logging.getLogger(__name__)
_MAX_TOLD = 5


def hook(specs: Sequence[lora.AdapterSpec]) -> loops.Hook:
    """Warns after step 1; the moments are read on the host, the step stays as it is."""

    def check(state: TrainState, step: int) -> None:
        silent = find(state, specs)
        if silent:
            total = sum(rank > 0 for spec in specs for rank in spec.ranks)
            more = f" and {len(silent) - _MAX_TOLD} more" * (len(silent) > _MAX_TOLD)
            _logger.warning(
                "%d of %d adapters got no gradient in step %d: %s%s; they stay without "
                "effect. Are these weights of the base model zero? Leave them out of "
                "lora.target_modules",
                len(silent),
                total,
                step,
                ", ".join(silent[:_MAX_TOLD]),
                more,
            )

    return loops.Hook(due=lambda step: step == 1, do=check)


def find(state: TrainState, specs: Sequence[lora.AdapterSpec]) -> list[str]:
    """Paths of the modules whose B has had no gradient so far.

    A's gradient is zero in step 1 anyway, as B starts at zero. Adam's second moment is
    zero where no gradient ever was; with several processes all must ask.
    """
    moments: Any = optax.tree.get(state.opt_state, "nu")
    return [
        lora.module_path(spec.module, layer)
        for spec in specs
        for layer, alive in enumerate(_alive(moments[spec.module]["lora_b"]))
        if spec.ranks[layer] and not alive
    ]


def _alive(b_LRF: jax.Array) -> np.ndarray:
    """[L] bool, whether any element of a layer is not zero, on any device."""
    alive = np.zeros(b_LRF.shape[0], bool)
    for shard in b_LRF.addressable_shards:
        alive[shard.index[0]] |= np.any(np.asarray(shard.data) != 0, axis=(1, 2))
    if jax.process_count() > 1:
        alive = np.any(multihost_utils.process_allgather(alive), axis=0)
    return alive
