"""The fields of a config, flat: dotted name, type, default and what it means.

Names, types and defaults come from the dataclasses, texts from the `Attributes:`
of their docstrings, so that `--help` and docs/configuration.md cannot drift.
"""

import dataclasses
import enum
import inspect
import re
import textwrap
import types
import typing
from typing import Any

from mtuner_jax.numbers import tables

_ATTRIBUTE = re.compile(r"^(?P<name>\w+): (?P<text>.*(?:\n  .*)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One setting a user can type.

    Attributes:
      name: Dotted, as in YAML and flags: `lora.r`.
      type: The annotation, resolved.
      default: Value when nobody sets it.
      text: What it means, one paragraph.
    """

    name: str
    type: Any
    default: Any
    text: str

    @property
    def group(self) -> str:
        """`lora` for `lora.r`, empty for a field of the run itself."""
        return self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A config, or one inside it.

    Attributes:
      title: First line of its docstring.
      fields: Its own settings.
    """

    title: str
    fields: list[Field]


def of(config_type: type) -> dict[str, Field]:
    """All fields of a config and of the configs inside it, by dotted name."""
    found = groups(config_type).values()
    return {field.name: field for group in found for field in group.fields}


def groups(config_type: type, *, prefix: str = "") -> dict[str, Group]:
    """A config's own fields under "", and those of each config inside it."""
    hints = typing.get_type_hints(config_type)
    texts = _attribute_texts(config_type)
    title = (inspect.getdoc(config_type) or "").partition("\n")[0]
    found = {prefix.rstrip("."): Group(title=title, fields=[])}
    for field in dataclasses.fields(config_type):
        name, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            found |= groups(typing.cast(type, kind), prefix=f"{name}.")
            continue
        found[prefix.rstrip(".")].fields.append(
            Field(
                name=name,
                type=kind,
                default=_default(field),
                text=texts.get(field.name, ""),
            )
        )
    return found


def type_name(kind: Any) -> str:
    """How a type reads to a user: `float`, `list of str`, `cpu | gpu`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_union(kind):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"map of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if issubclass(kind, enum.Enum):
        return " | ".join(member.value for member in kind)
    return kind.__name__


def is_union(kind: Any) -> bool:
    """Whether `kind` is `A | B`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def default_text(default: Any) -> str:
    """A default as a user would type it."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[" + ", ".join(map(str, default)) + "]"
    return str(default) if default != "" else "''"


def help_text(config_type: type) -> str:
    """One entry for each flag: name, type, default, meaning."""
    lines: list[str] = []
    for name, group in groups(config_type).items():
        lines += ["", f"{name or 'run'}: {group.title}"]
        for field in group.fields:
            default = default_text(field.default)
            lines.append(f"  --{field.name} ({type_name(field.type)}; {default})")
            indent = " " * 6
            lines += textwrap.wrap(
                field.text, 78, initial_indent=indent, subsequent_indent=indent
            )
    return "\n".join(lines[1:])


def markdown(config_type: type) -> str:
    """Tables of all settings, one for each group, for docs/configuration.md."""
    parts = []
    for name, group in groups(config_type).items():
        rows = [
            (
                f"`{field.name}`",
                type_name(field.type),
                f"`{default_text(field.default)}`",
                field.text,
            )
            for field in group.fields
        ]
        table = tables.markdown("setting | type | default | meaning", rows)
        heading = f"`{name}`" if name else "The run"
        parts.append(f"## {heading}\n\n{group.title}\n\n{table}")
    return "\n".join(parts)


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    assert field.default is not dataclasses.MISSING, f"{field.name} has no default"
    return field.default


def _attribute_texts(config_type: type) -> dict[str, str]:
    """Texts of the `Attributes:` sections of a class and of its bases."""
    texts: dict[str, str] = {}
    for base in reversed(config_type.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for match in _ATTRIBUTE.finditer(textwrap.dedent(section)):
            texts[match["name"]] = " ".join(match["text"].split())
    return texts
