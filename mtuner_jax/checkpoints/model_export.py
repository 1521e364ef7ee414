"""Whole models as Hugging Face reads them."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np

from mtuner_jax.checkpoints import folders, safetensors_files
from mtuner_jax.configs import UserError
from mtuner_jax.weights import sources

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    safetensors_files.INDEX,
    *TOKENIZER_FILES,
)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class ExportError(UserError):
    """An option that no export can have, or weights that it cannot hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is written.

    Attributes:
      dtype: `float32`, `float16`, `bfloat16`.
      max_shard_size: Largest file, and host memory needed while writing: bytes, or a
        text such as `5GB`.
      tokenizer: Anything with `save_pretrained`; None writes no tokenizer.
      generation: Content of `generation_config.json`.
    """

    dtype: str = "bfloat16"
    max_shard_size: int | str = "5GB"
    tokenizer: Any = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_dtype(self.dtype)
        if isinstance(self.max_shard_size, int) and self.max_shard_size < 1:
            raise ExportError(f"max_shard_size={self.max_shard_size} must be above 0")


def check_dtype(dtype: str) -> None:
    """Raises ExportError for a dtype that is not written."""
    if dtype not in DTYPES:
        raise ExportError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")


def write_model(
    folder: pathlib.Path,
    source: sources.TensorSource,
    names: Sequence[sources.HfName],
    hf_config: Mapping[str, Any],
    *,
    options: ModelOptions,
) -> None:
    """Writes a model as sharded safetensors with index and `config.json`.

    Tensors are read and cast one at a time; the host holds one file's worth. `folder`
    appears, or is replaced, only when everything is written.

    Args:
      folder: Where to; it may hold an earlier export and nothing else.
      source: The weights.
      names: Every tensor of the model; a tied head is none of its own.
      hf_config: Content of `config.json`; its dtype is set to the one written.
      options: Dtype, file size, tokenizer.

    Raises:
      ExportError: A weight is not finite in the dtype asked for.
    """
    shapes = {name.name: name.shape for name in names}
    dtype = DTYPES[options.dtype]
    split = huggingface_hub.split_state_dict_into_shards_factory(
        shapes,
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=options.max_shard_size,
    )
    with folders.replaced(folder, owned=_MODEL_FILES) as temporary:
        for file, keys in split.filename_to_tensors.items():
            tensors = {key: read_cast(source, key, dtype) for key in keys}
            safetensors_files.write(temporary / file, tensors)
        if split.is_sharded:
            write_json(
                temporary / safetensors_files.INDEX,
                {
                    "metadata": split.metadata,
                    "weight_map": dict(sorted(split.tensor_to_filename.items())),
                },
            )
        key = "dtype" if "dtype" in hf_config else "torch_dtype"
        write_json(temporary / "config.json", {**hf_config, key: options.dtype})
        if options.generation:
            write_json(temporary / "generation_config.json", options.generation)
        if options.tokenizer is not None:
            options.tokenizer.save_pretrained(temporary)


def read_cast(source: sources.TensorSource, name: str, dtype: np.dtype) -> np.ndarray:
    """A whole tensor in another dtype.

    Raises:
      ExportError: It is not finite, before or after the cast.
    """
    shape = source.infos()[name].shape
    tensor = source.read(name, tuple(slice(0, size) for size in shape))
    with np.errstate(over="ignore"):
        cast = tensor.astype(dtype)
    if not np.all(np.isfinite(cast.astype(np.float32))):
        raise ExportError(
            f"{name} holds NaN or infinity as {dtype.name}; nothing was written. "
            "Export an earlier checkpoint, or with dtype bfloat16 or float32"
        )
    return cast


def write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file as Hugging Face's tools do."""
    path.write_text(json.dumps(content, indent=2) + "\n")
