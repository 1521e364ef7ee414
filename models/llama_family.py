"""The Llama family as runs take it (`mtuner_jax.runs.families`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models import llama, llama_configs, llama_hf_names, llama_sizes
from models.llama_configs import LlamaConfig


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """The shape of one model (`ModelShape`); `config` has all of it."""

    config: LlamaConfig

    num_layers = property(lambda self: self.config.num_layers)
    num_heads = property(lambda self: self.config.num_heads)
    num_kv_heads = property(lambda self: self.config.num_kv_heads)
    head_dim = property(lambda self: self.config.head_dim)
    qk_norm = property(lambda self: self.config.qk_norm)
    vocab_size = property(lambda self: self.config.vocab_size)
    num_parameters = property(lambda self: self.config.num_parameters)
    max_positions = property(lambda self: self.config.max_position_embeddings)

    def with_layers(self, num_layers: int) -> "LlamaShape":
        """The same model with another number of layers."""
        return LlamaShape(dataclasses.replace(self.config, num_layers=num_layers))

    def decoder(self, *, attention: str, most_documents: int = 0) -> llama.Llama:
        """The decoder.

        Args:
          attention: What computes attention, a key of `ops.attention.api.BACK_ENDS`.
          most_documents: Documents in a row at most; 0 where nobody knows.
        """
        return llama.Llama(
            self.config,
            attention_implementation=attention,
            most_documents=most_documents,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face `config.json` of this shape."""
        return llama_configs.to_hf(self.config)

    def tensors(self) -> tuple[llama_hf_names.HfTensor, ...]:
        """Every tensor of a Hugging Face checkpoint, and where it goes."""
        return llama_hf_names.tensors(self.config)


class LlamaFamily:
    """Llama 2 and 3, SmolLM2, Qwen2.5, Qwen3 and Mistral (`Family`)."""

    def named(self) -> dict[str, LlamaShape]:
        """Well-known shapes by name."""
        sizes = llama_sizes.SIZES.items()
        return {name: LlamaShape(config) for name, config in sizes}

    def from_hf(self, hf: Mapping[str, Any]) -> LlamaShape:
        """The shape that a Hugging Face `config.json` describes."""
        return LlamaShape(llama_configs.from_hf(hf))


FAMILY = LlamaFamily()
