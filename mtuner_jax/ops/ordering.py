"""When things are computed, where XLA would choose another time.

XLA orders what does not depend on each other as it likes, in and out of loops, which
costs memory where it is early with reads or late with work. A caller of `after` states
what XLA would do without it.
"""

from typing import Any, TypeVar

import jax

Value = TypeVar("Value")
Token = TypeVar("Token")


def after(value: Value, token: Token) -> tuple[Value, Token]:
    """Has `value` used only once `token` is there, and the token only with the value.

    Args:
      value: Arrays of any shape and dtype, as a tree.
      token: Likewise.

    Returns:
      (value, token), unchanged; only uses of what is returned wait. Free: one
      `optimization_barrier`, no copy.
    """
    tied: Any = jax.lax.optimization_barrier((value, token))
    return tied
