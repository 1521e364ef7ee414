"""What is trained, as far as a plan's price depends on it: sizes only, no JAX."""

import dataclasses
from collections.abc import Sequence

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSizes:
    """A frozen linear of a layer and the adapter on it.

    Attributes:
      name: Its leaf name, such as `q_proj`.
      in_dim: Input features.
      out_dim: Output features.
      rank: Rank of its adapter; 0 without one.
      reads: Name of its input, which linears may share; empty for one of its own.
    """

    name: str
    in_dim: int
    out_dim: int
    rank: int = 0
    reads: str = ""


def input_features(linears: Sequence[LinearSizes]) -> int:
    """Features of the inputs that these linears read, each input counted once."""
    return sum({one.reads or one.name: one.in_dim for one in linears}.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its adapters and the batch of one optimizer step.

    Attributes:
      model: Name for messages and plan files.
      num_layers: Layers (L).
      hidden_size: Width of the residual stream (D).
      num_heads: Query heads (N).
      num_kv_heads: Key and value heads (K).
      head_dim: Features of a head (H).
      vocab_size: Rows of a vocabulary table (V).
      tied_embeddings: Whether input and output table are one.
      linears: Linears of one layer, in the order they run.
      replicated_layer_weights: Elements of a layer that every device holds whole:
        norm scales and biases.
      max_length: Tokens in a row (T).
      global_batch_size: Rows in an optimizer step; the planner never changes it.
      weight_dtype: Dtype in which frozen weights are stored and gathered.
      activation_dtype: Dtype of the stream, of saved tensors, and of the arena.
      attention: Implementation of attention, a row of `costs.fitted.ATTENTION`.
      attended: Share of a row's scores that lie within documents; 1 for rows of one.
      low_rank: Implementation of adapters, a row of `costs.fitted.LOW_RANK`.
      dropout: Whether adapters have dropout.
      stacked: Adapters that train together, whose state also has the gradients of
        batches that have begun; 0 for a run of one.
      qk_norm: Whether queries and keys are normed, head by head, before rotation.
    """

    model: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    linears: tuple[LinearSizes, ...]
    replicated_layer_weights: int
    max_length: int
    global_batch_size: int
    weight_dtype: str = "bfloat16"
    activation_dtype: str = "bfloat16"
    attention: str = "cudnn"
    attended: float = 1.0
    low_rank: str = "xla"
    dropout: bool = False
    stacked: int = 0
    qk_norm: bool = False

    @property
    def intermediate_size(self) -> int:
        """Width of the feed-forward part (F)."""
        return max(linear.out_dim for linear in self.linears)

    @property
    def shape_name(self) -> str:
        """Its sizes in a line: what a plan is for, whatever the model's name.

        Such as `L32 D4096 F11008 N32 K32 H128 V32000`, by the letters above; `qk`
        behind it where queries and keys are normed, `tied` where one table serves as
        input and output.
        """
        sizes = {
            "L": self.num_layers,
            "D": self.hidden_size,
            "F": self.intermediate_size,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "V": self.vocab_size,
        }
        words = [f"{letter}{size}" for letter, size in sizes.items()]
        words += ["qk"] if self.qk_norm else []
        return " ".join([*words, "tied"] if self.tied_embeddings else words)

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of a stored weight."""
        return _BYTES[self.weight_dtype]

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return _BYTES[self.activation_dtype]

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of a layer's linears, whole."""
        weights = sum(linear.in_dim * linear.out_dim for linear in self.linears)
        return weights * self.weight_bytes

    @property
    def adapted(self) -> tuple[LinearSizes, ...]:
        """Linears that have an adapter."""
        return tuple(linear for linear in self.linears if linear.rank)

    @property
    def table_bytes(self) -> int:
        """Bytes of one vocabulary table, whole."""
        return self.vocab_size * self.hidden_size * self.weight_bytes

    @property
    def num_adapter_weights(self) -> int:
        """Trained weights of all layers; float32, with two moments each."""
        layer = sum(
            linear.rank * (linear.in_dim + linear.out_dim) for linear in self.linears
        )
        return layer * self.num_layers
