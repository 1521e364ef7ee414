"""Whether a machine's figures can be: each check raises ConfigError with the figure."""

import math
from collections.abc import Sequence
from typing import Any

from mtuner_jax.configs import ConfigError


def number(name: str, field: str, value: Any, *, least: float | None) -> None:
    """Finite, and above 0 (`least` None) or at least `least`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    good = is_number and math.isfinite(value)
    if not good or (value <= 0 if least is None else value < least):
        bound = "above 0" if least is None else f"at least {least}"
        raise ConfigError(f"hardware {name}: {field}={value!r} must be {bound}")


def links(name: str, found: Sequence[Any], sizes: Sequence[Any]) -> None:
    """One link per axis."""
    whole = all(type(size) is int and size >= 1 for size in sizes)
    if len(found) != len(sizes) or not whole:
        raise ConfigError(
            f"hardware {name}: {len(found)} links, mesh_sizes={sizes}; one "
            "link per axis, sizes whole numbers from 1 on"
        )


def matmul(name: str, pairs: Sequence[Any]) -> None:
    """Rates by tokens, ascending."""
    tokens = [pair[0] for pair in pairs if len(pair) == 2]
    if not pairs or len(tokens) != len(pairs) or tokens != sorted(set(tokens)):
        raise ConfigError(
            f"hardware {name}: matmul_flops_per_s at tokens {tokens}; one "
            "pair or more, tokens ascending"
        )
    for count, rate in pairs:
        number(name, "matmul_flops_per_s tokens", count, least=1)
        number(name, f"rate at {count} tokens", rate, least=None)
