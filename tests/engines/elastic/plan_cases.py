"""Plans, random and chosen, compared with the plain unsharded step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import llama
from mtuner_jax.devices import meshes
from mtuner_jax.engines.elastic import steps
from mtuner_jax.planning import plans
from mtuner_jax.protocols.states import TrainState
from mtuner_jax.weights import layouts
from tests import comparing, tiny

TOKENS = 8
ROWS = 15
STEPS = 3
# (microbatch, accumulation) by number of devices: room for ROWS rows, mostly more.
CUTS = {
    8: [(1, 2), (2, 1), (2, 2), (4, 1), (1, 3)],
    4: [(4, 1), (2, 2), (4, 2), (2, 3)],
    1: [(16, 1), (8, 2), (8, 3)],
    3: [(6, 1), (5, 1), (3, 2)],
    5: [(4, 1), (3, 1), (2, 2)],
    6: [(4, 1), (2, 2), (1, 3)],
    7: [(4, 1), (2, 2), (1, 3)],
}
MESHES = ("2x2x2", "2x4", "8", "4", "1")
ODD_MESHES = ("3", "5", "2x3", "7")  # sizes that divide few arrays
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A plan and what it runs on."""

    mesh: str
    plan: plans.Plan
    variant: str = "gqa"
    dropout: float = 0.0
    storage: str = ""  # dtype of the weights, where it is not that of activations


def mesh_of(text):
    return meshes.make(meshes.parse(text), jax.devices())


def random_case(seed, mesh_texts=MESHES):
    """A random valid plan of the three tiny layers on one of the meshes."""
    rng = np.random.default_rng(seed)
    mesh = str(rng.choice(mesh_texts))
    sizes = tuple(mesh_of(mesh).devices.shape)
    counts = [(3,), (1, 2), (2, 1), (1, 1, 1)][rng.integers(4)]
    segments = tuple(_random_segment(rng, count, len(sizes)) for count in counts)
    microbatch, accumulation = CUTS[np.prod(sizes)][
        rng.integers(len(CUTS[np.prod(sizes)]))
    ]
    tail = int(sum(counts[len(counts) - rng.integers(len(counts) + 1) :]))
    chunks = [n for n in (1, 2, 4, 8) if microbatch % n == 0] if tail else [1]
    variant = str(rng.choice(list(tiny.VARIANTS)))
    embedding, head = (plans.Table(str(rng.choice(list(plans.Table)))) for _ in "ab")
    if variant == "tied" and plans.Table.RESIDENT in (embedding, head):
        embedding = head = plans.Table.RESIDENT
    tail_chunks = int(rng.choice(chunks))
    adapters = plans.AdapterState(str(rng.choice(list(plans.AdapterState))))
    if tiny.CONFIG.hidden_size % np.prod(sizes):  # adapters are not padded
        adapters = plans.AdapterState.REPLICATED
    plan = plans.Plan(
        mesh_sizes=sizes,
        segments=segments,
        microbatch=microbatch,
        accumulation=accumulation,
        tail_layers=tail,
        tail_chunks=tail_chunks,
        embedding=embedding,
        head=head,
        adapters=adapters,
        weight_dtype="float64",
    )
    dropout = float(rng.choice([0.0, 0.25]))
    return Case(mesh=mesh, plan=plan, variant=variant, dropout=dropout)


def _random_segment(rng, num_layers, num_axes):
    rest = int(rng.integers(num_axes + 1))
    saved = plans.Saved(str(rng.choice(list(plans.Saved))))
    return plans.SegmentPlan(
        num_layers=num_layers,
        rest_axes=rest,
        fwd_keep_axes=int(rng.integers(rest, num_axes + 1)),
        bwd_keep_axes=int(rng.integers(rest, num_axes + 1)),
        saved=saved,
        prefetch=bool(rng.integers(2)),
    )


