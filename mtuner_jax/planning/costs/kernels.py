"""Seconds that a layer's kernels take, forward and backward.

Products run at the rate that the card reaches with that many tokens, attention at its
own, elementwise kernels cost the bytes that they move, and each kernel a constant.
"""

from collections.abc import Sequence

import numpy as np

from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.numbers import chunking
from mtuner_jax.planning import workloads
from mtuner_jax.planning.costs import fitted
from mtuner_jax.planning.plans import SAVED_TENSORS, Saved
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import LinearSizes, Workload

# Linears whose outputs a backward pass computes again. The last one's is never read.
_REDONE: dict[Saved, tuple[str, ...]] = {
    Saved.LINEARS: (),
    Saved.ATTENTION_AND_GATES: ("o_proj",),
    Saved.ATTENTION: ("o_proj", "gate_proj", "up_proj"),
    Saved.LAYER_INPUT: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
}
_REDONE[Saved.LAYER_INPUT_ON_HOST] = _REDONE[Saved.LAYER_INPUT]


def matmul_rate(hardware: Hardware, tokens: int) -> float:
    """FLOP/s of products whose left operand has `tokens` rows."""
    known, rates = zip(*hardware.matmul_flops_per_s, strict=True)
    return float(np.interp(tokens, known, rates))


def layer(site: Site, hardware: Hardware, saved: Saved) -> tuple[float, float]:
    """Seconds of a layer's kernels, copies left out.

    Args:
      site: What runs: sizes and rows.
      hardware: The machine.
      saved: What the backward pass does not compute again.

    Returns:
      (forward, backward).
    """
    workload = site.workload
    linears, low_rank = workload.linears, fitted.LOW_RANK[workload.low_rank]
    redone = [linear for linear in linears if linear.name in _REDONE[saved]]
    attention_s = _attention(site, hardware)
    drawn, drawn_back = low_rank.dropout if workload.dropout else (0, 0)

    def lora(
        linears: Sequence[LinearSizes], elements: tuple[int, int], masks: int
    ) -> float:
        """Seconds of what low-rank updates move."""
        adapted = [linear for linear in linears if linear.rank]
        ins = workloads.input_features(adapted)
        outs = sum(linear.out_dim for linear in adapted)
        features = elements[0] * ins + elements[1] * outs + masks * ins
        return _moved(site, hardware, features)

    def products(linears: Sequence[LinearSizes]) -> float:
        return _products(linears, hardware, site.tokens)

    each, each_back = low_rank.kernels
    forward = (
        products(linears)
        + attention_s[0]
        + lora(linears, low_rank.forward, drawn)
        + _moved(site, hardware, _forward_features(workload))
        + _kernels(linears, each, 8) * hardware.kernel_s
    )
    backward = (
        products(linears)
        + products(redone)
        + attention_s[1]
        + (0.0 if "attention" in SAVED_TENSORS[saved] else attention_s[0])
        + lora(linears, low_rank.backward, drawn_back)
        + lora(redone, low_rank.forward, drawn)
        + _moved(site, hardware, _backward_features(workload, saved))
        + (_kernels(linears, each_back, 14) + _kernels(redone, each, 0))
        * hardware.kernel_s
    )
    return forward, backward


def _products(linears: Sequence[LinearSizes], hardware: Hardware, tokens: int) -> float:
    """Seconds of frozen products, and of the low-rank ones' arithmetic."""
    weights = sum(
        linear.in_dim * linear.out_dim + linear.rank * (linear.in_dim + linear.out_dim)
        for linear in linears
    )
    return 2 * weights * tokens / matmul_rate(hardware, tokens)


def _moved(site: Site, hardware: Hardware, features: int) -> float:
    """Seconds in which so many elements of each token move."""
    moved = features * site.tokens * site.workload.activation_bytes
    return moved / hardware.memory_bytes_per_s


def _kernels(linears: Sequence[LinearSizes], each_adapter: int, others: int) -> int:
    """Kernels that run: one a linear, those of adapters, others."""
    adapted = sum(linear.rank > 0 for linear in linears)
    return len(linears) + each_adapter * adapted + others


def _attention(site: Site, hardware: Hardware) -> tuple[float, float]:
    """(forward, backward) seconds of attention."""
    workload = site.workload
    tokens, heads = workload.max_length, workload.num_heads
    costs = fitted.ATTENTION[workload.attention]
    if costs.flops:
        share = workload.attended if costs.within_documents else 1.0
        scores = share * site.rows * tokens * tokens * heads * workload.head_dim
        forward = costs.flops * scores / hardware.attention_flops_per_s
        moved = [
            count * _moved(site, hardware, heads * workload.head_dim)
            for count in costs.moved
        ]
        return forward + moved[0], costs.backward_ratio * forward + moved[1]
    blocks = len(chunking.attention_blocks(tokens))
    scores = site.rows * heads * tokens * tokens * (blocks + 1) / (2 * blocks)
    forward, backward = (
        scores * size / hardware.memory_bytes_per_s for size in costs.score_bytes
    )
    return forward, backward


def _forward_features(workload: Workload) -> int:
    """Elements that elementwise kernels move for a token, forward.

    Two norms read the stream twice and write it, two residuals read it twice and write
    it, rotation reads and writes queries and keys, their norms read them twice and
    write them, the gate reads two and writes one of the wide tensors.
    """
    return (
        12 * workload.hidden_size
        + _rotation_moves(workload) * _rotated_features(workload)
        + 3 * workload.intermediate_size
    )


def _backward_features(workload: Workload, saved: Saved) -> int:
    """Elements that they move for the gradient, and for what is computed again."""
    stream, wide = workload.hidden_size, workload.intermediate_size
    rotated, names = _rotated_features(workload), SAVED_TENSORS[saved]
    features = 19 * stream + 2 * rotated + 5 * wide
    features += 0 if "mlp_input" in names else 9 * stream
    if workload.qk_norm:
        features += (5 + _rotation_moves(workload)) * rotated  # redone in any case
    else:
        features += 0 if "query" in names else 2 * rotated
    features += 0 if "hidden" in names else 3 * wide
    return features


def _rotation_moves(workload: Workload) -> int:
    """Elements moved for each feature that is rotated, and normed before."""
    return 5 if workload.qk_norm else 2


def _rotated_features(workload: Workload) -> int:
    """Features of all queries and keys."""
    return (workload.num_heads + workload.num_kv_heads) * workload.head_dim
