"""The shape of the model that a user names; no weight is read, no tokenizer made."""

import difflib
import json
import pathlib
from typing import Any

from mtuner_jax.checkpoints import gguf_import, hf_import
from mtuner_jax.configs import ConfigError
from mtuner_jax.runs.families import Family, ModelShape


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
        return family.from_hf(hf_config(locate(model)))
    except ValueError as error:
        raise ConfigError(f"model={model!r}: {error}") from error


def locate(model: str) -> pathlib.Path:
    """The folder or GGUF file of a model; empty names the packaged SmolLM2."""
    return hf_import.locate(model) if model else gguf_import.packaged_smollm2()


def hf_config(path: pathlib.Path) -> dict[str, Any]:
    """Content of a folder's `config.json`, or the same of a GGUF file."""
    if path.is_file():
        return gguf_import.GgufFile(path).hf_config()
    return json.loads((path / "config.json").read_text())
