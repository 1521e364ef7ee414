"""Well-known shapes by name, for benchmarks and plans without a checkpoint."""

import dataclasses

from models.llama_configs import LlamaConfig
from models.rotary import Llama3Scaling


def _llama2(hidden: int, ffn: int, layers: int, heads: int, kv: int) -> LlamaConfig:
    """Llama 2's settings at any size."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
    )


_LLAMA31_ROPE = Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def _llama3(hidden: int, ffn: int, layers: int, heads: int, kv: int) -> LlamaConfig:
    """Llama 3.1's settings at any size."""
    return dataclasses.replace(
        _llama2(hidden, ffn, layers, heads, kv),
        vocab_size=128256,
        rope_theta=500000.0,
        rope_scaling=_LLAMA31_ROPE,
        max_position_embeddings=131072,
    )


def _qwen3(
    hidden: int, ffn: int, layers: int, heads: int, *, tied: bool = False
) -> LlamaConfig:
    """Qwen3's settings at any size; all dense ones have 8 kv heads of 128."""
    return dataclasses.replace(
        _llama2(hidden, ffn, layers, heads, 8),
        family="qwen3",
        vocab_size=151936,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


SIZES: dict[str, LlamaConfig] = {
    "llama2-7b": _llama2(4096, 11008, 32, 32, 32),
    "llama2-13b": _llama2(5120, 13824, 40, 40, 40),
    "llama2-30b": _llama2(6656, 17920, 60, 52, 52),
    "llama2-70b": _llama2(8192, 28672, 80, 64, 8),
    "llama3.1-8b": _llama3(4096, 14336, 32, 32, 8),
    "llama3.1-70b": _llama3(8192, 28672, 80, 64, 8),
    "llama3.2-1b": dataclasses.replace(
        _llama3(2048, 8192, 16, 32, 8),
        tie_word_embeddings=True,
        rope_scaling=dataclasses.replace(_LLAMA31_ROPE, factor=32.0),
    ),
    "llama3.2-3b": dataclasses.replace(
        _llama3(3072, 8192, 28, 24, 8),
        tie_word_embeddings=True,
        rope_scaling=dataclasses.replace(_LLAMA31_ROPE, factor=32.0),
    ),
    "mistral-7b": dataclasses.replace(
        _llama2(4096, 14336, 32, 32, 8),
        family="mistral",
        vocab_size=32768,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
    ),
    "qwen2.5-7b": dataclasses.replace(
        _llama2(3584, 18944, 28, 28, 4),
        family="qwen2",
        vocab_size=152064,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        attention_bias=True,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "smollm2-135m": dataclasses.replace(
        _llama2(576, 1536, 30, 9, 3),
        vocab_size=49152,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
