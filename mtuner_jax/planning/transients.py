"""What lives only while one layer, or the loss, runs: fitted to compiled steps."""

import math
from collections.abc import Sequence

from mtuner_jax.planning.plans import SegmentPlan, Table
from mtuner_jax.planning.workloads import Workload

_LOGIT_BYTES = 256 * 2**20
_MIN_CHUNKS = 8
_MIN_CHUNK_TOKENS = 32
_WIDE_BYTES = 4


def layer(
    workload: Workload,
    segment: SegmentPlan,
    *,
    mesh_sizes: Sequence[int],
    rows: int,
    merge_gathers: bool,
) -> int:
    """Bytes that live only while a layer of the segment runs.

    Whole weights of the layer at hand and of the one that is gathered meanwhile, and
    the tensors of the backward pass.
    """
    tokens = rows * workload.max_length
    wide = workload.intermediate_size
    tensors = tokens * (4 * wide + 2 * workload.hidden_size) * workload.element_bytes
    return tensors + _weights(workload, segment, mesh_sizes, merged=merge_gathers)


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


def _weights(workload, segment, mesh_sizes, *, merged):
    if math.prod(mesh_sizes[segment.rest_axes :]) == 1:
        return 0
    layers = 1 + segment.prefetch + merged
    return layers * workload.layer_weight_bytes
