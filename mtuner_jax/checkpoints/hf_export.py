"""Models and adapters as Hugging Face and PEFT read them.

D input features of a linear, F output features, R rank, L layers.
"""

import collections
import dataclasses
import functools
import json
import logging
import math
import operator
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import (
    folders,
    json_files,
    peft_configs,
    peft_tensors,
    safetensors_files,
)
from mtuner_jax.configs import LoraConfig, UserError
from mtuner_jax.numbers import sizes
from mtuner_jax.weights import loading, sources

Params = dict[str, Any]
Adapters = Mapping[str, Mapping[str, Any]]

_TOKENIZER_FILES = (
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
    *_TOKENIZER_FILES,
)
_ADAPTER_FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "README.md",
    *_TOKENIZER_FILES,
)
_logger = logging.getLogger(__name__)
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class ExportError(UserError):
    """An option that no export can have."""


class AdapterFileError(UserError):
    """A folder that does not hold an adapter, or not the one asked for."""


def _check_dtype(dtype: str) -> None:
    if dtype not in _DTYPES:
        raise ExportError(f"dtype={dtype!r}: one of {', '.join(_DTYPES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a model is written.

    Attributes:
      dtype: `float32`, `float16`, `bfloat16`; empty keeps the dtype of each array.
      max_shard_bytes: Largest file, and host memory needed while writing.
      tokenizer: Anything with `save_pretrained`; None writes no tokenizer.
    """

    dtype: str = ""
    max_shard_bytes: int = 5_000_000_000
    tokenizer: Any = None

    def __post_init__(self):
        _check_dtype(self.dtype or "float32")
        if self.max_shard_bytes < 1:
            raise ExportError(f"max_shard_bytes={self.max_shard_bytes} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """How an adapter is written.

    Attributes:
      base_name: Hub id or path of the base model, which PEFT loads first.
      dtype: `float32` (as PEFT writes), `float16` or `bfloat16`.
      tokenizer: Anything with `save_pretrained`; None writes no tokenizer.
    """

    base_name: str
    dtype: str = "float32"
    tokenizer: Any = None

    def __post_init__(self):
        _check_dtype(self.dtype)


def write_model(
    folder: pathlib.Path,
    params: Params,
    names: Sequence[sources.HfName],
    hf_config: Mapping[str, Any],
    *,
    options: ModelOptions = ModelOptions(),
) -> None:
    """Writes a model as sharded safetensors with index and `config.json`.

    Tensors leave the devices one at a time; the host holds one file's worth. In a run
    of several processes all must call this; process 0 writes. `folder` appears, or is
    replaced, only when everything is written.

    Args:
      folder: Where to; it may hold an earlier export and nothing else.
      params: The tree of jax.Array that `hf_import.load` gives.
      names: Every tensor of the model, and where it lies in the tree.
      hf_config: Content of `config.json`; its dtype is set to the one written.
      options: Dtype, file size, tokenizer.
    """
    files = _gathered_files(params, names, options)
    if jax.process_index() == 0:
        with folders.replaced(folder, owned=_MODEL_FILES) as temporary:
            _write_files(temporary, files)
            config = _with_dtype(hf_config, params, options)
            _write_json(temporary / "config.json", config)
            if options.tokenizer is not None:
                options.tokenizer.save_pretrained(temporary)
    else:
        collections.deque(files, maxlen=0)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"write_model {folder}")


def write_adapter(
    folder: pathlib.Path,
    adapters: Adapters,
    specs: Sequence[lora.AdapterSpec],
    lora_config: LoraConfig,
    *,
    options: AdapterOptions,
) -> None:
    """Writes adapters in the layout of PEFT; only process 0 does anything.

    `folder` appears, or is replaced, only when everything is written and proven.

    Args:
      folder: Where to; it may hold an earlier adapter and nothing else.
      adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}, float32, whole on
        this process (replicated, or on the host).
      specs: Rank of each module in each layer; columns beyond it are cut.
      lora_config: Written as the user gave it, so that PEFT resolves the same.
      options: Base model, dtype, tokenizer.

    Raises:
      peft_tensors.AdapterTensorsError: One is not finite, or there is none; `folder`
        stays as it was.
    """
    if jax.process_index() != 0:
        return
    tensors = peft_tensors.pack(adapters, specs, _DTYPES[options.dtype])
    config = peft_configs.to_peft(lora_config, specs, base_name=options.base_name)
    with folders.replaced(folder, owned=_ADAPTER_FILES) as temporary:
        safetensors_files.write(temporary / "adapter_model.safetensors", tensors)
        _write_json(temporary / "adapter_config.json", config)
        card = peft_configs.model_card(config, specs)
        (temporary / "README.md").write_text(card)
        if options.tokenizer is not None:
            options.tokenizer.save_pretrained(temporary)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _logger.info("adapter: %d tensors, %s", len(tensors), sizes.gib(num_bytes))


def read_adapter_config(folder: pathlib.Path) -> LoraConfig:
    """Reads `adapter_config.json`; `lora.resolve` makes specs of it.

    Raises:
      peft_configs.PeftConfigError: A kind of adapter that is not implemented.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise AdapterFileError(f"{folder} has no adapter_config.json: not an adapter")
    return peft_configs.from_peft(json_files.read(path))


