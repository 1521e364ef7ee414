"""Opens the model that a user names: its shape, tokenizer and weights on disk."""

import dataclasses
import difflib
import json
import pathlib
from typing import Any

import transformers

from mtuner_jax.checkpoints import gguf_import, hf_import, safetensors_files
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.runs.families import Family, ModelShape
from mtuner_jax.weights import sources

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model before any weight is read.

    Attributes:
      name: What an adapter's `base_model_name_or_path` will say.
      path: Folder or GGUF file.
      shape: Sizes of the decoder.
      source: Its tensors; None where weights are random.
      tokenizer: Its tokenizer.
      identity: Fingerprint of the weights, for checkpoints.
    """

    name: str
    path: pathlib.Path
    shape: ModelShape
    source: sources.TensorSource | None
    tokenizer: transformers.PreTrainedTokenizerBase
    identity: dict[str, Any]


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
        return family.from_hf(_hf_config(_locate(model)))
    except ValueError as error:
        raise ConfigError(f"model={model!r}: {error}") from error


def open_model(family: Family, config: RunConfig) -> OpenedModel:
    """Finds `config.model` (empty: the packaged SmolLM2) and opens it.

    Raises:
      ConfigError: The name of a shape, which has no tokenizer.
    """
    if config.model in family.named():
        raise ConfigError(
            f"model={config.model!r} is a shape without tokenizer and weights: give a "
            "folder, GGUF file or hub id; random weights are measured by "
            f"`scripts/bench.py --model {config.model} --random_init`"
        )
    path = _locate(config.model)
    file = gguf_import.GgufFile(path) if path.is_file() else None
    auto_tokenizer: Any = transformers.AutoTokenizer
    source = None
    if not config.random_init:
        source = file or safetensors_files.Folder(path)
    return OpenedModel(
        name=config.model or DEFAULT_MODEL,
        path=path,
        shape=family.from_hf(file.hf_config() if file else _hf_config(path)),
        source=source,
        tokenizer=file.tokenizer() if file else auto_tokenizer.from_pretrained(path),
        identity=(
            {"random_init": config.seed}
            if config.random_init
            else hf_import.base_identity(path)
        ),
    )


def _locate(model: str) -> pathlib.Path:
    return hf_import.locate(model) if model else gguf_import.packaged_smollm2()


def _hf_config(path: pathlib.Path) -> dict[str, Any]:
    """Content of a folder's `config.json`, or the same of a GGUF file."""
    if path.is_file():
        return gguf_import.GgufFile(path).hf_config()
    return json.loads((path / "config.json").read_text())
