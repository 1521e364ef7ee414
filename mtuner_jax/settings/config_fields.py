"""The fields of a config, flat: dotted name, type, default and what it means.

Names, types and defaults come from the dataclasses, texts from the `Attributes:`
of their docstrings, so that `--help` and docs/configuration.md cannot drift.
"""

import dataclasses
import enum
import inspect
import itertools
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
      title: First line of the docstring of the config that it stands in.
    """

    name: str
    type: Any
    default: Any
    text: str
    title: str

    @property
    def group(self) -> str:
        """`lora` for `lora.r`, empty for a field of the run itself."""
        return self.name.rpartition(".")[0]

    @property
    def default_text(self) -> str:
        """The default as a user would type it."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, tuple):
            return f"[{', '.join(map(str, self.default))}]"
        return str(self.default) if self.default != "" else "''"


def of(config_type: type, *, prefix: str = "") -> dict[str, Field]:
    """By dotted name, a config's own fields, then those of the configs inside it."""
    hints, texts = typing.get_type_hints(config_type), _attribute_texts(config_type)
    title = (inspect.getdoc(config_type) or "").partition("\n")[0]
    own: dict[str, Field] = {}
    inner: dict[str, Field] = {}
    for field in dataclasses.fields(config_type):
        name, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            inner |= of(typing.cast(type, kind), prefix=f"{name}.")
            continue
        default, factory = field.default, field.default_factory
        own[name] = Field(
            name=name,
            type=kind,
            default=default if factory is dataclasses.MISSING else factory(),
            text=texts.get(field.name, ""),
            title=title,
        )
        assert own[name].default is not dataclasses.MISSING, f"{name} has no default"
    return own | inner


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


def help_text(config_type: type) -> str:
    """One entry for each flag: name, type, default, meaning."""
    lines: list[str] = []
    for name, fields in _groups(config_type):
        lines += ["", f"{name or 'run'}: {fields[0].title}"]
        for field in fields:
            kind = type_name(field.type)
            lines.append(f"  --{field.name} ({kind}; {field.default_text})")
            indent = " " * 6
            lines += textwrap.wrap(
                field.text, 78, initial_indent=indent, subsequent_indent=indent
            )
    return "\n".join(lines[1:])


def markdown(config_type: type) -> str:
    """Tables of all settings, one for each group, for docs/configuration.md."""
    parts = []
    for name, fields in _groups(config_type):
        rows = [
            (f"`{f.name}`", type_name(f.type), f"`{f.default_text}`", f.text)
            for f in fields
        ]
        table = tables.markdown("setting | type | default | meaning", rows)
        heading = f"`{name}`" if name else "The run"
        parts.append(f"## {heading}\n\n{fields[0].title}\n\n{table}")
    return "\n".join(parts)


def _groups(config_type: type) -> list[tuple[str, list[Field]]]:
    """(name, fields) of a config itself, under "", and of each config inside it."""
    groups = itertools.groupby(of(config_type).values(), lambda field: field.group)
    return [(name, list(fields)) for name, fields in groups]


def _attribute_texts(config_type: type) -> dict[str, str]:
    """Texts of the `Attributes:` sections of a class and of its bases."""
    bases = filter(dataclasses.is_dataclass, reversed(config_type.__mro__))
    docs = [inspect.cleandoc(base.__doc__ or "") for base in bases]
    sections = [textwrap.dedent(doc.partition("Attributes:\n")[2]) for doc in docs]
    found = [match for text in sections for match in _ATTRIBUTE.finditer(text)]
    return {match["name"]: " ".join(match["text"].split()) for match in found}
