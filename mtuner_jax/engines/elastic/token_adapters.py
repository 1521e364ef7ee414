"""What differs between tokens: their adapter, its dropout, whom their loss belongs to.

With one adapter nothing does. Letters: B batch, T tokens, A adapters, S the columns of
all adapters on a linear, L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.adapters import lora
from mtuner_jax.adapters.stacks import Stack
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.ops import dropout
from mtuner_jax.ops.cross_entropy.operands import TokenLoss
from mtuner_jax.ops.low_rank.operands import Dropout
from mtuner_jax.protocols.states import Batch


class Owners(NamedTuple):
    """Which columns of a stack each token uses.

    Attributes:
      adapter_ids: Each token's adapter, int32 [B, T].
      columns: {module: int32 [S], the adapter of each column}.
    """

    adapter_ids: jax.Array
    columns: dict[str, jax.Array]

    def scale(self, module: str, scaling_S: jax.Array) -> jax.Array:
        """Each token's factors, 0 in columns of other adapters, [B, T, S]."""
        mine = self.adapter_ids[:, :, None] == self.columns[module][None, None, :]
        return jnp.where(mine, scaling_S[None, None, :], 0.0)


def owners(spec: StepSpec, batch: Batch[jax.Array]) -> Owners | None:
    """Of a stack's batch; None with one adapter."""
    if spec.stack is None:
        return None
    columns = {name: jnp.asarray(s) for name, s in spec.stack.owners().items()}
    return Owners(_ids(batch), columns)


def scalings(spec: StepSpec) -> dict[str, jax.Array]:
    """{module: [L]}, of a stack [L, S], float32."""
    if spec.stack is None:
        return lora.scaling_arrays(spec.adapters)
    return spec.stack.scalings()


def drop(
    spec: StepSpec, step: jax.Array | None, batch: Batch[jax.Array]
) -> Dropout | None:
    """Randomness of a step, or None if nothing is dropped.

    Args:
      spec: The step.
      step: Optimizer steps done, of a stack those of each adapter [A]; None in
        evaluations.
      batch: What runs.
    """
    if step is None:
        return None
    places = dropout.Places(batch.sample_ids, batch.positions)
    if spec.stack is None:
        if not spec.dropout_rate:
            return None
        key = dropout.fold_in(dropout.key(spec.seed), step)
        return Dropout(key, places, spec.dropout_rate)
    if not any(member.dropout_rate for member in spec.stack.members):
        return None
    key, rates_A = _each_adapter(spec.stack, step)
    ids_BT = _ids(batch)
    return Dropout(
        jax.tree.map(lambda word_A: jnp.take(word_A, ids_BT), key),
        places,
        jnp.take(rates_A, ids_BT),
    )


def sums(spec: StepSpec, loss_S: jax.Array, batch: Batch[jax.Array]) -> TokenLoss:
    """Sums over tokens; of a stack those of each adapter, [A].

    Args:
      spec: The step.
      loss_S: Weighted losses of the batch's tokens, B * T of them.
      batch: Whose tokens they are.
    """
    weights_S = batch.weights.reshape(-1).astype(loss_S.dtype)
    if spec.stack is None:
        return TokenLoss(jnp.sum(loss_S), jnp.sum(weights_S))
    numbers = jnp.arange(len(spec.stack.members), dtype=jnp.int32)
    mine_AS = numbers[:, None] == _ids(batch).reshape(1, -1)

    def of_each(values_S: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(mine_AS, values_S[None, :], 0), axis=1)

    return TokenLoss(of_each(loss_S), of_each(weights_S))


def _each_adapter(stack: Stack, steps_A: jax.Array) -> tuple[dropout.Key, jax.Array]:
    """Each adapter's key, words [A], as in a run of its own, and its rate [A]."""
    roots = [dropout.key(member.seed) for member in stack.members]
    root = dropout.Key(*(jnp.stack(words) for words in zip(*roots, strict=True)))
    # As wide as Python's numbers where the test says so: 1 - rate must not differ.
    rates = jnp.asarray([member.dropout_rate for member in stack.members])
    return dropout.fold_in(root, steps_A), rates


def _ids(batch: Batch[jax.Array]) -> jax.Array:
    assert batch.adapter_ids is not None  # whoever builds a stack's batch sets it
    return batch.adapter_ids
