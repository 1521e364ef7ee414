"""Opens the model that a user names: its shape, tokenizer and weights on disk."""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import transformers

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import (
    gguf_import,
    gguf_tokenizers,
    hf_import,
    hf_tokenizers,
    matching,
    safetensors_files,
)
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.runs import shapes
from mtuner_jax.runs.families import Family, ModelShape
from mtuner_jax.weights import sources

_logger = logging.getLogger(__name__)
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

    All that files' headers say is checked here, before data, plan and weights.

    Raises:
      ConfigError: The name of a shape, which has no tokenizer; a model that is not
        implemented; weights that are quantized; target modules that it lacks.
      ImportMismatchError: Weights that are not those of the configuration.
      UserError: Files that are missing or cannot be read.
    """
    if config.model in family.named():
        raise ConfigError(
            f"model={config.model!r} is a shape without tokenizer and weights: give a "
            "folder, GGUF file or hub id; random weights are measured by "
            f"`scripts/bench.py --model {config.model} --random_init`"
        )
    path = shapes.locate(config.model)
    file = gguf_import.GgufFile(path) if path.is_file() else None
    hf = file.hf_config() if file else shapes.hf_config(path)
    source = None
    if not config.random_init:
        _refuse_quantized(hf, path)
        source = file or safetensors_files.Folder(path)
    shape = shapes.of_hf(family, hf, path)
    if source is not None:
        matching.check(source, shape.tensors())
    # Refuses target modules that the model lacks, before any data is read.
    linears = shape.decoder(attention="xla").linears()
    lora.resolve(config.lora, linears, num_layers=shape.num_layers)
    _check_length(config, shape)
    return OpenedModel(
        name=config.model or DEFAULT_MODEL,
        path=path,
        shape=shape,
        source=source,
        tokenizer=(
            gguf_tokenizers.build(file.metadata) if file else hf_tokenizers.load(path)
        ),
        identity=(
            {"random_init": config.seed}
            if config.random_init
            else hf_import.base_identity(path)
        ),
    )


def _check_length(config: RunConfig, shape: ModelShape) -> None:
    """Says that rows are longer than the positions that the model knows.

    Raises:
      ConfigError: They are, with `strict`.
    """
    if config.max_length <= shape.max_positions:
        return
    factor = math.ceil(config.max_length / shape.max_positions)
    text = (
        f"max_length={config.max_length:,}, but the model was made for "
        f"{shape.max_positions:,} tokens (max_position_embeddings): what lies beyond "
        "is seldom learned well; lower max_length, or stretch the positions in the "
        'model\'s config.json, such as "rope_scaling": {"rope_type": "linear", '
        f'"factor": {factor}.0}}'
    )
    if config.strict:
        raise ConfigError(f"{text} (strict=true)")
    _logger.warning("%s", text)


def _refuse_quantized(hf: Mapping[str, Any], path: pathlib.Path) -> None:
    """Names weights of GPTQ, AWQ, bitsandbytes, FP8 and the like for what they are."""
    found = hf.get("quantization_config")
    if found:
        kind = dict(found).get("quant_method") or "quantized"
        raise ConfigError(
            f"{path}: these are {str(kind).upper()} weights (quantization_config in "
            "config.json), which are not read; give the original model in bfloat16, "
            "float16 or float32"
        )
