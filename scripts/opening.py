"""Opens the model that a run names: its shape, tokenizer and weights on disk."""

import dataclasses
import json
import pathlib
from typing import Any

import transformers

from models import llama_configs, llama_sizes
from mtuner_jax.checkpoints import gguf_import, hf_import, safetensors_files
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.weights import sources

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
    """A model before any weight is read.

    Attributes:
      name: What an adapter's `base_model_name_or_path` will say.
      path: Folder or GGUF file.
      config: Shape of the decoder.
      source: Its tensors.
      tokenizer: Its tokenizer.
      identity: Fingerprint of the weights, for checkpoints.
    """

    name: str
    path: pathlib.Path
    config: llama_configs.LlamaConfig
    source: sources.TensorSource
    tokenizer: transformers.PreTrainedTokenizerBase
    identity: dict[str, Any]


def open_model(config: RunConfig) -> Opened:
    """Finds `config.model` (empty: the packaged SmolLM2) and opens it.

    Raises:
      ConfigError: The name of a shape, which has no tokenizer.
    """
    if config.model in llama_sizes.SIZES:
        raise ConfigError(
            f"model={config.model!r} is a shape without tokenizer and weights: give a "
            "folder, GGUF file or hub id; random weights are measured by "
            f"`scripts/bench.py --model {config.model} --random_init`"
        )
    path = (
        hf_import.locate(config.model)
        if config.model
        else gguf_import.packaged_smollm2()
    )
    identity: dict[str, Any] = (
        {"random_init": config.seed}
        if config.random_init
        else hf_import.base_identity(path)
    )
    name = config.model or DEFAULT_MODEL
    if path.is_file():
        file = gguf_import.GgufFile(path)
        shape = llama_configs.from_hf(file.hf_config())
        source: sources.TensorSource = file
        tokenizer = file.tokenizer()
    else:
        shape = llama_configs.from_hf(json.loads((path / "config.json").read_text()))
        source = _NoWeights() if config.random_init else safetensors_files.Folder(path)
        auto_tokenizer: Any = transformers.AutoTokenizer
        tokenizer = auto_tokenizer.from_pretrained(path)
    return Opened(
        name=name,
        path=path,
        config=shape,
        source=source,
        tokenizer=tokenizer,
        identity=identity,
    )


class _NoWeights:
    """The source of a model with random weights: nothing is ever read."""

    def infos(self):
        raise AssertionError("random_init reads no weights")

    def read(self, name, box):
        raise AssertionError("random_init reads no weights")
