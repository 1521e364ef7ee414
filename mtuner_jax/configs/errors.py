"""What is wrong with a setting, and the checks that most settings need."""

from collections.abc import Collection
from typing import Any


class ConfigError(ValueError):
    """A setting the user has to change; the text says which and to what."""


def require(condition: object, text: str) -> None:
    """Raises a ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(text)


def at_least_one(config: Any, *names: str) -> None:
    """Checks that these fields of a config are 1 or more."""
    for name in names:
        value = getattr(config, name)
        require(value >= 1, f"{name}={value} must be at least 1")


def not_negative(config: Any, *names: str) -> None:
    """Checks that these fields of a config are 0 or more."""
    for name in names:
        value = getattr(config, name)
        require(value >= 0, f"{name}={value} must not be negative")


def one_of(config: Any, name: str, allowed: Collection[str]) -> None:
    """Checks that a field of a config has one of the allowed values."""
    value = getattr(config, name)
    require(value in allowed, f"{name}={value!r}: one of {', '.join(allowed)}")
