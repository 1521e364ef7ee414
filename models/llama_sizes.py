"""Well-known shapes by name, for benchmarks and plans without a checkpoint."""

import dataclasses

from models.llama_configs import LlamaConfig, RopeScaling


def _llama2(hidden: int, ffn: int, layers: int, heads: int, kv: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
    )


_LLAMA31_ROPE = RopeScaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
_LLAMA31_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    rope_scaling=_LLAMA31_ROPE,
    max_position_embeddings=131072,
)

SIZES: dict[str, LlamaConfig] = {
    "llama2-7b": _llama2(4096, 11008, 32, 32, 32),
    "llama2-13b": _llama2(5120, 13824, 40, 40, 40),
    "llama2-30b": _llama2(6656, 17920, 60, 52, 52),
    "llama2-70b": _llama2(8192, 28672, 80, 64, 8),
    "llama3.1-8b": _LLAMA31_8B,
    "llama3.1-70b": dataclasses.replace(
        _LLAMA31_8B,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
    ),
    "llama3.2-1b": dataclasses.replace(
        _LLAMA31_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling=dataclasses.replace(_LLAMA31_ROPE, factor=32.0),
    ),
    "mistral-7b": dataclasses.replace(
        _LLAMA31_8B,
        family="mistral",
        vocab_size=32768,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_position_embeddings=32768,
    ),
    "qwen2.5-7b": LlamaConfig(
        family="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        attention_bias=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
