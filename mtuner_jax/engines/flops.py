"""Useful floating-point operations of a step, for MFU."""

from mtuner_jax.protocols.decoders import Decoder


def per_token(
    model: Decoder, *, attention_width: int, num_adapter_weights: int, tokens: int
) -> float:
    """FLOPs per token that LoRA training cannot avoid; recomputation is not counted.

    Frozen linears and the head: 2 forward and 2 backward (no weight gradient) per
    weight. Adapters: 2 forward, 4 backward. Causal attention: half of the T x T
    scores, 2 products forward and 4 backward.

    Args:
      model: The decoder.
      attention_width: Query heads x head dim.
      num_adapter_weights: Trained weights.
      tokens: Tokens in a row (T).
    """
    linears = sum(linear.in_dim * linear.out_dim for linear in model.linears())
    width = model.shapes()["head"]["norm"]["scale"][0]
    frozen = model.num_layers * linears + model.vocab_size * width
    attention = model.num_layers * 6 * tokens * attention_width
    return 4.0 * frozen + 6.0 * num_adapter_weights + attention
