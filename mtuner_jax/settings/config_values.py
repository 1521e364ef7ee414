"""YAML nodes to values of a config's fields, with errors that name the field."""

import enum
import math
import re
import typing
from typing import Any, NoReturn

import yaml

from mtuner_jax import configs
from mtuner_jax.settings import config_fields, yaml_nodes

_NAMES = re.compile(r"[\w.]+(\s*,\s*[\w.]+)*")
# Words a `str or list of str` field takes as they are, not as a list of one.
KEYWORDS = ("all-linear",)


def parse(name: str, kind: Any, node: yaml.Node) -> Any:
    """Value of the field `name` of type `kind`, as the user wrote it in `node`.

    Raises:
      ConfigError: With the field, the value, its type and the expected type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if config_fields.is_union(kind):
        return _text_or_names(name, kind, node)
    if origin is tuple:
        return _items(name, arguments[0], node)
    if origin is dict:
        if not isinstance(node, yaml.MappingNode):
            _refuse(name, kind, node)
        return {
            key.value: parse(f"{name}[{key.value!r}]", arguments[1], value)
            for key, value in yaml_nodes.items(node)
        }
    if not isinstance(node, yaml.ScalarNode):
        _refuse(name, kind, node)
    if issubclass(kind, enum.Enum):
        return _member(name, kind, node)
    return _SCALARS[kind](name, kind, node)


def names(text: str) -> str | tuple[str, ...]:
    """A list of names for `q_proj,v_proj` and `q_proj`; else the text itself.

    As a regular expression such a text could match nothing (a comma stands in no
    module path) or exactly what the list matches.
    """
    if text in KEYWORDS or not _NAMES.fullmatch(text):
        return text
    return tuple(part.strip() for part in text.split(","))


def _text_or_names(name: str, kind: Any, node: yaml.Node) -> str | tuple[str, ...]:
    if isinstance(node, yaml.SequenceNode):
        return _items(name, str, node)
    if not isinstance(node, yaml.ScalarNode):
        _refuse(name, kind, node)
    return node.value if node.style else names(node.value)


def _items(name: str, kind: Any, node: yaml.Node) -> tuple[Any, ...]:
    """A list; one value alone is a list of one."""
    if isinstance(node, yaml.ScalarNode):
        return (parse(name, kind, node),)
    if not isinstance(node, yaml.SequenceNode):
        _refuse(name, tuple[kind, ...], node)
    return tuple(
        parse(f"{name}[{index}]", kind, item) for index, item in enumerate(node.value)
    )


def _member(name: str, kind: type[enum.Enum], node: yaml.ScalarNode) -> enum.Enum:
    members = {str(member.value): member for member in kind}
    if node.value not in members:
        _refuse(name, kind, node)
    return members[node.value]


def _text(name: str, kind: type, node: yaml.ScalarNode) -> str:
    if node.tag in (yaml_nodes.BOOL_TAG, yaml_nodes.NULL_TAG) and not node.style:
        _refuse(name, kind, node, "put it in quotes if the text is meant")
    return node.value


def _number(name: str, kind: type, node: yaml.ScalarNode) -> int | float:
    value = yaml_nodes.plain(node)
    if isinstance(value, str | bool) or value is None:
        _refuse(name, kind, node)
    if not math.isfinite(value):
        _refuse(name, kind, node, "it must be finite")
    if kind is int and isinstance(value, float):
        hint = f"write {int(value)}" if value.is_integer() else ""
        _refuse(name, kind, node, hint)
    return kind(value)


def _bool(name: str, kind: type, node: yaml.ScalarNode) -> bool:
    value = yaml_nodes.plain(node)
    if not isinstance(value, bool):
        _refuse(name, kind, node, "write true or false")
    return value


_SCALARS = {str: _text, int: _number, float: _number, bool: _bool}


def _refuse(name: str, kind: Any, node: yaml.Node, hint: str = "") -> NoReturn:
    value = yaml_nodes.plain(node)
    shown = node.value if isinstance(node, yaml.ScalarNode) else value
    article = {"int": "an int", "NoneType": "empty"}
    found = article.get(type(value).__name__, f"a {type(value).__name__}")
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        problem = f"not one of {config_fields.type_name(kind)}"
    else:
        problem = f"{found}, expected {config_fields.type_name(kind)}"
    raise configs.ConfigError(
        f"{yaml_nodes.where(node)}: {name}={shown!r} is {problem}"
        + (f"; {hint}" if hint else "")
    )
