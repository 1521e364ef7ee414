"""YAML nodes to values of a config's fields, with errors that name the field."""

import enum
import math
import re
import typing
from typing import Any

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
    is_union = config_fields.is_union(kind)
    match node:
        case yaml.SequenceNode() if origin is tuple or is_union:
            item = arguments[0]
            return tuple(
                parse(f"{name}[{index}]", item, one)
                for index, one in enumerate(node.value)
            )
        case yaml.MappingNode() if origin is dict:
            return {
                key.value: parse(f"{name}[{key.value!r}]", arguments[1], value)
                for key, value in yaml_nodes.items(node)
            }
        case yaml.ScalarNode() if is_union:
            return node.value if node.style else names(node.value)
        case yaml.ScalarNode() if origin is tuple:
            return (parse(name, arguments[0], node),)  # one alone is a list of one
        case yaml.ScalarNode() if origin is None:
            return _scalar(name, kind, node)
    raise _error(name, kind, node)


def names(text: str) -> str | tuple[str, ...]:
    """A list of names for `q_proj,v_proj` and `q_proj`; else the text itself.

    As a regular expression such a text could match nothing (a comma stands in no
    module path) or exactly what the list matches.
    """
    if text in KEYWORDS or not _NAMES.fullmatch(text):
        return text
    return tuple(part.strip() for part in text.split(","))


def _scalar(name: str, kind: type, node: yaml.ScalarNode) -> Any:
    value, hint = yaml_nodes.plain(node), ""
    if issubclass(kind, enum.Enum):
        members = {str(member.value): member for member in kind}
        if node.value in members:
            return members[node.value]
    elif kind is str:
        if node.style or not (value is None or isinstance(value, bool)):
            return node.value
        hint = "put it in quotes if the text is meant"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        hint = "write true or false"
    elif type(value) in (int, float):
        finite = math.isfinite(value)
        if finite and (kind is float or isinstance(value, int)):
            return kind(value)
        whole = f"write {int(value)}" if finite and value.is_integer() else ""
        hint = whole if finite else "it must be finite"
    raise _error(name, kind, node, hint)


def _error(
    name: str, kind: Any, node: yaml.Node, hint: str = ""
) -> configs.ConfigError:
    value, expected = yaml_nodes.plain(node), config_fields.type_name(kind)
    shown = node.value if isinstance(node, yaml.ScalarNode) else value
    article = {"int": "an int", "NoneType": "empty"}
    found = article.get(type(value).__name__, f"a {type(value).__name__}")
    problem = f"{found}, expected {expected}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        problem = f"not one of {expected}"
    problem += f"; {hint}" if hint else ""
    return configs.ConfigError(
        f"{yaml_nodes.where(node)}: {name}={shown!r} is {problem}"
    )
