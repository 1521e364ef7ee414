"""What a user wrote, in a YAML file or as flags, as named YAML nodes."""

import dataclasses
import difflib
import pathlib
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from mtuner_jax import configs
from mtuner_jax.settings import config_fields, other_tools, yaml_nodes

# Names of older Hugging Face configs, and what they are called here.
ALIASES = {"model_name_or_path": "model", "warmup_ratio": "warmup_steps"}
# A plain value for a group means this setting of it.
GROUP_ALIASES = {"dataset": "dataset.path"}
_FLOW_LIST = re.compile(r"\[[^\[\]]*\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """One value somebody wrote.

    Attributes:
      name: The field it is for, dotted; empty if there is none.
      asked: The name that was written, which may be an alias.
      node: The value.
    """

    name: str
    asked: str
    node: yaml.Node


def read_yaml(path: str | pathlib.Path, config_type: type) -> list[Written]:
    """Settings of a YAML file; nested or with dotted names, null is not set.

    Raises:
      ConfigError: The file cannot be read, keys are unknown (all of them are told), or
        one stands twice.
    """
    text = _read_text(pathlib.Path(path))
    root = yaml_nodes.compose(text, source=str(path))
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise configs.ConfigError(f"{path}: expected lines such as `max_steps: 20`")
    fields = config_fields.of(config_type)
    settings = list(_flatten(root, fields=fields))
    _refuse_unknown(settings, fields, source=str(path))
    first: dict[str, Written] = {}
    for setting in settings:
        earlier = first.setdefault(setting.name, setting)
        if earlier is not setting:
            raise configs.ConfigError(
                f"{yaml_nodes.where(setting.node)}: {setting.asked} sets "
                f"{setting.name}, which {yaml_nodes.where(earlier.node)} has set "
                f"already as {earlier.asked}; remove one of them"
            )
    return settings


def read_flags(
    argv: Sequence[str], config_type: type
) -> tuple[dict[str, str], list[Written]]:
    """Splits a command line into the parser's own options and settings.

    Returns:
      `config`, `help` and `print_config` as far as they stand there, and the settings
      in their order.
    """
    fields = config_fields.of(config_type)
    options: dict[str, str] = {}
    settings: list[Written] = []
    for flag, values in _split(argv):
        asked = flag.removeprefix("--").replace("-", "_")
        if asked in ("help", "print_config") and not values:
            options[asked] = ""
        elif asked == "config":
            options[asked] = _only(flag, values)
        else:
            name = _known_name(asked, fields, where=flag)
            kind = fields[name].type if name else None
            node = _flag_node(flag, kind, values if name else [" ".join(values)])
            settings.append(Written(name=name, asked=asked, node=node))
    _refuse_unknown(settings, fields, source="the command line")
    return options, settings


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags, each with the values up to the next one."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        word = "--help" if word == "-h" else word
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise configs.ConfigError(
                f"unexpected argument {word!r}: settings are written --NAME VALUE"
            )
    return groups


def _only(flag: str, values: list[str]) -> str:
    if not values:
        raise configs.ConfigError(f"{flag}: its value is missing")
    if len(values) > 1:
        raise configs.ConfigError(
            f"{flag} takes one value, found {len(values)}: {' '.join(values)}"
        )
    return values[0]


def _flag_node(flag: str, kind: Any, values: list[str]) -> yaml.Node:
    """The values of a flag as the node a YAML file would have in its place."""
    is_tuple = typing.get_origin(kind) is tuple
    takes_list = is_tuple or config_fields.is_union(kind)
    item = typing.get_args(kind)[0] if takes_list else kind
    if kind is bool and not values:
        values = ["true"]
    if is_tuple and len(values) == 1 and not _FLOW_LIST.fullmatch(values[0]):
        values = values[0].split(",")
    if takes_list and len(values) > 1:
        words = [_word_node(flag, item, value) for value in values]
        return yaml_nodes.node(words, source=flag)
    text = _only(flag, values)
    is_list = takes_list and _FLOW_LIST.fullmatch(text)
    return _word_node(flag, None if is_list else item, text)


def _word_node(flag: str, kind: Any, text: str) -> yaml.Node:
    """A value as a YAML file would have it; for a text field it is text as it is."""
    is_text = isinstance(kind, type) and issubclass(kind, str)
    node = None if is_text else yaml_nodes.compose(text, source=flag)
    return node or yaml_nodes.node(text, source=flag)


def _flatten(
    node: yaml.MappingNode, *, fields: dict[str, config_fields.Field], prefix: str = ""
) -> Iterable[Written]:
    groups = {field.group for field in fields.values()} - {""}
    for key, value in yaml_nodes.items(node):
        asked = prefix + key.value.replace("-", "_")
        is_null = value.tag == yaml_nodes.NULL_TAG
        if asked in groups and isinstance(value, yaml.MappingNode):
            yield from _flatten(value, prefix=f"{asked}.", fields=fields)
        elif not (is_null and asked in groups):
            name = _known_name(asked, fields, where=yaml_nodes.where(key))
            if not (is_null and name):
                yield Written(name=name, asked=asked, node=value)


def _known_name(
    asked: str, fields: dict[str, config_fields.Field], *, where: str
) -> str:
    """The field's name for what was written, empty if there is none."""
    name = (ALIASES | GROUP_ALIASES).get(asked, asked)
    if name in fields:
        return name
    inside = [known for known in fields if fields[known].group == asked]
    if inside:
        raise configs.ConfigError(
            f"{where}: {asked} is a group, set one of {', '.join(inside)}"
        )
    return ""


def _refuse_unknown(
    settings: Sequence[Written], fields: dict[str, config_fields.Field], *, source: str
) -> None:
    """Raises one error that names all unknown settings, and what to write instead."""
    unknown = [setting for setting in settings if not setting.name]
    told = [
        f"{yaml_nodes.where(one.node)}: unknown setting {one.asked}; "
        f"{_instead(one, fields)}"
        for one in unknown
    ]
    if len(told) > 1:
        head = f"{source}: {len(told)} of {len(settings)} settings are unknown"
        raise configs.ConfigError("\n  ".join([head, *told]))
    if told:
        raise configs.ConfigError(told[0])


def _instead(setting: Written, fields: dict[str, config_fields.Field]) -> str:
    """What to write for an unknown setting: another tool's, or the nearest name."""
    asked, node = setting.asked, setting.node
    value = node.value if isinstance(node, yaml.ScalarNode) else ""
    ours = other_tools.renamed(asked, value)
    if ours and ours[0] in fields:
        form = "--{} {}" if yaml_nodes.where(node).startswith("--") else "{}: {}"
        return f"write {form.format(*ours).rstrip(': ')}"
    if asked in other_tools.REASONS:
        return other_tools.REASONS[asked]
    spellings = {known.replace(".", "_"): known for known in fields}
    spellings |= {known.rpartition(".")[2]: known for known in fields}
    spellings |= {alias: alias for alias, known in ALIASES.items() if known in fields}
    close = difflib.get_close_matches(asked.replace(".", "_"), spellings, n=1)
    return f"did you mean {spellings[close[0]]}?" if close else "--help lists them all"


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise configs.ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise configs.ConfigError(f"{path}: save it as UTF-8 ({error})") from error
