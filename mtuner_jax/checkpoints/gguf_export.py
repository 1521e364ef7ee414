"""A model as one GGUF file, which llama.cpp and what is built on it run.

What `gguf_import` and `gguf_tokenizers` read, the other way round; names and layouts
are those of llama.cpp's converter.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from mtuner_jax.checkpoints import folders, gguf_import, gguf_vocabularies, model_export
from mtuner_jax.checkpoints.model_export import ExportError
from mtuner_jax.weights import sources

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
_KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "float16": gguf.GGMLQuantizationType.F16,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
DTYPES = tuple(_KINDS)
_PLAIN = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
}


def write(
    path: pathlib.Path,
    source: sources.TensorSource,
    hf_config: Mapping[str, Any],
    vocabulary: gguf_vocabularies.Vocabulary,
    *,
    dtype: str,
    name: str,
) -> None:
    """Writes a model; `path` appears only when everything is written.

    Tensors are read, cast and written one at a time. Vectors stay in float32, as
    llama.cpp wants them.

    Args:
      path: The file; an existing one is replaced.
      source: The weights.
      hf_config: Content of `config.json`.
      vocabulary: The tokenizer's metadata.
      dtype: `float32`, `float16`, `bfloat16` or `q8_0`.
      name: The model's, for people.

    Raises:
      ExportError: A dtype, architecture or rotary scaling that has no such file, or
        weights that are not finite.
    """
    if dtype not in _KINDS:
        raise ExportError(f"dtype={dtype!r}: one of {', '.join(_KINDS)} for GGUF")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    writer = gguf.GGUFWriter(temporary, _architecture(hf_config))
    try:
        _add_settings(writer, hf_config)
        writer.add_name(name)
        writer.add_file_type(_FILE_TYPES[dtype])
        vocabulary.add_to(writer)
        tensors = _Tensors(source, hf_config, kind=_KINDS[dtype])
        tensors.describe(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for hf_name in source.infos():
            writer.write_tensor_data(tensors.read(hf_name))
        for array in tensors.extra.values():
            writer.write_tensor_data(array)
        writer.close()
        folders.flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Tensors:
    """The tensors of a file, in their order: those of the source, then `extra`."""

    def __init__(
        self,
        source: sources.TensorSource,
        hf: Mapping[str, Any],
        *,
        kind: gguf.GGMLQuantizationType,
    ):
        self._source, self._hf, self._kind = source, hf, kind
        factors = _rope_factors(hf)
        self.extra = {} if factors is None else {gguf_import.ROPE_FACTORS: factors}

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Adds name, shape and type of each, before any is written."""
        for hf_name, info in self._source.infos().items():
            kind = self._kind_of(info.shape)
            # The package takes types that numpy lacks as bytes.
            plain = _PLAIN.get(kind)
            shape, dtype = info.shape, plain or np.dtype(np.uint8)
            if plain is None:
                shape = gguf.quant_shape_to_byte_shape(info.shape, kind)
            writer.add_tensor_info(
                gguf_import.gguf_name(hf_name),
                shape,
                dtype,
                math.prod(shape) * dtype.itemsize,
                raw_dtype=kind if plain is None else None,
            )
        for name, array in self.extra.items():
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)

    def read(self, hf_name: str) -> np.ndarray:
        """A tensor in the file's layout and type."""
        float32 = model_export.DTYPES["float32"]
        tensor = model_export.read_cast(self._source, hf_name, float32)
        heads = self._permuted_heads(hf_name)
        if heads:
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        kind = self._kind_of(tensor.shape)
        if kind is gguf.GGMLQuantizationType.F16:
            _check_float16(tensor, hf_name)
        return gguf.quants.quantize(np.ascontiguousarray(tensor), kind)

    def _kind_of(self, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
        if len(shape) < 2:
            return gguf.GGMLQuantizationType.F32
        block, _ = gguf.GGML_QUANT_SIZES[self._kind]
        fits = shape[-1] % block == 0
        return self._kind if fits else gguf.GGMLQuantizationType.F16

    def _permuted_heads(self, hf_name: str) -> int:
        """Heads whose rows llama.cpp wants as pairs for its interleaved rotary."""
        if _architecture(self._hf) != "llama":
            return 0
        if "q_proj" in hf_name:
            return self._hf["num_attention_heads"]
        return self._hf["num_key_value_heads"] if "k_proj" in hf_name else 0


def _check_float16(tensor: np.ndarray, name: str) -> None:
    if np.abs(tensor).max() > np.finfo(np.float16).max:
        raise ExportError(
            f"{name} does not fit into float16; export with dtype bfloat16 or float32"
        )


def _architecture(hf: Mapping[str, Any]) -> str:
    family = hf["model_type"]
    if family not in _ARCHITECTURES:
        raise ExportError(f"model_type={family!r} has no GGUF architecture here")
    return _ARCHITECTURES[family]


def _add_settings(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_rope_dimension_count(hf["head_dim"])
    writer.add_vocab_size(hf["vocab_size"])
    if hf.get("sliding_window"):
        writer.add_sliding_window(hf["sliding_window"])
    scaling = hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "llama3")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            old = scaling["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(old)
            _check_yarn(scaling)
    elif kind != "llama3":
        raise ExportError(
            f"rope_type={kind!r} has no form in GGUF; use --format merged"
        )


def _check_yarn(scaling: Mapping[str, Any]) -> None:
    """Refuses settings of YaRN that llama.cpp does not take from a file."""
    usual = 0.1 * math.log(scaling["factor"]) + 1.0
    same = math.isclose(scaling["attention_factor"], usual, rel_tol=1e-6)
    rest = (scaling["beta_fast"], scaling["beta_slow"], scaling["truncate"])
    if not same or rest != (32.0, 1.0, True):
        raise ExportError(
            "these YaRN settings (attention_factor, beta_fast, beta_slow, truncate) "
            "have no form in GGUF; use --format merged"
        )


def _rope_factors(hf: Mapping[str, Any]) -> np.ndarray | None:
    """Llama 3's scaling, which GGUF files hold as a tensor, float32 [H / 2]."""
    scaling = hf.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    factors = gguf_import.llama3_factors(scaling, hf["rope_theta"], hf["head_dim"])
    return factors.astype(np.float32)