def engine_weights(model, plan, mesh, weights, *, dtype):
    """The plain tree, arranged and sharded as the engine wants it."""
    abstract = layouts.layout(model, plan, mesh, dtype=dtype)
    arranged = {"embed": weights["embed"], "head": weights["head"], "segments": {}}
    for index, start in enumerate(plan.starts):
        end = start + plan.segments[index].num_layers
        arranged["segments"][str(index)] = jax.tree.map(
            lambda a, s=start, e=end: a[s:e], weights["layers"]
        )

    def place(leaf, value):
        padding = [
            (0, want - got) for want, got in zip(leaf.shape, value.shape, strict=True)
        ]
        return jax.device_put(np.pad(value, padding), leaf.sharding)

    return jax.tree.map(place, abstract, arranged)


@functools.cache
def setting(variant, dtype):
    """(model, adapter specs, numpy weights, numpy adapters, batches of all steps)."""
    model = llama.Llama(tiny.MODELS[variant])
    specs = tiny.adapters(model, rank_pattern={"layers.1.self_attn.q_proj": 2})
    rng = np.random.default_rng(3)
    batches = [
        tiny.batch(rng, rows=ROWS, tokens=TOKENS, vocab_size=model.vocab_size)
        for _ in range(STEPS)
    ]
    weights = tiny.parameters(model, dtype=dtype)
    return model, specs, weights, tiny.filled(specs, dtype=dtype), batches


@functools.cache
def plain_run(variant, dropout, dtype, storage=None):
    """[(loss, gradient norm, adapters)] of the plain unsharded program.

    Its weights are rounded to `storage` and converted to `dtype`.
    """
    model, specs, weights, params, batches = setting(variant, dtype)
    weights = jax.tree.map(
        lambda leaf: leaf.astype(storage or dtype).astype(dtype), weights
    )
    plain = tiny.PlainStep(
        model=model, specs=specs, optimizer=OPTIMIZER, dropout_rate=dropout, seed=7
    )
    state = TrainState(params, jax.jit(OPTIMIZER.init)(params), jnp.int32(0))
    results = []
    for rows in batches:
        state, loss, norm = plain.run(state, weights, rows)
        results.append(jax.device_get((loss, norm, state.adapters)))
    return results


def check(case, *, dtype):
    """Losses, gradient norms and updates of each step equal the plain program's."""
    dtype = np.dtype(dtype)
    model, specs, weights, params, batches = setting(case.variant, dtype)
    storage = np.dtype(case.storage or dtype)
    weights = jax.tree.map(lambda leaf: leaf.astype(storage), weights)
    mesh, plan = mesh_of(case.mesh), case.plan
    spec = steps.StepSpec(
        model=model,
        plan=plan,
        mesh=mesh,
        adapters=specs,
        dropout_rate=case.dropout,
        seed=7,
        activation_dtype=dtype.name if case.storage else "",
    )
    state = TrainState(params, jax.jit(OPTIMIZER.init)(params), jnp.int32(0))
    state = jax.device_put(
        jax.device_get(state), steps.state_shardings(spec, OPTIMIZER)
    )
    sharded = engine_weights(model, plan, mesh, weights, dtype=storage)
    arenas = steps.init_arenas(spec, sharded, max_length=TOKENS)
    step = steps.build_train(spec, OPTIMIZER)
    before, got_before = params, params
    for rows, want in zip(
        batches, plain_run(case.variant, case.dropout, dtype, storage), strict=True
    ):
        placed = steps.put(steps.cut(rows, plan), mesh)
        state, metrics, arenas = step(state, sharded, placed, arenas)
        loss, norm, adapters = jax.device_get(
            (metrics.loss, metrics.grad_norm, state.adapters)
        )
        comparing.assert_trees_close((loss, norm), want[:2])
        comparing.assert_trees_close(
            jax.tree.map(np.subtract, adapters, got_before),
            jax.tree.map(np.subtract, want[2], before),
        )
        before, got_before = want[2], adapters
    assert float(metrics.trained_tokens) == batches[-1].weights.sum()
