"""AdamW over adapters that lie side by side, each with settings and steps of its own.

The formulas are those of `optax.clip_by_global_norm` and `optax.adamw`
(`training.optimizers.adamw`), with a number per adapter where those have one number.
Shapes: A adapters, S columns of all adapters on a linear, L layers, D input features,
F output features.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mtuner_jax.configs import OptimizerConfig
from mtuner_jax.protocols.states import Params

# Dims of columns: the last one of A [L, D, S], the second of B [L, S, F].
_COLUMN_DIMS = {"lora_a": 2, "lora_b": 1}


class Moments(NamedTuple):
    """Adapters and what AdamW knows of them, all {module: {leaf: array}}."""

    adapters: Params
    first: Params
    second: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyAdamW:
    """The optimizers of all adapters.

    Attributes:
      configs: Of each adapter (A).
      schedules: Learning rates by optimizer steps done, of each adapter.
      owners: {module: int32 [S], the adapter of each column}.
    """

    configs: Sequence[OptimizerConfig]
    schedules: Sequence[optax.Schedule]
    owners: Mapping[str, np.ndarray]

    def norms(self, grads: Params) -> jax.Array:
        """Global norm of each adapter's gradients, [A]."""
        squares = jnp.zeros(len(self.configs), _dtype(grads))
        for module, leaves in grads.items():
            mine_SA = self._one_hot(module).astype(squares.dtype)
            for leaf, grad in leaves.items():
                dims = tuple({0, 1, 2} - {_COLUMN_DIMS[leaf]})
                squares += jnp.sum(jnp.square(grad), axis=dims) @ mine_SA
        return jnp.sqrt(squares)

    def clipped(self, grads: Params, norms: jax.Array) -> Params:
        """Gradients of each adapter scaled down to its `max_grad_norm`."""
        most = self._setting("max_grad_norm", norms.dtype)
        over = (most > 0) & (norms >= most)
        factor = jnp.where(over, most / jnp.where(over, norms, 1), 1)
        return self.scaled(grads, factor)

    def scaled(self, params: Params, factors: jax.Array) -> Params:
        """Every column times the factor of its adapter, [A]."""
        return self._map(lambda leaf, factor: leaf * factor, params, columns=[factors])

    def update(
        self, grads: Params, moments: Moments, steps: jax.Array, done: jax.Array
    ) -> Moments:
        """One step of the adapters that are done with their batch; others stay.

        Args:
          grads: Clipped.
          moments: Adapters and their moments.
          steps: Optimizer steps done before, [A].
          done: Which adapters step, bool [A].
        """
        dtype = _dtype(grads)
        beta_1 = self._setting("adam_beta1", dtype)
        beta_2 = self._setting("adam_beta2", dtype)
        counts = (steps + 1).astype(dtype)
        rates = [schedule(steps[i]) for i, schedule in enumerate(self.schedules)]
        first = self._map(_decayed, moments.first, grads, columns=[beta_1])
        squares = jax.tree.map(jnp.square, grads)
        second = self._map(_decayed, moments.second, squares, columns=[beta_2])
        unbiased = [
            self.scaled(moment, 1 / (1 - beta**counts))
            for moment, beta in ((first, beta_1), (second, beta_2))
        ]
        directions = self._map(
            lambda m, v, epsilon: m / (jnp.sqrt(v) + epsilon),
            *unbiased,
            columns=[self._setting("adam_epsilon", dtype)],
        )
        adapters = self._map(
            lambda p, direction, rate, decay: p - rate * (direction + decay * p),
            moments.adapters,
            directions,
            columns=[
                jnp.stack([jnp.asarray(rate, dtype) for rate in rates]),
                self._setting("weight_decay", dtype),
            ],
        )
        return self.chosen(done, Moments(adapters, first, second), moments)

    def chosen(self, done: jax.Array, new: Moments, old: Moments) -> Moments:
        """Columns of `new` where their adapter is done, bool [A], else of `old`."""

        def choose(one: jax.Array, other: jax.Array, take: jax.Array) -> jax.Array:
            return jnp.where(take, one, other)

        return Moments(
            *(
                self._map(choose, one, other, columns=[done])
                for one, other in zip(new, old, strict=True)
            )
        )

    def _setting(self, name: str, dtype: jnp.dtype) -> jax.Array:
        return jnp.asarray([getattr(one, name) for one in self.configs], dtype)

    def _one_hot(self, module: str) -> np.ndarray:
        return self.owners[module][:, None] == np.arange(len(self.configs))[None, :]

    def _map(
        self,
        function: Callable[..., jax.Array],
        *trees: Params,
        columns: Sequence[jax.Array],
    ) -> Params:
        """`function` of leaves and, spread over their columns, numbers of adapters."""
        return {
            module: {
                leaf: function(
                    *(tree[module][leaf] for tree in trees),
                    *(
                        jnp.expand_dims(
                            jnp.take(values_A, self.owners[module]),
                            [dim for dim in range(3) if dim != _COLUMN_DIMS[leaf]],
                        )
                        for values_A in columns
                    ),
                )
                for leaf in leaves
            }
            for module, leaves in trees[0].items()
        }


def _decayed(moment: jax.Array, value: jax.Array, beta: jax.Array) -> jax.Array:
    return (1 - beta) * value + beta * moment


def _dtype(params: Params) -> jnp.dtype:
    return jax.tree.leaves(params)[0].dtype
