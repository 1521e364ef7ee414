"""What lives only while one layer, or the loss, runs.

Which buffers these are was read from XLA's buffer assignments (jax 0.10.2, 8 x
A100-40GB, compile-only); the factors below are fitted to the compiled totals. The
grid in tests/engines/test_aot.py holds them against the compiler.

Letters: T tokens of the rows at hand, D model, F feed-forward, Q and K features of
all query and of all key heads.
"""

import math
from collections.abc import Sequence

from mtuner_jax.planning.plans import SegmentPlan, Table
from mtuner_jax.planning.workloads import Workload

_LOGIT_BYTES = 256 * 2**20
_MIN_CHUNKS = 8
_MIN_CHUNK_TOKENS = 32
_WIDE_BYTES = 4

# Alive when attention's backward pass runs, which is the peak: the gradients of gate,
# up and hidden, kept for the adapters' gradients, which are computed late; the stream,
# its gradient, what both norms keep, inputs and gradients of the projections; queries,
# the output, and the gradients of both; keys, values and their gradients.
_F_TENSORS, _D_TENSORS, _Q_TENSORS, _K_TENSORS = 3, 7, 4, 4
# In hundredths of a layer's whole weights, beside all of those tensors: weights that
# are still needed or already gathered, copies joined with their adapters for one
# product, gaps.
_WITH_TENSORS = 135
# A resident layer is cut out of its stack before it runs.
_CUT_OUT = 85
# Copies pass through a buffer of their own; so do merged gathers.
_COPY = 30
_MERGED = 35
# Earlier, the layer at hand and the next one are there whole, with a share of tensors
# (hundredths).
_WHOLE_LAYERS = 200
_EARLY_TENSORS = 40


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
    if math.prod(mesh_sizes[segment.rest_axes :]) == 1:
        return tensors + _hundredths(_CUT_OUT, weights)
    keeps = max(segment.fwd_keep_axes, segment.bwd_keep_axes) > segment.rest_axes
    extra = keeps * _COPY + merge_gathers * _MERGED
    return max(
        tensors + _hundredths(_WITH_TENSORS + extra, weights),
        _hundredths(_WHOLE_LAYERS + extra, weights)
        + _hundredths(_EARLY_TENSORS, tensors),
    )


def tensor_bytes(workload: Workload, *, rows: int) -> int:
    """Bytes of a layer's tensors while attention's backward pass runs."""
    features = (
        _F_TENSORS * workload.intermediate_size
        + _D_TENSORS * workload.hidden_size
        + _Q_TENSORS * workload.num_heads * workload.head_dim
        + _K_TENSORS * workload.num_kv_heads * workload.head_dim
    )
    return rows * workload.max_length * features * workload.element_bytes


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
        chunk = devices * chunk_tokens(tokens, table_rows)
        table = 0
    else:
        table_rows = workload.vocab_size
        chunk = chunk_tokens(tokens, table_rows)
        table = workload.table_bytes if head is Table.GATHERED and devices > 1 else 0
    logits = chunk * table_rows * _WIDE_BYTES
    return table + 2 * logits + 3 * stream


def chunk_tokens(num_tokens: int, table_rows: int) -> int:
    """Tokens whose logits are held at once, as `ops.losses.chunk_tokens` chooses."""
    limit = max(1, _LOGIT_BYTES // (_WIDE_BYTES * table_rows))
    limit = min(limit, max(_MIN_CHUNK_TOKENS, num_tokens // _MIN_CHUNKS))
    if num_tokens <= limit:
        return num_tokens
    return max(size for size in range(1, limit + 1) if num_tokens % size == 0)


def _hundredths(count: int, num_bytes: int) -> int:
    return -(-count * num_bytes // 100)
