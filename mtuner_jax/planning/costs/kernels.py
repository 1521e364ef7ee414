"""Seconds that a layer's kernels take, forward and backward.

Products run at the rate that the card reaches with that many tokens, attention at its
own, elementwise kernels cost the bytes that they move, and each kernel a constant.
"""

from collections.abc import Sequence

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.numbers import chunking
from mtuner_jax.planning.plans import SAVED_TENSORS, Saved
from mtuner_jax.planning.workloads import Linear, Workload

# Linears whose outputs a backward pass computes again. The last one's is never read.
_REDONE: dict[Saved, tuple[str, ...]] = {
    Saved.LINEARS: (),
    Saved.ATTENTION_AND_GATES: ("o_proj",),
    Saved.ATTENTION: ("o_proj", "gate_proj", "up_proj"),
    Saved.LAYER_INPUT: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
}
_REDONE[Saved.LAYER_INPUT_ON_HOST] = _REDONE[Saved.LAYER_INPUT]

# What a low-rank update moves, in elements for each input and output feature and
# token. Measured on an H200 at rank 16 and four shapes: within 10 % at 4 TB/s.
_LORA_FORWARD = (1, 4)
_LORA_BACKWARD = (6, 2)
# Drawing masks, in elements that take as long to move; from the same measurement.
_DROPOUT = (6, 4)
# Attention by XLA: bytes that take as long to move, for each score that it computes.
_SCORE_BYTES = (20, 38)


def matmul_rate(hardware: Hardware, tokens: int) -> float:
    """FLOP/s of products whose left operand has `tokens` rows."""
    known, rates = zip(*hardware.matmul_flops_per_s, strict=True)
    return float(np.interp(tokens, known, rates))


def layer(
    workload: Workload, hardware: Hardware, saved: Saved, *, rows: int
) -> tuple[float, float]:
    """Seconds of a layer's kernels, copies left out.

    Args:
      workload: Sizes.
      hardware: The machine.
      saved: What the backward pass does not compute again.
      rows: Rows of a device that run at once.

    Returns:
      (forward, backward).
    """
    tokens = rows * workload.max_length
    linears = workload.linears
    redone = [linear for linear in linears if linear.name in _REDONE[saved]]
    attention_s = _attention(workload, hardware, rows=rows)
    features = _forward_features(workload)
    forward = (
        _products(linears, hardware, tokens)
        + attention_s[0]
        + _lora(workload, hardware, linears, _LORA_FORWARD, tokens)
        + _moved(workload, hardware, features, tokens)
        + _kernels(linears, 3, 8) * hardware.kernel_s
    )
    features = _backward_features(workload, saved)
    backward = (
        _products(linears, hardware, tokens)
        + _products(redone, hardware, tokens)
        + attention_s[1]
        + (0.0 if "attention" in SAVED_TENSORS[saved] else attention_s[0])
        + _lora(workload, hardware, linears, _LORA_BACKWARD, tokens)
        + _lora(workload, hardware, redone, _LORA_FORWARD, tokens)
        + _moved(workload, hardware, features, tokens)
        + (_kernels(linears, 6, 14) + _kernels(redone, 3, 0)) * hardware.kernel_s
    )
    return forward, backward


def _products(linears: Sequence[Linear], hardware, tokens):
    """Seconds of frozen products, and of the low-rank ones' arithmetic."""
    weights = sum(
        linear.in_dim * linear.out_dim + linear.rank * (linear.in_dim + linear.out_dim)
        for linear in linears
    )
    return 2 * weights * tokens / matmul_rate(hardware, tokens)


def _lora(workload, hardware, linears, elements, tokens):
    """Seconds of what low-rank updates move."""
    ins = sum(linear.in_dim for linear in linears if linear.rank)
    outs = sum(linear.out_dim for linear in linears if linear.rank)
    features = elements[0] * ins + elements[1] * outs
    if workload.dropout:
        features += _DROPOUT[elements is _LORA_BACKWARD] * ins
    return _moved(workload, hardware, features, tokens)


def _moved(workload, hardware, features, tokens):
    return features * tokens * workload.element_bytes / hardware.memory_bytes_per_s


def _kernels(linears, each_adapter, others):
    adapted = sum(linear.rank > 0 for linear in linears)
    return len(linears) + each_adapter * adapted + others


def _attention(workload, hardware, *, rows):
    """(forward, backward) seconds."""
    tokens, heads = workload.max_length, workload.num_heads
    if workload.cudnn_attention:
        flops = 2 * rows * tokens * tokens * heads * workload.head_dim
        forward = flops / hardware.attention_flops_per_s
        return forward, 2.5 * forward  # 2 products forward, 5 backward
    blocks = len(chunking.attention_blocks(tokens))
    scores = rows * heads * tokens * tokens * (blocks + 1) / (2 * blocks)
    forward, backward = (
        scores * size / hardware.memory_bytes_per_s for size in _SCORE_BYTES
    )
    return forward, backward


def _widths(workload):
    """Features of the stream, the feed-forward part, queries and keys together."""
    heads = workload.num_heads + workload.num_kv_heads
    return (
        workload.hidden_size,
        workload.intermediate_size,
        heads * workload.head_dim,
    )


def _forward_features(workload):
    """Elements that elementwise kernels move for a token.

    Two norms read the stream twice and write it, two residuals read it twice and write
    it, rotation reads and writes queries and keys, the gate reads two and writes
    one of the wide tensors.
    """
    stream, wide, rotated = _widths(workload)
    return 12 * stream + 2 * rotated + 3 * wide


def _backward_features(workload, saved):
    """Likewise for the gradient, and for what is computed again."""
    stream, wide, rotated = _widths(workload)
    names = SAVED_TENSORS[saved]
    features = 19 * stream + 2 * rotated + 5 * wide
    features += 0 if "mlp_input" in names else 9 * stream
    features += 0 if "query" in names else 2 * rotated
    features += 0 if "hidden" in names else 3 * wide
    return features
