"""A plan that uses most of what plans can say, for a model of four small layers."""

from mtuner_jax.planning import hardware, plans, timeline, workloads
from mtuner_jax.planning.plans import SegmentPlan

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
            workloads.Linear(name=name, in_dim=dims[0], out_dim=dims[1], rank=8)
            for name, dims in LINEARS.items()
        ),
        workloads.Linear(name="up_proj", in_dim=WIDTH, out_dim=WIDE),
    ),
    replicated_layer_weights=2 * WIDTH,
    max_length=512,
    global_batch_size=32,
)
MACHINE = hardware.preset("pcie8")
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
PLAYED = timeline.replay(PLAN, WORKLOAD, MACHINE)
