"""Workloads of decoders, and a plan that uses most of what plans can say."""

from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans, workloads
from mtuner_jax.planning.costs import timelines
from mtuner_jax.planning.plans import SegmentPlan

HEAD_DIM = 128


def decoder(
    *, num_layers, widths, heads, ranks=16, rows=(8, 4096), vocab_size=32000, **settings
):
    """A workload of Llama's seven linears.

    Args:
      num_layers: Layers.
      widths: (of the residual stream, of the feed-forward part).
      heads: (of queries, of keys and values), of 128 features.
      ranks: Of all adapters, or by linear.
      rows: (rows in an optimizer step, tokens in a row).
      vocab_size: Rows of a table.
      **settings: Further fields of `Workload`.
    """
    width, wide = widths
    query, key = (HEAD_DIM * number for number in heads)
    dims = {
        "q_proj": (width, query),
        "k_proj": (width, key),
        "v_proj": (width, key),
        "o_proj": (query, width),
        "gate_proj": (width, wide),
        "up_proj": (width, wide),
        "down_proj": (wide, width),
    }
    if isinstance(ranks, int):
        ranks = dict.fromkeys(dims, ranks)
    fields = {
        "model": "decoder",
        "num_layers": num_layers,
        "hidden_size": width,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "tied_embeddings": False,
        "linears": tuple(
            workloads.LinearSizes(
                name=name, in_dim=ins, out_dim=outs, rank=ranks.get(name, 0)
            )
            for name, (ins, outs) in dims.items()
        ),
        "replicated_layer_weights": 2 * width,
        "max_length": rows[1],
        "global_batch_size": rows[0],
    }
    return workloads.Workload(**{**fields, **settings})


SEVEN = {"widths": (4096, 11008), "heads": (32, 32)}  # Llama-2 7B's
# Four small layers.
WIDTH, WIDE = 512, 1024
LINEARS = {"q_proj": (WIDTH, WIDTH), "down_proj": (WIDE, WIDTH)}
WORKLOAD = workloads.Workload(
    model="small",
    num_layers=4,
    hidden_size=WIDTH,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=1000,
    tied_embeddings=False,
    linears=(
        *(
            workloads.LinearSizes(name=name, in_dim=dims[0], out_dim=dims[1], rank=8)
            for name, dims in LINEARS.items()
        ),
        workloads.LinearSizes(name="up_proj", in_dim=WIDTH, out_dim=WIDE),
    ),
    replicated_layer_weights=2 * WIDTH,
    max_length=512,
    global_batch_size=32,
)
MACHINE = machines.preset("pcie8")
# Layer 0 is kept across steps, 1 to the backward pass, 2 and 3 run in chunks.
PLAN = plans.Plan(
    mesh_sizes=(2, 2, 2),
    segments=(
        SegmentPlan(num_layers=1, bwd_keep_axes=2, prefetch=True),
        SegmentPlan(num_layers=1, fwd_keep_axes=3, prefetch=True),
        SegmentPlan(num_layers=2, rest_axes=1, fwd_keep_axes=1, bwd_keep_axes=1),
    ),
    microbatch=2,
    accumulation=2,
    tail_layers=2,
    tail_chunks=2,
)
PLAYED = timelines.replay(PLAN, WORKLOAD, MACHINE)
