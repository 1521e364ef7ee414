"""What a user can mend, and the checks that most settings need.

Every error that a user can do something about derives from `UserError`; programs print
it as `error: ...` and end with its `exit_code` (`settings.programs.guarded`).
Anything else is a fault of ours and keeps its traceback.
"""

from collections.abc import Collection
from typing import Any, ClassVar


class UserError(ValueError):
    """What a user can mend: what was asked, what was found, what to change."""

    exit_code: ClassVar[int] = 2


class ConfigError(UserError):
    """A setting the user has to change; the text says which and to what."""


class RunError(UserError):
    """A run under way that cannot go on, such as a loss that is no number."""

    exit_code = 1


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
