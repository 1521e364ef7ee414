"""What a user can mend, and the checks that most settings need.

Every error that a user can do something about derives from `UserError`; programs print
it as `error: ...` and end with its `exit_code` (`settings.programs.guarded`).
Anything else is a fault of ours and keeps its traceback.
"""

import difflib
import re
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


def within(low: float, high: float, config: Any, *names: str, prefix: str = "") -> None:
    """Checks that these fields, called `prefix` + name, are in [low, high)."""
    for name in names:
        value = getattr(config, name)
        require(
            low <= value < high, f"{prefix}{name}={value} must be in [{low}, {high})"
        )


def above(low: float, value: float, name: str) -> None:
    """Checks that the value of a setting is higher than `low`."""
    require(value > low, f"{name}={value} must be above {low}")


def regular_expression(pattern: str, name: str) -> None:
    """Checks that the text of a setting is one."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{name}={pattern!r} is no regular expression: {error}"
        ) from error


def one_of(
    config: Any, name: str, allowed: Collection[str], *, suffix: str = ""
) -> None:
    """Checks that a field has one of the allowed values, or names a file `*suffix`."""
    value = getattr(config, name)
    near = difflib.get_close_matches(value, allowed, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    choices = [*allowed, f"a {suffix} file"] if suffix else allowed
    require(
        value in allowed or (suffix and value.endswith(suffix)),
        f"{name}={value!r}{hint}: one of {', '.join(choices)}",
    )