def read_adapter(
    folder: pathlib.Path, specs: Sequence[lora.AdapterSpec]
) -> dict[str, dict[str, np.ndarray]]:
    """Reads an adapter that PEFT or `write_adapter` wrote.

    Returns:
      {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}, float32, zero where a layer
      has a smaller rank than the module's largest.

    Raises:
      AdapterFileError: Lists the keys that are missing, unexpected or misshapen.
    """
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise AdapterFileError(f"{folder} has no adapter_model.safetensors")
    found = safetensors_files.read_file(path)
    try:
        return peft_tensors.unpack(found, specs)
    except peft_tensors.AdapterTensorsError as error:
        raise AdapterFileError(f"{path}: {error}") from error


def _gathered_files(
    params: Params, names: Sequence[sources.HfName], options: ModelOptions
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yields file by file its name and tensors; all processes must go through it."""
    by_key = {name.name: name for name in names}
    split = huggingface_hub.split_state_dict_into_shards_factory(
        by_key,
        get_storage_size=lambda name: (
            math.prod(name.shape) * _dtype(params, name, options).itemsize
        ),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=options.max_shard_bytes,
    )
    readers: dict[tuple[str, ...], Any] = {}
    for file, keys in split.filename_to_tensors.items():
        gathered = (_gather(params, by_key[key], options, readers) for key in keys)
        yield file, dict(zip(keys, gathered, strict=True))


def _write_files(
    folder: pathlib.Path, files: Iterator[tuple[str, dict[str, np.ndarray]]]
) -> None:
    weight_map, total_bytes = {}, 0
    for file, tensors in files:
        safetensors_files.write(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(set(weight_map.values())) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_json(folder / safetensors_files.INDEX, index)


def _dtype(params: Params, name: sources.HfName, options: ModelOptions) -> np.dtype:
    if options.dtype:
        return _DTYPES[options.dtype]
    return np.dtype(_leaf(params, name.path).dtype)


def _gather(
    params: Params,
    name: sources.HfName,
    options: ModelOptions,
    readers: dict[tuple[str, ...], Any],
) -> np.ndarray:
    array = _leaf(params, name.path)
    if name.path not in readers:
        dtype = _dtype(params, name, options)
        readers[name.path] = loading.reader(name, array, dtype)
    return loading.gather(name, array, readers[name.path])


def _leaf(tree: Any, path: tuple[str, ...]) -> jax.Array:
    return functools.reduce(operator.getitem, path, tree)


def _with_dtype(
    hf_config: Mapping[str, Any], params: Params, options: ModelOptions
) -> dict[str, Any]:
    written = options.dtype or jnp.result_type(*jax.tree.leaves(params)).name
    key = "dtype" if "dtype" in hf_config else "torch_dtype"
    return {**hf_config, key: written}


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
