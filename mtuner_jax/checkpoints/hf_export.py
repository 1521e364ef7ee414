"""Adapters as PEFT reads and writes them.

D input features of a linear, F output features, R rank, L layers.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import (
    folders,
    json_files,
    model_export,
    peft_configs,
    peft_tensors,
    safetensors_files,
)
from mtuner_jax.configs import LoraConfig, UserError
from mtuner_jax.numbers import sizes

Adapters = Mapping[str, Mapping[str, Any]]

_ADAPTER_FILES = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "README.md",
    *model_export.TOKENIZER_FILES,
)
_logger = logging.getLogger(__name__)


class AdapterFileError(UserError):
    """A folder that does not hold an adapter, or not the one asked for."""


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
        model_export.check_dtype(self.dtype)


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
    tensors = peft_tensors.pack(adapters, specs, model_export.DTYPES[options.dtype])
    config = peft_configs.to_peft(lora_config, specs, base_name=options.base_name)
    with folders.replaced(folder, owned=_ADAPTER_FILES) as temporary:
        safetensors_files.write(temporary / "adapter_model.safetensors", tensors)
        model_export.write_json(temporary / "adapter_config.json", config)
        card = peft_configs.model_card(config, specs)
        (temporary / "README.md").write_text(card)
        if options.tokenizer is not None:
            options.tokenizer.save_pretrained(temporary)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _logger.info("adapter: %d tensors, %s", len(tensors), sizes.gib(num_bytes))


def portable(
    adapters: Adapters, specs: Sequence[lora.AdapterSpec]
) -> tuple[Adapters, tuple[lora.AdapterSpec, ...], LoraConfig]:
    """The same adapters for readers that know one rank and one alpha for all.

    vLLM and llama.cpp scale every adapter by lora_alpha / r of the config, or over the
    tensor's own rank; rank and alpha patterns and rsLoRA are unknown to them. So the
    scaling goes into B, and ranks are filled up with zeros.

    Args:
      adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}.
      specs: Rank and scaling of each module in each layer.

    Returns:
      (adapters, specs, config) for `write_adapter`, all of one rank, of scaling 1.
    """
    rank = max(spec.max_rank for spec in specs)
    wide = {}
    for spec in specs:
        missing = rank - spec.max_rank
        scalings = np.asarray(spec.scalings, np.float32)[:, None, None]
        a_LDR = np.asarray(adapters[spec.module]["lora_a"])
        b_LRF = np.asarray(adapters[spec.module]["lora_b"]) * scalings
        wide[spec.module] = {
            "lora_a": np.pad(a_LDR, ((0, 0), (0, 0), (0, missing))),
            "lora_b": np.pad(b_LRF, ((0, 0), (0, missing), (0, 0))),
        }
    alike = tuple(
        dataclasses.replace(
            spec,
            ranks=(rank,) * len(spec.ranks),
            alphas=(float(rank),) * len(spec.ranks),
            use_rslora=False,
        )
        for spec in specs
    )
    modules = tuple(spec.module.rpartition(".")[2] for spec in specs)
    config = LoraConfig(r=rank, lora_alpha=float(rank), target_modules=modules)
    return wide, alike, config


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
