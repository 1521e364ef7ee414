"""Dataclasses <-> JSON: checked field by field, byte for byte the same for equal ones.

Plans, timelines, machines and lists of runs are files. All are written and read here,
so that a file that is no such thing is told the same way whichever it is.
"""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from mtuner_jax.configs import ConfigError

T = TypeVar("T")
_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of file.

    Attributes:
      what: Its name in messages, such as `plan`.
      version: That is written, and the only one that is read.
      again: What a user does about another version.
    """

    what: str
    version: int
    again: str

    def to_json(
        self, record: Any, *, indent: int | None = 1, digits: int | None = None
    ) -> str:
        """Serialises a dataclass.

        Args:
          record: The dataclass.
          indent: Of nested lines; None writes one line.
          digits: Behind the point of every float; None keeps all.
        """
        content = {"version": self.version, **dataclasses.asdict(record)}
        if digits is not None:
            content = _rounded(content, digits)
        return json.dumps(content, sort_keys=True, indent=indent) + "\n"

    def from_json(self, text: str, kind: type[T]) -> T:
        """Reads what `to_json` wrote; fields with defaults may be missing.

        Raises:
          ConfigError: No JSON, another version, a field that is missing, unknown or of
            another type, or values that `kind` refuses.
        """
        try:
            content: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{self.what}: not JSON: {error}") from error
        if not isinstance(content, dict):
            found = type(content).__name__
            raise ConfigError(f"{self.what}: a JSON object, not {found}")
        version = content.pop("version", None)
        if version != self.version:
            raise ConfigError(
                f"{self.what} version {version} is not {self.version}; {self.again}"
            )
        return _record(self.what, content, kind)


def _record(what: str, content: Mapping[str, Any], kind: type[T]) -> T:
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore
    missing = [
        name
        for name, field in fields.items()
        if name not in content
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    for has, wrong in (("misses", missing), ("has", content.keys() - fields.keys())):
        if wrong:
            raise ConfigError(
                f"{what}: {has} the field {', '.join(sorted(wrong))}; its fields are "
                f"{', '.join(sorted(fields))}"
            )
    return kind(
        **{name: _value(what, name, x, hints[name]) for name, x in content.items()}
    )


def _value(what: str, name: str, value: Any, kind: Any) -> Any:
    """A field's value as its annotation wants it."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        _check(what, name, value, dict)
        return _record(what, value, kind)
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        if value not in list(kind):
            raise ConfigError(f"{what}: {name}={value!r}; one of {', '.join(kind)}")
        return kind(value)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # such as `str | None`
        return value if value is None else _value(what, name, value, inner[0])
    if origin is tuple:
        _check(what, name, value, tuple)
        each = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(each) != len(value):
            raise ConfigError(f"{what}: {name}={value!r} has not {len(inner)} entries")
        return tuple(
            _value(what, name, entry, one)
            for entry, one in zip(value, each, strict=True)
        )
    if origin is dict:
        _check(what, name, value, dict)
        return {key: _value(what, name, one, inner[1]) for key, one in value.items()}
    _check(what, name, value, kind)
    return value


def _check(what: str, name: str, value: Any, kind: Any) -> None:
    # A bool is an int to Python, not in a file; an int is a number, a tuple a list.
    good = {
        float: type(value) in (int, float),
        tuple: isinstance(value, list),
        Any: True,
    }.get(kind, type(value) is kind)
    if not good:
        raise ConfigError(f"{what}: {name}={value!r} is not {_NAMES[kind]}")


def _rounded(node: Any, digits: int) -> Any:
    if isinstance(node, float):
        return round(node, digits)
    if isinstance(node, dict):
        return {key: _rounded(value, digits) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_rounded(value, digits) for value in node]
    return node
