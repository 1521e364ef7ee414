"""A YAML file and command-line flags, parsed into a config's dataclasses.

    scripts/train.py --config run.yaml --mesh pcie8 --learning_rate 1e-4 --lora.r 16

A flag wins over the file, the file over the defaults. Names are those of the
dataclasses, dotted for nested ones; `-` and `_` are the same. A value's type is its
field's: a word for a text field is text even if it looks like a number.
"""

import dataclasses
import pathlib
import sys
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mtuner_jax import configs
from mtuner_jax.settings import (
    config_fields,
    config_values,
    written_settings,
    yaml_nodes,
)
from mtuner_jax.settings.written_settings import Written

T = TypeVar("T")

_USAGE = """usage: {prog} [--config FILE.yaml] [--NAME VALUE ...]

  --config FILE.yaml   settings to begin with; flags win over them
  --print_config       print the resulting settings as YAML and exit
  --help               print this and exit

Lists: a,b or [a, b]. Maps: {{pattern: 8}}. Booleans: --packing, --packing=false.
"""


def parse(
    argv: Sequence[str],
    config_type: type[T],
    *,
    prog: str = "",
    description: str = "",
    positional: str = "",
) -> T:
    """Parses a command line; `--help` and `--print_config` print and exit.

    Args:
      argv: Arguments without the program's name.
      config_type: A config dataclass, such as `configs.RunConfig`.
      prog: The program's name in `--help`.
      description: What it does, first in `--help`.
      positional: The setting that words before the first flag are for.

    Returns:
      The checked config.

    Raises:
      ConfigError: A flag or key that is unknown (with the nearest name) or has the
        wrong type, or a value that the config itself refuses; with file and line.
    """
    if positional and argv and not argv[0].startswith("-"):
        argv = [f"--{positional}", *argv]
    options, flags = written_settings.read_flags(argv, config_type)
    if "help" in options:
        usage = _USAGE.format(prog=prog or pathlib.Path(sys.argv[0]).name)
        about = f"{description}\n\n" if description else ""
        _print_and_exit(f"{about}{usage}\n{config_fields.help_text(config_type)}\n")
    in_file = []
    if "config" in options:
        in_file = written_settings.read_yaml(options["config"], config_type)
    config = build(config_type, [*in_file, *flags])
    if "print_config" in options:
        _print_and_exit(dump_yaml(config))
    return config


def load_yaml(path: str | pathlib.Path, config_type: type[T]) -> T:
    """Reads a config that `dump_yaml` wrote, or any YAML file of settings."""
    return build(config_type, written_settings.read_yaml(path, config_type))


def dump_yaml(config: Any) -> str:
    """All settings of a config as YAML that parses back to an equal config."""
    return yaml_nodes.dump(_tree(config))


def build(config_type: type[T], written: Iterable[Written]) -> T:
    """The config of what was written, later settings winning over earlier ones."""
    fields = config_fields.of(config_type)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for setting in written:
        where = yaml_nodes.where(setting.node)
        value = config_values.parse(
            setting.asked, fields[setting.name].type, setting.node
        )
        if setting.asked == "warmup_ratio" and not 0 <= value < 1:
            raise configs.ConfigError(
                f"{where}: warmup_ratio={value} must be in [0, 1); for a number of "
                "steps write warmup_steps"
            )
        values[setting.name], places[setting.name] = value, where
    try:
        return _construct(config_type, values)
    except configs.ConfigError as error:
        named = [
            f"{name} is set at {where}"
            for name, where in places.items()
            if f"{name}=" in str(error) and not where.startswith("--")
        ]
        if not named:
            raise
        raise configs.ConfigError(f"{error} ({', '.join(named)})") from error


def _construct(config_type: type, values: dict[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(config_type)
    arguments = {}
    for field in dataclasses.fields(config_type):
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _construct(hints[field.name], values, f"{name}.")
        elif name in values:
            arguments[field.name] = values[name]
    return config_type(**arguments)


def _tree(config: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(type(config))
    tree = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _tree(value)
        elif config_fields.is_union(hints[field.name]) and isinstance(value, str):
            if config_values.names(value) != value:  # unquoted it is read as a list
                value = yaml_nodes.Quoted(value)
        tree[field.name] = value
    return tree


def _print_and_exit(text: str) -> typing.NoReturn:
    sys.stdout.write(text)
    raise SystemExit(0)
