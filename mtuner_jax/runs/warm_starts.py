"""Begins a run with the weights of an adapter that was trained before."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_export, peft_configs, step_dirs
from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import TrainState

Adapters = dict[str, dict[str, np.ndarray]]
# What decides the shape of the adapters and what they add to the base model.
_SETTINGS = "r lora_alpha use_rslora target_modules rank_pattern alpha_pattern".split()


def read(
    asked: str,
    config: LoraConfig,
    specs: Sequence[lora.AdapterSpec],
    *,
    decoder: Decoder,
) -> Adapters:
    """Reads the adapter that `init_adapter` names.

    Args:
      asked: A folder in PEFT's layout, a run's folder, or a checkpoint's.
      config: The adapters of this run.
      specs: The same, resolved on the model.
      decoder: The model.

    Returns:
      {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}, float32.

    Raises:
      ConfigError: There is no adapter, or it has other modules, ranks or scalings.
    """
    folder = locate(asked)
    try:
        found = hf_export.read_adapter_config(folder)
        saved = lora.resolve(found, decoder.linears(), num_layers=decoder.num_layers)
        _check(asked, (found, saved), (config, tuple(specs)))
        return hf_export.read_adapter(folder, specs)
    except ConfigError:
        raise
    except (
        hf_export.AdapterFileError,
        peft_configs.PeftConfigError,
        json.JSONDecodeError,
        OSError,
    ) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"init_adapter={asked!r}: {text}") from error


def locate(asked: str) -> pathlib.Path:
    """The folder of the adapter below what the user named.

    Raises:
      ConfigError: None is there.
    """
    root = pathlib.Path(asked).expanduser()
    newest = step_dirs.scan(root / "checkpoints").complete[-1:]
    steps = [root / "checkpoints" / str(step) / "adapter" for step in newest]
    for folder in (root, root / "adapter", *steps):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise ConfigError(
        f"init_adapter={asked!r}: no adapter_config.json there, in adapter/ or in a "
        "checkpoint; name a folder with a PEFT adapter, a run's folder or a checkpoint"
    )


def place(adapters: Adapters, state: TrainState) -> TrainState:
    """The fresh state with these adapters; moments and step stay at 0."""
    placed = jax.tree.map(
        lambda leaf, target: jax.make_array_from_callback(
            leaf.shape, target.sharding, lambda index: leaf[index]
        ),
        adapters,
        state.adapters,
    )
    return state._replace(adapters=placed)


def _check(
    asked: str,
    found: tuple[LoraConfig, tuple[lora.AdapterSpec, ...]],
    ours: tuple[LoraConfig, tuple[lora.AdapterSpec, ...]],
) -> None:
    """Compares ranks and scalings, and names the settings they come from."""
    if _effect(found[1]) == _effect(ours[1]):
        return
    there, here = (dataclasses.asdict(config) for config, _ in (found, ours))
    different = [name for name in _SETTINGS if there[name] != here[name]]
    if _sites(found[1]) == _sites(ours[1]) and len(different) > 1:
        different.remove("target_modules")  # another way to say the same
    told = "; ".join(
        f"lora.{name} is {there[name]!r} there and {here[name]!r} here"
        for name in different
    )
    flags = " ".join(
        f"--lora.{name} {_flag(there[name])}"
        for name in different
        if isinstance(there[name], (int, float, str, tuple))
    )
    raise ConfigError(f"init_adapter={asked!r}: {told}; set {flags or 'them alike'}")


def _flag(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sites(specs: tuple[lora.AdapterSpec, ...]) -> set[tuple[str, int]]:
    return {
        (spec.module, layer)
        for spec in specs
        for layer, rank in enumerate(spec.ranks)
        if rank
    }


def _effect(specs: tuple[lora.AdapterSpec, ...]) -> list[tuple[str, object, object]]:
    return [(spec.module, spec.ranks, spec.scalings) for spec in specs]
