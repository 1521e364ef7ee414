"""Which token comes next. V vocabulary, B rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Choice(NamedTuple):
    """How a token is chosen, as transformers' GenerationConfig names it.

    Attributes:
      temperature: 0 takes the most likely token; else logits are divided by it.
      top_k: Only the k most likely tokens; 0 means all.
      top_p: Only the most likely tokens that together have this probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def sample(logits_BV: jax.Array, key: jax.Array, choice: Choice) -> jax.Array:
    """Chooses a token of each row, int32 [B]."""
    if choice.temperature == 0.0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / choice.temperature
    lowest = jnp.finfo(logits_BV.dtype).min
    if choice.top_k:
        k = min(choice.top_k, logits_BV.shape[-1])
        least_BK = jax.lax.top_k(logits_BV, k)[0]
        logits_BV = jnp.where(logits_BV < least_BK[:, -1:], lowest, logits_BV)
    if choice.top_p < 1.0:
        ordered_BV = -jnp.sort(-logits_BV, axis=-1)
        shares_BV = jax.nn.softmax(ordered_BV, axis=-1)
        # The first token that reaches the share still belongs to it.
        before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
        kept_BV = jnp.where(before_BV < choice.top_p, ordered_BV, jnp.inf)
        least_B1 = jnp.min(kept_BV, axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, lowest, logits_BV)
    return jax.random.categorical(key, logits_BV, axis=-1).astype(jnp.int32)
