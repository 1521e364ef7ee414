"""YAML read by the 1.2 core schema, as nodes that know their file and line.

PyYAML follows YAML 1.1: there `1e-4` is a string and `no` is false. Here the core
schema of YAML 1.2 decides (`1e-4` is a float, `no` is a string), and values stay
nodes until the type of the field they are for is known.
"""

import enum
import re
from typing import Any

import yaml

from mtuner_jax import configs

NULL_TAG = "tag:yaml.org,2002:null"
BOOL_TAG = "tag:yaml.org,2002:bool"
INT_TAG = "tag:yaml.org,2002:int"
FLOAT_TAG = "tag:yaml.org,2002:float"
STR_TAG = "tag:yaml.org,2002:str"
SEQ_TAG = "tag:yaml.org,2002:seq"

_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
# Tried in this order; `1` is an int although the float pattern matches it too.
_CORE_SCHEMA = (
    (NULL_TAG, re.compile(r"(null|Null|NULL|~|)")),
    (BOOL_TAG, re.compile(r"(true|True|TRUE|false|False|FALSE)")),
    (INT_TAG, re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")),
    (FLOAT_TAG, _FLOAT),
)


class _Composer(yaml.SafeLoader):
    """Resolves plain scalars by the core schema of YAML 1.2."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's name and type)
        None: [(tag, re.compile(rf"(?:{p.pattern})\Z")) for tag, p in _CORE_SCHEMA]
    }


class Quoted(str):
    """A string that `dump` writes in quotes although it needs none."""


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would not read back as a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's name and type)
        first: list(resolvers)
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(FLOAT_TAG, re.compile(rf"(?:{_FLOAT.pattern})\Z"), None)
_Dumper.add_representer(
    Quoted, lambda dumper, data: dumper.represent_scalar(STR_TAG, data, style='"')
)
_Dumper.add_representer(
    tuple,
    lambda dumper, data: dumper.represent_sequence(SEQ_TAG, data, flow_style=True),
)
_Dumper.add_multi_representer(
    enum.StrEnum, lambda dumper, data: dumper.represent_str(data.value)
)


def compose(text: str, *, source: str) -> yaml.Node | None:
    """Parses one YAML document.

    Args:
      text: The document.
      source: What errors call it: a file's path or a flag.

    Returns:
      Its root node, None for an empty document.
    """
    try:
        loader = _Composer(text)
        loader.name = source
        return loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = _place(source, mark.line) if mark else source
        problem = getattr(error, "problem", error)
        raise configs.ConfigError(f"{at}: not valid YAML: {problem}") from error


def node(value: str | list[yaml.Node], *, source: str) -> yaml.Node:
    """Node of a string that no schema looks at, or of a list, as from `source`."""
    mark = yaml.Mark(source, 0, 0, 0, None, 0)
    if isinstance(value, str):
        return yaml.ScalarNode(STR_TAG, value, mark, mark)
    return yaml.SequenceNode(SEQ_TAG, value, mark, mark)


def where(node: yaml.Node) -> str:
    """`run.yaml:3` for a node of a file, `--lora.r` for one of a flag."""
    return _place(node.start_mark.name, node.start_mark.line)


def _place(source: str, line: int) -> str:
    return source if source.startswith("--") else f"{source}:{line + 1}"


def plain(node: yaml.Node) -> Any:
    """Python value of a node: None, bool, int, float, str, list or dict.

    Raises:
      ConfigError: A key stands twice, or a tag is not one of the core schema.
    """
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: plain(value) for key, value in items(node)}
    if node.tag not in _CONVERTERS:
        raise configs.ConfigError(
            f"{where(node)}: the tag {node.tag} is not supported; remove it"
        )
    return _CONVERTERS[node.tag](node.value)


def items(node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """Key and value nodes of a mapping; a key twice is an error."""
    first: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise configs.ConfigError(f"{where(key)}: a key must be a plain word")
        if key.value in first:
            raise configs.ConfigError(
                f"{where(key)}: {key.value!r} stands already at "
                f"{where(first[key.value])}; remove one of them"
            )
        first[key.value] = key
    return node.value


def dump(tree: dict[str, Any]) -> str:
    """YAML text of nested dicts that `compose` and YAML 1.1 readers read alike."""
    return yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20
    )


_CONVERTERS = {
    NULL_TAG: lambda text: None,
    BOOL_TAG: lambda text: text.lower() == "true",
    INT_TAG: lambda text: int(text, 0 if text.startswith(("0o", "0x")) else 10),
    FLOAT_TAG: lambda text: float(re.sub(r"\.(?=[a-z])", "", text.lower())),
    STR_TAG: str,
}
