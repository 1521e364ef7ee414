"""What lives only while one layer, or the loss, runs.

Which buffers these are was read from XLA's buffer assignments; the factors (`fitted`)
are fitted to the compiled totals. The grid in tests/inspection/test_compile_only.py
holds them against the compiler.
"""

from mtuner_jax.numbers import chunking
from mtuner_jax.planning import workloads
from mtuner_jax.planning.costs import fitted
from mtuner_jax.planning.plans import SegmentPlan, Table
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import Workload

_WIDE_BYTES = 4


def layer(site: Site, segment: SegmentPlan) -> int:
    """Bytes that live only while a layer of the segment runs at the site."""
    weights = site.workload.layer_weight_bytes
    tensors = tensor_bytes(site) + score_bytes(site)
    factors = _factors(site, segment)
    return max(
        tensors + _hundredths(factors.peak, weights),
        _hundredths(fitted.EARLY_TENSORS, tensors)
        + _hundredths(factors.early, weights),
    )


def _factors(site: Site, segment: SegmentPlan) -> fitted.Weights:
    sharing = site.axes.sharing(segment.rest_axes)
    if sharing == 1:
        return fitted.RESIDENT
    factors = fitted.AHEAD if segment.prefetch else fitted.NOT_AHEAD
    keep = max(segment.fwd_keep_axes, segment.bwd_keep_axes)
    copy = fitted.COPY if keep > segment.rest_axes else 0
    devices = site.axes.sharing(keep)
    # What is kept in part is gathered in two stages: the part lies beside the whole.
    part = -(-100 // devices) if copy and devices > 1 else copy
    merged = fitted.MERGED if site.merge_gathers else 0
    merged_early = merged + -(-100 // sharing) if site.merge_gathers else 0
    return fitted.Weights(
        peak=factors.peak + max(copy, merged if segment.prefetch else 0),
        early=factors.early + part + merged_early,
    )


def tensor_bytes(site: Site) -> int:
    """Bytes of a layer's tensors while attention's backward pass runs."""
    workload = site.workload
    features = _features(workload, fitted.BACKWARD)
    if workload.dropout:  # an adapter's input after it, and the bits that decide it
        features += 2 * workloads.input_features(workload.adapted)
    return site.tokens * features * workload.activation_bytes


def score_bytes(site: Site) -> int:
    """Bytes of the scores that attention holds in its backward pass."""
    workload = site.workload
    blocks = chunking.attention_blocks(workload.max_length)
    scores = site.rows * sum((end - start) * end for start, end in blocks)
    held = fitted.ATTENTION[workload.attention].held_score_bytes
    return held * workload.num_heads * scores


def segment(workload: Workload) -> int:
    """Bytes that a segment costs beside its layers if it is not the first one."""
    return _hundredths(fitted.SEGMENT_WEIGHTS, workload.layer_weight_bytes)


def unrolled(site: Site) -> int:
    """Bytes that a segment costs whose loop has one trip."""
    return _hundredths(fitted.UNROLLED_TENSORS, tensor_bytes(site))


def loop_layers(*, prefetch: bool) -> int:
    """Layers from which on XLA keeps a segment's loop; it unrolls one of one trip."""
    return 2 + prefetch


def loss(chunk: Site, head: Table) -> int:
    """Bytes that live only while the loss of a tail's chunk is computed."""
    workload, devices = chunk.workload, chunk.axes.num_devices
    stream = chunk.tokens * workload.hidden_size * workload.activation_bytes
    if head is Table.SPLIT:
        table_rows = -(-workload.vocab_size // devices)
        at_once = devices * chunking.loss_tokens(chunk.tokens, table_rows)
    else:
        table_rows = workload.vocab_size
        at_once = chunking.loss_tokens(chunk.tokens, table_rows)
    logits = at_once * table_rows * _WIDE_BYTES
    return gathered_bytes(workload, head, devices=devices) + 2 * logits + 3 * stream


def last_layer(site: Site) -> int:
    """Bytes of the main part's last layer while a gathered output table waits."""
    workload = site.workload
    features = _features(workload, fitted.FORWARD)
    tensors = site.tokens * features * workload.activation_bytes
    return tensors + _hundredths(fitted.LAST_LAYER, workload.layer_weight_bytes)


def gathered_bytes(workload: Workload, table: Table, *, devices: int) -> int:
    """Bytes of a vocabulary table that is gathered where it is used, else 0."""
    if table is not Table.GATHERED or devices == 1:
        return 0
    rows = chunking.padded(workload.vocab_size, devices)
    return rows * workload.hidden_size * workload.weight_bytes


def _features(workload: Workload, alive: fitted.Features) -> int:
    """Elements of a token in tensors that are alive at once."""
    return (
        alive.wide * workload.intermediate_size
        + alive.stream * workload.hidden_size
        + alive.queries * workload.num_heads * workload.head_dim
        + alive.keys * workload.num_kv_heads * workload.head_dim
    )


def _hundredths(count: int, num_bytes: int) -> int:
    return -(-count * num_bytes // 100)
