"""What runs need to know of a model family; `models` implements it, scripts pass it in.

A family makes shapes of names and Hugging Face configs; a shape makes the decoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.weights import sources


class ModelShape(Protocol):
    """A model's sizes, before any weight is read."""

    @property
    def num_layers(self) -> int:
        """Layers in the stack (L)."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads (N)."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads (K)."""
        ...

    @property
    def head_dim(self) -> int:
        """Features of a head (H)."""
        ...

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed, head by head, before rotation."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table (V)."""
        ...

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens in a row that the model was trained for."""
        ...

    def with_layers(self, num_layers: int) -> "ModelShape":
        """The same model with another number of layers."""
        ...

    def decoder(self, *, attention: str, most_documents: int = 0) -> Decoder:
        """The decoder.

        Args:
          attention: What computes attention, a key of `ops.attention.api.BACK_ENDS`.
          most_documents: Documents in a row at most; 0 where nobody knows.
        """
        ...

    def to_hf(self) -> dict[str, Any]:
        """The content of a Hugging Face `config.json` of this shape."""
        ...

    def tensors(self) -> Sequence[sources.HfName]:
        """Every tensor of a Hugging Face checkpoint, and where it goes."""
        ...


class Family(Protocol):
    """Models that one decoder represents."""

    def named(self) -> Mapping[str, ModelShape]:
        """Well-known shapes by name, for plans and benchmarks without a checkpoint."""
        ...

    def from_hf(self, hf: Mapping[str, Any]) -> ModelShape:
        """The shape that a Hugging Face `config.json` describes.

        Raises:
          ValueError: A model that the decoder cannot represent.
        """
        ...
