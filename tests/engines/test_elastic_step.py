import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import llama
from mtuner_jax import meshes
from mtuner_jax.engines import base_weights, elastic_step
from mtuner_jax.engines.states import TrainState
from mtuner_jax.planning import plans
from tests import comparing, tiny

MESHES = ("2x2x2", "8", "4", "1")
TOKENS = 12


def mesh_of(text):
    return meshes.make(meshes.parse(text), jax.devices())


def engine_weights(model, plan, mesh, weights, *, dtype):
    """The plain tree, arranged and sharded as the engine wants it."""
    abstract = base_weights.layout(model, plan, mesh, dtype=dtype)
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


def segments(*parts):
    return tuple(
        plans.SegmentPlan(num_layers=n, rest_axes=rest, saved=saved)
        for n, rest, saved in parts
    )


INPUT, GATES = plans.Saved.LAYER_INPUT, plans.Saved.ATTENTION_AND_GATES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison with the plain step."""

    mesh: str
    segments: tuple
    variant: str = "gqa"
    rows: tuple[int, int] = (1, 2)
    dropout: float = 0.0


CASES = {
    "2x2x2 layer inputs": Case(mesh="2x2x2", segments=segments((3, 0, INPUT))),
    "2x2x2 saved tensors": Case(
        mesh="2x2x2", segments=segments((3, 0, GATES)), dropout=0.25
    ),
    "2x2x2 one-layer segments, mixed": Case(
        mesh="2x2x2",
        segments=segments((1, 1, GATES), (1, 3, INPUT), (1, 2, GATES)),
        variant="tied",
    ),
    "8": Case(
        mesh="8",
        segments=segments((2, 0, INPUT), (1, 1, GATES)),
        variant="bias_and_padded_vocabulary",
        dropout=0.25,
    ),
    "4": Case(mesh="4", segments=segments((3, 0, GATES)), rows=(2, 2)),
    "1": Case(mesh="1", segments=segments((3, 0, GATES)), rows=(5, 3), dropout=0.5),
    "1 layer inputs": Case(
        mesh="1", segments=segments((3, 1, INPUT)), rows=(16, 1), variant="tied"
    ),
}


def run_case(case, *, dtype, steps=3):
    model = llama.Llama(tiny.VARIANTS[case.variant])
    mesh = mesh_of(case.mesh)
    plan = plans.Plan(
        mesh_sizes=tuple(mesh.devices.shape),
        segments=case.segments,
        microbatch=case.rows[0],
        accumulation=case.rows[1],
    )
    specs = tiny.adapters(model, rank_pattern={"layers.1.self_attn.q_proj": 2})
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    spec = elastic_step.StepSpec(
        model=model,
        plan=plan,
        mesh=mesh,
        adapters=specs,
        dropout_rate=case.dropout,
        seed=7,
    )
    plain = tiny.PlainStep(
        model=model,
        specs=specs,
        optimizer=optimizer,
        dropout_rate=case.dropout,
        seed=7,
    )
    weights = tiny.parameters(model, dtype=dtype)
    params = tiny.filled(specs, dtype=dtype)
    want = TrainState(params, jax.jit(optimizer.init)(params), jnp.int32(0))
    got = jax.device_put(jax.device_get(want), NamedSharding(mesh, P()))
    sharded = engine_weights(model, plan, mesh, weights, dtype=dtype)
    step = elastic_step.build_train(spec, optimizer)
    rng = np.random.default_rng(3)
    for _ in range(steps):
        rows = tiny.batch(
            rng, rows=plan.rows - 1, tokens=TOKENS, vocab_size=model.vocab_size
        )
        before = want.adapters
        want, loss, norm = plain.run(want, weights, rows)
        placed = elastic_step.put(elastic_step.cut(rows, plan), mesh)
        got, metrics = step(got, sharded, placed)
        comparing.assert_trees_close(
            jax.device_get((metrics.loss, metrics.grad_norm)),
            jax.device_get((loss, norm)),
        )
        updates = [
            jax.tree.map(np.subtract, *jax.device_get((new, before)))
            for new in (got.adapters, want.adapters)
        ]
        comparing.assert_trees_close(*updates)
    assert float(metrics.trained_tokens) == rows.weights.sum()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_step_equals_the_plain_unsharded_step(name):
    run_case(CASES[name], dtype=jnp.float64)
