"""What goes into a step and what comes out of it."""

from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import optax

Params = dict[str, Any]
Array = jax.Array | np.ndarray


Field = TypeVar("Field", jax.Array, np.ndarray)


class Batch(NamedTuple, Generic[Field]):
    """Rows of one optimizer step or one evaluation, every field [B, T].

    `Batch[np.ndarray]` comes from data, `Batch[jax.Array]` is what a step computes on.

    Attributes:
      input_ids: int32 tokens.
      targets: int32, the token to be predicted at this place (already shifted); 0
        where there is none.
      weights: float32, 1 where the prediction carries loss, else 0.
      segment_ids: int32, 0 for padding, else the document's number in its row.
      positions: int32, from 0 in each document.
      sample_ids: int32, the document's number in its dataset; keys dropout.
      adapter_ids: int32, which adapter each token trains, where there are several.
    """

    input_ids: Field
    targets: Field
    weights: Field
    segment_ids: Field
    positions: Field
    sample_ids: Field
    adapter_ids: Field | None = None


class TrainState(NamedTuple):
    """What a step changes, and what a checkpoint holds of it.

    Attributes:
      adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}, float32.
      opt_state: The optimizer's moments, float32.
      step: Optimizer steps done, int32 scalar.
    """

    adapters: Params
    opt_state: optax.OptState
    step: Array


class StepMetrics(NamedTuple):
    """Sums over the whole global step, as scalars on the device.

    Attributes:
      loss: Mean loss of a trained token.
      grad_norm: Global norm before clipping.
      trained_tokens: Tokens that carried loss.
    """

    loss: Array
    grad_norm: Array
    trained_tokens: Array
