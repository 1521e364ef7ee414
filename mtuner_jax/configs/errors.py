"""What is wrong with a setting, and the checks that most settings need."""

from collections.abc import Collection
from typing import Any


class ConfigError(ValueError):
    """A setting the user has to change; the text says which and to what."""


def require(condition: object, text: str) -> None:
    """Raises a ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(text)


def at_least(least: int, config: Any, *names: str, prefix: str = "") -> None:
    """Checks that these fields of a config, called `prefix` + name, are high enough."""
    must = f"must be at least {least}" if least else "must not be negative"
    for name in names:
        value = getattr(config, name)
        require(value >= least, f"{prefix}{name}={value} {must}")


def one_of(config: Any, name: str, allowed: Collection[str]) -> None:
    """Checks that a field of a config has one of the allowed values."""
    value = getattr(config, name)
    require(value in allowed, f"{name}={value!r}: one of {', '.join(allowed)}")
