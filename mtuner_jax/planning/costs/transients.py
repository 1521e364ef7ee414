"""What lives only while one layer, or the loss, runs.

Which buffers these are was read from XLA's buffer assignments (jax 0.10.2, 8 x
A100-40GB, compile-only); the factors below are fitted to the compiled totals. The
grid in tests/inspection/test_compile_only.py holds them against the compiler.

Letters: T tokens of the rows at hand, D model, F feed-forward, Q and K features of
all query and of all key heads.
"""

import dataclasses
import math
from collections.abc import Sequence

from mtuner_jax.numbers import chunking
from mtuner_jax.planning.plans import SegmentPlan, Table
from mtuner_jax.planning.workloads import Workload

_WIDE_BYTES = 4

# Alive when attention's backward pass runs, which is the peak: the gradients of gate,
# up and hidden, kept for the adapters' gradients, which are computed late; the stream,
# its gradient, what both norms keep, inputs and gradients of the projections; queries,
# the output, and the gradients of both; keys, values and their gradients.
_F_TENSORS, _D_TENSORS, _Q_TENSORS, _K_TENSORS = 3, 7, 4, 4
# Alive when the forward pass of a layer multiplies gate and up.
_FORWARD_F_TENSORS, _FORWARD_D_TENSORS = 4, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Factors:
    """Shares of a layer's whole weights or of its tensors, in hundredths.

    Attributes:
      peak: Weights beside all tensors: those still needed or already gathered, copies
        joined with their adapters for one product, gaps between buffers.
      early: Weights at the start of a layer's backward pass.
    """

    peak: int
    early: int


_AHEAD = _Factors(peak=135, early=200)
_NOT_AHEAD = _Factors(peak=110, early=150)
# A resident layer is cut out of its stack before it runs.
_RESIDENT = _Factors(peak=85, early=85)
# More of both: copies pass through a buffer of their own; merged gathers end together,
# and what is held of all of them was cut out of its stack before.
_COPY, _MERGED = 30, 22
# Of the tensors, at the start of a layer's backward pass.
_EARLY_TENSORS = 40
# Of the weights, while a gathered output table waits for the main part's last layer.
_LAST_LAYER = 50
# A further segment: a layer outside of its loop.
_SEGMENT_WEIGHTS = 25
# Loops of one trip are unrolled; then neighbouring layers' tensors overlap.
_UNROLLED_TENSORS = 20


def layer(
    workload: Workload,
    segment: SegmentPlan,
    *,
    mesh_sizes: Sequence[int],
    rows: int,
    merge_gathers: bool,
) -> int:
    """Bytes that live only while a layer of the segment runs.

    Args:
      workload: Sizes.
      segment: The layer's treatment.
      mesh_sizes: Devices along each mesh axis, slowest link first.
      rows: Rows of a device that run at once.
      merge_gathers: Whether one collective gathers a layer.
    """
    weights, tensors = workload.layer_weight_bytes, tensor_bytes(workload, rows=rows)
    if not workload.cudnn_attention:
        tensors += score_bytes(workload, rows=rows)
    factors = _factors(segment, mesh_sizes, merged=merge_gathers)
    return max(
        tensors + _hundredths(factors.peak, weights),
        _hundredths(_EARLY_TENSORS, tensors) + _hundredths(factors.early, weights),
    )


def _factors(segment, mesh_sizes, *, merged):
    if math.prod(mesh_sizes[segment.rest_axes :]) == 1:
        return _RESIDENT
    factors = _AHEAD if segment.prefetch else _NOT_AHEAD
    keep = max(segment.fwd_keep_axes, segment.bwd_keep_axes)
    copied = keep > segment.rest_axes
    devices = math.prod(mesh_sizes[keep:])
    # What is kept in part is gathered in two stages: the part lies beside the whole.
    part = -(-100 // devices) if copied and devices > 1 else copied * _COPY
    merged_early = _MERGED - (-100 // math.prod(mesh_sizes[segment.rest_axes :]))
    return _Factors(
        peak=factors.peak
        + max(copied * _COPY, (merged and segment.prefetch) * _MERGED),
        early=factors.early + part + merged * merged_early,
    )


def tensor_bytes(workload: Workload, *, rows: int) -> int:
    """Bytes of a layer's tensors while attention's backward pass runs."""
    features = (
        _F_TENSORS * workload.intermediate_size
        + _D_TENSORS * workload.hidden_size
        + _Q_TENSORS * workload.num_heads * workload.head_dim
        + _K_TENSORS * workload.num_kv_heads * workload.head_dim
    )
    if workload.dropout:  # an adapter's input after it, and the bits that decide it
        features += 2 * sum(linear.in_dim for linear in workload.linears if linear.rank)
    return rows * workload.max_length * features * workload.element_bytes


def score_bytes(workload: Workload, *, rows: int) -> int:
    """Bytes of attention's scores and their gradients without cuDNN, float32.

    `ops.attention` goes through blocks of queries; XLA holds those of all blocks.
    """
    blocks = chunking.attention_blocks(workload.max_length)
    scores = sum((end - start) * end for start, end in blocks)
    return 2 * rows * workload.num_heads * scores * _WIDE_BYTES


def segment(workload: Workload) -> int:
    """Bytes that a segment costs beside its layers if it is not the first one."""
    return _hundredths(_SEGMENT_WEIGHTS, workload.layer_weight_bytes)


def unrolled(workload: Workload, *, rows: int) -> int:
    """Bytes that a segment costs whose loop has one trip."""
    return _hundredths(_UNROLLED_TENSORS, tensor_bytes(workload, rows=rows))


def is_unrolled(segment: SegmentPlan) -> bool:
    """Whether a segment has so few layers that XLA unrolls its loop."""
    return segment.num_layers <= 1 + segment.prefetch


def loss(workload: Workload, head: Table, *, devices: int, rows: int) -> int:
    """Bytes that live only while the loss and its gradient are computed.

    Args:
      workload: Sizes.
      head: How the output table is used.
      devices: Devices of the mesh.
      rows: Rows of a device that run at once.
    """
    tokens = rows * workload.max_length
    stream = tokens * workload.hidden_size * workload.element_bytes
    if head is Table.SPLIT:
        table_rows = -(-workload.vocab_size // devices)
        chunk = devices * chunking.loss_tokens(tokens, table_rows)
    else:
        table_rows = workload.vocab_size
        chunk = chunking.loss_tokens(tokens, table_rows)
    logits = chunk * table_rows * _WIDE_BYTES
    return gathered_bytes(workload, head, devices=devices) + 2 * logits + 3 * stream


def last_layer(workload: Workload, *, rows: int) -> int:
    """Bytes of the main part's last layer while a gathered output table waits."""
    features = (
        _FORWARD_F_TENSORS * workload.intermediate_size
        + _FORWARD_D_TENSORS * workload.hidden_size
    )
    tensors = rows * workload.max_length * features * workload.element_bytes
    return tensors + _hundredths(_LAST_LAYER, workload.layer_weight_bytes)


def gathered_bytes(workload: Workload, table: Table, *, devices: int) -> int:
    """Bytes of a vocabulary table that is gathered where it is used, else 0."""
    if table is not Table.GATHERED or devices == 1:
        return 0
    rows = -(-workload.vocab_size // devices) * devices
    return rows * workload.hidden_size * workload.element_bytes


def _hundredths(count: int, num_bytes: int) -> int:
    return -(-count * num_bytes // 100)
