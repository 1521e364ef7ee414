"""Opens the model that a user names: its shape, tokenizer and weights on disk."""

import dataclasses
import pathlib
from typing import Any

import transformers

from mtuner_jax.checkpoints import (
    gguf_import,
    gguf_tokenizers,
    hf_import,
    safetensors_files,
)
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.runs import shapes
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
    path = shapes.locate(config.model)
    file = gguf_import.GgufFile(path) if path.is_file() else None
    auto_tokenizer: Any = transformers.AutoTokenizer
    source = None
    if not config.random_init:
        source = file or safetensors_files.Folder(path)
    return OpenedModel(
        name=config.model or DEFAULT_MODEL,
        path=path,
        shape=family.from_hf(file.hf_config() if file else shapes.hf_config(path)),
        source=source,
        tokenizer=(
            gguf_tokenizers.build(file.metadata)
            if file
            else auto_tokenizer.from_pretrained(path)
        ),
        identity=(
            {"random_init": config.seed}
            if config.random_init
            else hf_import.base_identity(path)
        ),
    )
