"""What a step of many adapters changes, and what it tells.

Shapes: A adapters, L layers, D input features, F output features, S the ranks of all
adapters on a linear side by side (`adapters.stacks`).
"""

from typing import NamedTuple

import jax

from mtuner_jax.protocols.states import Array, Params


class ManyState(NamedTuple):
    """Many adapters on their way, each at a step of its own.

    Attributes:
      adapters: {module: {"lora_a": [L, D, S], "lora_b": [L, S, F]}}, float32.
      first_moments: AdamW's, like `adapters`.
      second_moments: AdamW's, like `adapters`.
      grads: Gradients of the token losses of batches that have begun, like `adapters`.
      loss: Sums of token losses of those batches, [A].
      tokens: Trained tokens of those batches, [A].
      steps: Optimizer steps done by each adapter, int32 [A].
      step: Engine steps done, int32 scalar.
    """

    adapters: Params
    first_moments: Params
    second_moments: Params
    grads: Params
    loss: Array
    tokens: Array
    steps: Array
    step: Array


class ManyMetrics(NamedTuple):
    """What a step tells of the adapters whose batches it ended; others' are 0.

    Attributes:
      loss: Mean loss of a trained token of the whole batch, [A].
      grad_norm: Global norm before clipping, [A].
      trained_tokens: Tokens of the batch that carried loss, [A].
      finite: Whether all sums of the step are finite; if not, nothing was changed.
    """

    loss: jax.Array
    grad_norm: jax.Array
    trained_tokens: jax.Array
    finite: jax.Array
