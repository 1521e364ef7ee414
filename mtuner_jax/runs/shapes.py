"""The shape of the model that a user names; no weight is read, no tokenizer made."""

import difflib
import pathlib
from typing import Any

from mtuner_jax.checkpoints import gguf_import, hf_import, json_files
from mtuner_jax.configs import ConfigError, UserError
from mtuner_jax.runs.families import Family, ModelShape

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


def shape(family: Family, model: str) -> ModelShape:
    """The model's shape; no weight is read and nothing is downloaded.

    Args:
      family: Of models that can be opened.
      model: Name of a shape, folder with a config.json, GGUF file; empty for the
        packaged SmolLM2.

    Raises:
      ConfigError: None of these, or a model that the decoder cannot represent.
    """
    named = family.named()
    if model in named:
        return named[model]
    if model and not pathlib.Path(model).expanduser().exists():
        near = difflib.get_close_matches(model, named, n=2)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(
            f"model={model!r}: no such shape{hint}, folder or file; a folder with "
            f"config.json, a GGUF file, or one of {', '.join(named)}"
        )
    try:
        path = locate(model)
        return of_hf(family, hf_config(path), path)
    except UserError as error:
        raise ConfigError(f"model={model!r}: {error}") from error


def locate(model: str) -> pathlib.Path:
    """The folder or GGUF file of a model; empty names the packaged SmolLM2."""
    return hf_import.locate(model) if model else gguf_import.packaged_smollm2()


def hf_config(path: pathlib.Path) -> dict[str, Any]:
    """Content of a folder's `config.json`, or the same of a GGUF file.

    Raises:
      UserError: It cannot be read; names the file.
    """
    if path.is_file():
        return gguf_import.GgufFile(path).hf_config()
    return json_files.read(path / "config.json")


def of_hf(family: Family, hf: dict[str, Any], path: pathlib.Path) -> ModelShape:
    """The shape that a model's configuration describes.

    Args:
      family: Of models that can be opened.
      hf: What `hf_config` returned.
      path: The model's folder or GGUF file, for messages.

    Raises:
      ConfigError: A value of another type, or a model that the decoder cannot
        represent; names the file.
    """
    file = path if path.is_file() else path / "config.json"
    _check_types(hf, file)
    try:
        return family.from_hf(hf)
    except UserError as error:
        raise ConfigError(f"{file}: {error}") from error


def _check_types(hf: dict[str, Any], file: pathlib.Path) -> None:
    """Refuses what is no size where any family has one."""
    for name in _SIZES:
        size = hf.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"{file}: {name}={size!r} must be a whole number above 0")
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(name), dict | None):
            raise ConfigError(f"{file}: {name}={hf[name]!r} must be a map or null")
    names = hf.get("architectures") or ["ForCausalLM"]
    if not str(names[0]).endswith(("CausalLM", "LMHeadModel")):
        raise ConfigError(
            f"{file}: architectures={names}: adapters are trained for models that "
            "generate text (...ForCausalLM); give the language model that this one was "
            "made of"
        )
