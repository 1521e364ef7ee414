"""Named tensors that a layer's backward pass gets instead of recomputing them.

The layer calls `tape.keep(name, value)`. Forward, the tape records what the plan
saves. Backward, the layer is run again under `jax.vjp` with a tape that holds the
saved values: `keep` returns the saved value and sends the gradient to the computed
one, whose own computation then has no use left and is removed by the compiler.
"""

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp


class Tape:
    """Records named tensors in the forward pass, replays them in the backward pass.

    Attributes:
      recorded: What `keep` has recorded so far.
    """

    def __init__(
        self,
        names: Iterable[str] = (),
        *,
        saved: Mapping[str, jax.Array] | None = None,
    ):
        self._names = frozenset(names)
        self._saved = saved
        self.recorded: dict[str, jax.Array] = {}

    def keep(self, name: str, value: jax.Array) -> jax.Array:
        """Marks `value`, of any shape, as a tensor that a plan may save."""
        if name not in self._names:
            return value
        if self._saved is not None:
            return substitute(value, self._saved[name])
        self.recorded[name] = value
        return value

    def keep_pair(
        self,
        name: str,
        compute: Callable[[], tuple[jax.Array, jax.Array]],
        replay: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """As `keep`, for an operation whose backward needs its output and one more.

        Args:
          name: The output is saved under it, the other as `{name}_extra`.
          compute: Runs the operation and returns (output, extra).
          replay: Takes the saved two and returns the output, without running the
            operation, but with its gradient.
        """
        extra_name = f"{name}_extra"
        if name in self._names and self._saved is not None:
            return replay(self._saved[name], self._saved[extra_name])
        output, extra = compute()
        if name in self._names:
            self.recorded |= {name: output, extra_name: extra}
        return output


@jax.custom_vjp
def substitute(computed: jax.Array, saved: jax.Array) -> jax.Array:
    """Has the value of `saved` and the gradient of `computed`, both of one shape.

    Unlike `saved + computed - stop_gradient(computed)` it makes no use of the value of
    `computed`, so that XLA removes the forward computation that led to it.
    """
    del computed
    return saved


def _substitute_fwd(computed: jax.Array, saved: jax.Array) -> tuple[jax.Array, None]:
    del computed
    return saved, None


def _substitute_bwd(
    residuals: None, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del residuals
    return cotangent, jnp.zeros_like(cotangent)


substitute.defvjp(_substitute_fwd, _substitute_bwd)
