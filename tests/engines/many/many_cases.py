"""Adapters with data of their own: each alone, and all of them together."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import llama
from mtuner_jax.adapters.stacks import Member, Stack
from mtuner_jax.configs import OptimizerConfig
from mtuner_jax.engines.elastic import steps as elastic_steps
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.engines.many import optimizers as many_optimizers
from mtuner_jax.engines.many import states, steps
from mtuner_jax.planning import plans
from mtuner_jax.protocols.states import Batch, TrainState
from mtuner_jax.training import optimizers
from tests import tiny
from tests.engines.elastic import plan_cases

TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class One:
    """An adapter as a user describes it, and how many batches it trains."""

    lora: dict[str, Any]
    optimizer: OptimizerConfig
    dropout: float
    seed: int
    num_batches: int
    samples: int


ADAPTERS = (
    One(
        lora={"r": 4, "lora_alpha": 8.0},
        optimizer=OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.3),
        dropout=0.0,
        seed=1,
        num_batches=20,
        samples=3,
    ),
    One(
        lora={"r": 8, "lora_alpha": 4.0, "target_modules": ("q_proj", "v_proj")},
        optimizer=OptimizerConfig(learning_rate=3e-3, max_grad_norm=0.0),
        dropout=0.3,
        seed=2,
        num_batches=20,
        samples=2,
    ),
    One(
        lora={
            "r": 16,
            "use_rslora": True,
            "rank_pattern": {"layers.1.mlp.up_proj": 3},
        },
        optimizer=OptimizerConfig(
            learning_rate=2e-3, weight_decay=0.1, lr_scheduler_type="linear"
        ),
        dropout=0.1,
        seed=3,
        num_batches=7,
        samples=4,
    ),
    One(
        lora={"r": 64, "target_modules": ("o_proj", "down_proj", "k_proj")},
        optimizer=OptimizerConfig(
            learning_rate=1e-3, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6
        ),
        dropout=0.0,
        seed=3,
        num_batches=20,
        samples=5,
    ),
)


def documents(one, number, vocab_size):
    """Batches of an adapter: lists of (ids [n + 1], weights [n], sample id)."""
    rng = np.random.default_rng(100 + number)
    batches, sample = [], 0
    for _ in range(one.num_batches):
        batch = []
        for _ in range(one.samples):
            length = int(rng.integers(2, TOKENS // 2 + 1))
            weights = rng.integers(0, 2, length)
            weights[0] = 1
            batch.append((rng.integers(0, vocab_size, length + 1), weights, sample))
            sample += 1
        batches.append(batch)
    return batches


def lay(rows, num_rows):
    """Rows of (adapter, document), one after the other, as a batch."""
    shape = (num_rows, TOKENS)
    fields = {name: np.zeros(shape, np.int32) for name in Batch._fields}
    fields["weights"] = np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        start = 0
        for segment, (adapter, (ids, weights, sample)) in enumerate(row, start=1):
            place = (number, slice(start, start + len(weights)))
            fields["input_ids"][place] = ids[:-1]
            fields["targets"][place] = ids[1:]
            fields["weights"][place] = weights
            fields["segment_ids"][place] = segment
            fields["positions"][place] = np.arange(len(weights))
            fields["sample_ids"][place] = sample
            fields["adapter_ids"][place] = adapter
            start += len(weights)
    return Batch(**fields)


def first_fit(documents_):
    """Rows of at most `TOKENS` tokens."""
    rows = []
    for one in documents_:
        size = len(one[1][1])
        for row in rows:
            if sum(len(other[1][1]) for other in row) + size <= TOKENS:
                row.append(one)
                break
        else:
            rows.append([one])
    return rows


@functools.cache
def setting(dtype, adapters=ADAPTERS):
    """(model, numpy weights, members, numpy adapters, batches) of all adapters."""
    model = llama.Llama(tiny.CONFIG)
    members = tuple(
        Member(
            name=str(number),
            specs=tiny.adapters(model, **one.lora),
            dropout_rate=one.dropout,
            seed=one.seed,
        )
        for number, one in enumerate(adapters)
    )
    params = [
        tiny.filled(member.specs, dtype=dtype, seed=number)
        for number, member in enumerate(members)
    ]
    batches = [
        documents(one, number, model.vocab_size) for number, one in enumerate(adapters)
    ]
    return model, tiny.parameters(model, dtype=dtype), members, params, batches


def optimizer_of(one):
    schedule = optimizers.schedule(one.optimizer, num_steps=one.num_batches)
    return optimizers.adamw(one.optimizer, schedule), schedule


@functools.cache
def alone(dtype):
    """[[(loss, gradient norm, adapters after it)] by batch] by adapter."""
    model, weights, members, params, batches = setting(dtype)
    results = []
    for number, one in enumerate(ADAPTERS):
        optimizer, _ = optimizer_of(one)
        plain = tiny.PlainStep(
            model=model,
            specs=members[number].specs,
            optimizer=optimizer,
            dropout_rate=one.dropout,
            seed=one.seed,
        )
        state = TrainState(
            params[number], jax.jit(optimizer.init)(params[number]), jnp.int32(0)
        )
        steps_done = []
        for batch in batches[number]:
            rows = lay(first_fit([(0, one) for one in batch]), one.samples)
            state, loss, norm = plain.run(state, weights, rows)
            steps_done.append(jax.device_get((loss, norm, state.adapters)))
        results.append(steps_done)
    return results


def mixed(batches, *, num_rows, seed):
    """Engine steps: (rows, adapters whose batch ends), documents drawn at random.

    Each step takes some documents of some adapters' present batches, so that batches
    are spread over several steps and end at different ones.
    """
    rng = np.random.default_rng(seed)
    left = [list(batch[0]) for batch in batches]
    at = [0] * len(batches)
    while any(left):
        taken, ends = [], np.zeros(len(batches), bool)
        for number in rng.permutation(len(batches)).tolist():
            take = int(rng.integers(0, len(left[number]) + 1))
            for _ in range(take):
                candidate = [*taken, (number, left[number][0])]
                if len(first_fit(candidate)) > num_rows:
                    break
                taken.append((number, left[number].pop(0)))
            started = at[number] < len(batches[number])
            if started and not left[number]:
                ends[number] = True
                at[number] += 1
        if not taken:
            continue
        yield first_fit(taken), ends
        for number in np.flatnonzero(ends).tolist():
            if at[number] < len(batches[number]):
                left[number] = list(batches[number][at[number]])


class Together:
    """All adapters in the engine, with one plan."""

    def __init__(self, plan, mesh, dtype):
        model, weights, members, params, _ = setting(dtype)
        self.stack = Stack(members=members)
        self.spec = StepSpec(
            model=model,
            plan=plan,
            mesh=plan_cases.mesh_of(mesh),
            adapters=self.stack.specs,
            stack=self.stack,
        )
        self.optimizer = many_optimizers.ManyAdamW(
            configs=[one.optimizer for one in ADAPTERS],
            schedules=[optimizer_of(one)[1] for one in ADAPTERS],
            owners=self.stack.owners(),
        )
        self.step = steps.build_train(self.spec, self.optimizer)
        self.weights = plan_cases.engine_weights(
            model, plan, self.spec.mesh, weights, dtype=dtype
        )
        self.arenas = elastic_steps.init_arenas(
            self.spec, self.weights, max_length=TOKENS
        )
        self.dtype = dtype
        self.state = self.place(self.fresh(params))

    def fresh(self, params):
        joined = jax.device_get(self.stack.join(params))
        zeros = [jax.tree.map(np.zeros_like, joined) for _ in range(3)]
        num = len(params)
        none = np.zeros(num, self.dtype)
        return states.ManyState(
            joined, *zeros, none, none, np.zeros(num, np.int32), np.int32(0)
        )

    def place(self, state):
        return jax.device_put(state, steps.state_shardings(self.spec))

    def run(self, rows, ends):
        batch = lay(rows, self.spec.plan.rows)
        placed = elastic_steps.put(
            elastic_steps.cut(batch, self.spec.plan), self.spec.mesh
        )
        self.state, metrics, self.arenas = self.step(
            self.state, self.weights, placed, self.arenas, ends
        )
        return jax.device_get(metrics)

    def adapters(self):
        return self.stack.split(jax.device_get(self.state.adapters))


def plan(mesh_sizes, segments, **settings):
    return plans.Plan(
        mesh_sizes=mesh_sizes,
        segments=tuple(plans.SegmentPlan(**segment) for segment in segments),
        weight_dtype="float64",
        **settings,
    )
