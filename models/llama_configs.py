"""The shape of a Llama-family decoder, read from a Hugging Face `config.json`."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from models import rotary
from mtuner_jax.configs import UserError

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
}

# What transformers assumes where a file of the family does not say.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"max_position_embeddings": 32768, "head_dim": 128},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
}


class ModelConfigError(UserError):
    """A `config.json` that this decoder cannot represent."""


class LinearShape(NamedTuple):
    """Input and output features of a linear, and whether it has a bias."""

    in_dim: int
    out_dim: int
    bias: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and switches of one decoder.

    Attributes:
      family: `llama`, `qwen2` (bias on q, k, v), `qwen3` (norms of each head's query
        and key) or `mistral`.
      sliding_window: Tokens a position may look back over; 0 means all.
      rope_scaling: None means plain rotary frequencies.
      max_position_embeddings: Tokens of the longest document it is made for.
    """

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: rotary.RopeScaling | None = None
    max_position_embeddings: int = 4096
    sliding_window: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads={self.num_heads} must be a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim={self.head_dim} must be even for rotary")

    @property
    def norms(self) -> dict[str, int]:
        """The norms of a layer by module name, with their sizes."""
        stream = ("input_layernorm", "post_attention_layernorm")
        heads = ("self_attn.q_norm", "self_attn.k_norm") if self.qk_norm else ()
        return {
            **dict.fromkeys(stream, self.hidden_size),
            **dict.fromkeys(heads, self.head_dim),
        }

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed, head by head, before rotation."""
        return self.family == "qwen3"

    @property
    def linears(self) -> dict[str, LinearShape]:
        """The linears of a layer by module name, in the order they run."""
        d, f, h = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * h, self.num_kv_heads * h
        return {
            "self_attn.q_proj": LinearShape(d, q, self.attention_bias),
            "self_attn.k_proj": LinearShape(d, kv, self.attention_bias),
            "self_attn.v_proj": LinearShape(d, kv, self.attention_bias),
            "self_attn.o_proj": LinearShape(q, d, self.attention_out_bias),
            "mlp.gate_proj": LinearShape(d, f, self.mlp_bias),
            "mlp.up_proj": LinearShape(d, f, self.mlp_bias),
            "mlp.down_proj": LinearShape(f, d, self.mlp_bias),
        }

    @property
    def num_parameters(self) -> int:
        """Weights of the whole decoder; tied embeddings count once."""
        linears = self.linears.values()
        layer = sum((one.in_dim + one.bias) * one.out_dim for one in linears)
        norms = self.num_layers * sum(self.norms.values()) + self.hidden_size
        tables = 1 if self.tie_word_embeddings else 2
        table = tables * self.vocab_size * self.hidden_size
        return self.num_layers * layer + norms + table


def from_file(path: pathlib.Path) -> LlamaConfig:
    """Reads a Hugging Face `config.json`."""
    return from_hf(json.loads(path.read_text()))


def from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """Translates the content of a Hugging Face `config.json`.

    Raises:
      ModelConfigError: An architecture, rotary type or activation that is not
        implemented, or a size that is missing.
    """
    family = hf.get("model_type", "")
    if family not in FAMILIES:
        raise ModelConfigError(
            f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    hf = {**_DEFAULTS[family], **hf}
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(f"hidden_act={activation!r}: only 'silu' is implemented")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    missing = [name for name in (*sizes, "num_attention_heads") if name not in hf]
    if missing:
        raise ModelConfigError(f"config.json lacks {', '.join(missing)}")
    num_heads = hf["num_attention_heads"]
    attention_bias = bool(hf.get("attention_bias", False))
    try:
        theta, scaling = rotary.parse(hf)
    except rotary.RopeError as error:
        raise ModelConfigError(str(error)) from None
    return LlamaConfig(
        family=family,
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
        rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=hf["max_position_embeddings"],
        sliding_window=_sliding_window(hf, family),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=attention_bias or family == "qwen2",
        attention_out_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(hf.get("mlp_bias", False)) and family == "llama",
    )


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Writes the same shape as a `config.json`, in the spelling every reader knows."""
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.rope_scaling is not None:
        hf["rope_scaling"] = rotary.to_hf(config.rope_scaling)
    if config.family in ("llama", "qwen3"):
        hf["attention_bias"] = config.attention_bias
    if config.family == "llama":
        hf["mlp_bias"] = config.mlp_bias
    if config.family == "mistral":
        hf["sliding_window"] = config.sliding_window or None
    return hf


def _sliding_window(hf: Mapping[str, Any], family: str) -> int:
    qwen = family in ("qwen2", "qwen3")
    if family == "llama" or (qwen and not hf.get("use_sliding_window")):
        return 0
    if qwen:
        raise ModelConfigError(
            "use_sliding_window=true (a window in some layers only) is not implemented"
        )
    return hf.get("sliding_window") or 0
