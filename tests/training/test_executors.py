"""A run goes on with a smaller plan where memory does not suffice, or says why not."""

import itertools
import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.checkpoints import metas, store
from mtuner_jax.configs import RunConfig
from mtuner_jax.engines.elastic.engine import ElasticEngine
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.planning import plans
from mtuner_jax.protocols.states import TrainState
from mtuner_jax.training import executors, loops
from tests import comparing
from tests.engines.elastic import plan_cases

LARGE = plans.static(
    name="replicated",
    num_layers=3,
    mesh_sizes=(4,),
    rows=(4, 1),
    weight_dtype="float64",
)
SMALL = plans.static(
    name="fsdp",
    num_layers=3,
    mesh_sizes=(4,),
    rows=(2, 2),
    adapters=plans.AdapterState.SHARDED,
    weight_dtype="float64",
)
META = metas.RunMeta(base_model="", data="", lora="", seed=0, rng="")


class OutOfMemoryEngine(ElasticEngine):
    """Fails as XLA does: after it has taken the donated state and arenas."""

    def train(self, state, rows):
        for leaf in jax.tree.leaves((state, self.arenas)):
            leaf.delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


class RecompilingEngine(ElasticEngine):
    """Compiles its step again after the first one, as a guided step does."""

    def train(self, state, rows):
        state, metrics = super().train(state, rows)
        if not hasattr(self, "recompiled"):
            self.recompiled = True
            self.step.compiled = None
            self.step.compile(state, self.weights, self.put(rows), self.arenas)
        return state, metrics


def make_engine(plan, kind=ElasticEngine):
    """A loaded engine of the small model on four devices."""
    dtype = np.dtype("float64")
    model, specs, weights, _, _ = plan_cases.setting("gqa", dtype)
    mesh = plan_cases.mesh_of("4")
    engine = kind(
        spec=StepSpec(model=model, plan=plan, mesh=mesh, adapters=specs),
        optimizer=plan_cases.OPTIMIZER,
        max_length=plan_cases.TOKENS,
        load_weights=lambda: plan_cases.engine_weights(
            model, plan, mesh, weights, dtype=dtype
        ),
    )
    engine.load()
    return engine


def compiled_bytes(plan):
    """What a plan's step takes once it has run."""
    executor = executors.Executor(make_engine(plan), budget_bytes=0, replan=None)
    run(executor)
    return executor.engine.compiled_bytes()


def fresh_state(engine):
    """The small model's adapters before the first step, and the batches of a run."""
    _, _, _, params, batches = plan_cases.setting("gqa", np.dtype("float64"))
    state = TrainState(params, jax.jit(engine.optimizer.init)(params), jnp.int32(0))
    placed = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state())
    return jax.device_put(jax.device_get(state), placed), batches


def run(executor):
    """Losses of all steps, and the adapters after them."""
    state, batches = fresh_state(executor.engine)
    losses = []
    for rows in batches:
        state, metrics = executor.train(state, rows)
        losses.append(np.asarray(metrics.loss))
    return losses, executor.engine.export(state)


def plain_results():
    """(loss, gradient norm, adapters) of each step of the plain unsharded program."""
    dtype = np.dtype("float64")
    return plan_cases.plain_run("gqa", 0.0, dtype, dtype)


def plain():
    """The same of the plain unsharded program."""
    results = plain_results()
    return [np.asarray(loss) for loss, _, _ in results], results[-1][2]


class Replans:
    """Hands out the engines of smaller plans as `executors.Replan`, then none."""

    def __init__(self, *engines, frees=True):
        self.asked = []
        self._engines, self._frees = list(engines), frees

    def __call__(self, missing_bytes, free):
        self.asked.append(missing_bytes)
        if self._frees:
            free()
        if not self._engines:
            raise executors.NoSmallerPlanError("nothing is smaller; buy memory")
        return self._engines.pop(0)


@pytest.mark.usefixtures("x64")
def test_run_survives_an_allocation_that_fails():
    replans = Replans(make_engine(SMALL))
    executor = executors.Executor(
        make_engine(LARGE, OutOfMemoryEngine), budget_bytes=10**9, replan=replans
    )
    comparing.assert_trees_close(run(executor), plain())
    assert replans.asked == [50_000_000]
    assert executor.engine.spec.plan == SMALL


@pytest.mark.usefixtures("x64")
def test_program_that_exceeds_the_budget_is_replaced_after_the_step():
    large, small = make_engine(LARGE), make_engine(SMALL)
    budget = (compiled_bytes(LARGE) + compiled_bytes(SMALL)) // 2
    replans = Replans(small)
    executor = executors.Executor(large, budget_bytes=budget, replan=replans)
    comparing.assert_trees_close(run(executor), plain())
    assert len(replans.asked) == 1 and replans.asked[0] > 0
    assert executor.engine is small and large.weights is None


@pytest.mark.parametrize("frees", [False, True])
@pytest.mark.usefixtures("x64")
def test_program_over_the_budget_goes_on_where_nothing_is_smaller(frees, caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    engine, replans = make_engine(LARGE, RecompilingEngine), Replans(frees=frees)
    budget = compiled_bytes(LARGE) - 1
    executor = executors.Executor(engine, budget_bytes=budget, replan=replans)
    comparing.assert_trees_close(run(executor), plain())
    assert replans.asked == [1]
    assert executor.engine is engine
    (record,) = caplog.records
    assert f"1 more than the budget of {budget:,}: it may run" in record.message
    assert "nothing is smaller" in record.message


@pytest.mark.usefixtures("x64")
def test_allocation_that_fails_where_nothing_is_smaller_is_told_with_the_state():
    engine = make_engine(LARGE, OutOfMemoryEngine)
    executor = executors.Executor(
        engine,
        budget_bytes=10**9,
        replan=Replans(make_engine(SMALL, OutOfMemoryEngine)),
    )
    with pytest.raises(
        executors.OutOfMemoryError,
        match=r"out of memory in step 1: the plan runs 2 rows of 8 tokens on a device "
        r"at once, the budget is 1,000,000,000; nothing is smaller; buy memory$",
    ) as failed:
        run(executor)
    want, _ = fresh_state(engine)
    jax.tree.map(np.testing.assert_array_equal, failed.value.state, want)


@pytest.mark.usefixtures("x64")
def test_plan_of_the_users_own_is_not_changed():
    engine = make_engine(LARGE, OutOfMemoryEngine)
    executor = executors.Executor(engine, budget_bytes=10**9, replan=None)
    with pytest.raises(
        executors.OutOfMemoryError,
        match=r"step 1: the plan runs 4 rows of 8 tokens .* the budget is "
        r"1,000,000,000; use --plan auto .* gradient_checkpointing=true",
    ) as failed:
        run(executor)
    assert isinstance(failed.value.__cause__, jax.errors.JaxRuntimeError)
    assert failed.value.state is None


@pytest.mark.usefixtures("x64")
def test_what_was_compiled_is_told_when_memory_runs_out_later():
    executor = executors.Executor(make_engine(LARGE), budget_bytes=0, replan=None)
    run(executor)
    step, compiled = executor.engine.step, executor.engine.program
    step.compiled = fails(compiled, "RESOURCE_EXHAUSTED: Out of memory")
    match = r"in step 4: .* its compiled step takes [\d,]{6,} bytes per device; use"
    with pytest.raises(executors.OutOfMemoryError, match=match):
        run(executor)
    step.compiled = fails(compiled, "INTERNAL: a kernel")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a kernel"):
        run(executor)


def fails(compiled, text):
    """The compiled step, but that it does not run."""

    class Failing:
        memory_analysis = compiled.memory_analysis

        def __call__(self, *args):
            raise jax.errors.JaxRuntimeError(text)

    return Failing()


@pytest.mark.usefixtures("x64")
def test_program_over_the_budget_that_may_not_be_replaced_is_told(caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    executor = executors.Executor(make_engine(LARGE), budget_bytes=1234, replan=None)
    run(executor)
    (record,) = caplog.records
    assert "takes" in record.message and "budget of 1,234:" in record.message
    assert executor.refusal is None


class Rows:
    """Data of the small model, again and again."""

    epoch = 0.0

    def __init__(self, batches):
        self.taken = 0
        self._batches = itertools.cycle(batches)

    def __next__(self):
        self.taken += 1
        return next(self._batches)

    def get_state(self):
        return {"taken": self.taken}


class Steps(list):
    """A reporter that keeps the numbers of steps."""

    def step(self, record):
        self.append(record.step)


def train_in_loop(executor, folder, evaluates=False):
    """Three steps in the training loop, with a store below the folder.

    The run has to end early, with one step reported.
    """
    state, batches = fresh_state(executor.engine)
    data = types.SimpleNamespace(
        train=Rows(batches), eval=batches[:1] if evaluates else None
    )
    reported = Steps()
    with store.Store(folder, save_total_limit=1) as checkpoints:
        keeper = loops.Keeper(
            checkpoints=checkpoints, meta=META, write_adapter=lambda *_: None
        )
        loop = loops.Loop(
            config=RunConfig(eval_steps=1),
            executor=executor,
            data=data,
            keeper=keeper,
            learning_rate=lambda step: 0.1,
        )
        try:
            loop.run(state, reported, total_steps=3)
        finally:
            assert reported == [1]


def restored(engine, path):
    """What a checkpoint gives back."""
    abstract = store.abstract_like(fresh_state(engine)[0])  # in float64
    with store.Store(path.parent, save_total_limit=1) as checkpoints:
        return checkpoints.restore(path, abstract, meta=META)


@pytest.mark.usefixtures("x64")
def test_strict_plan_ends_a_run_after_a_good_step_and_saves_it(tmp_path):
    executor = executors.Executor(
        make_engine(LARGE), budget_bytes=1000, replan=None, strict=True
    )
    match = r"strict_plan: .* bytes per device, [\d,]+ more than the budget; raise"
    with pytest.raises(executors.OverBudgetError, match=match) as refused:
        train_in_loop(executor, tmp_path)
    assert refused.value.missing_bytes > 0
    found = restored(executor.engine, tmp_path / "1")
    assert (found.step, found.data) == (1, {"taken": 1})
    want = plain_results()[0][2]
    comparing.assert_trees_close(jax.device_get(found.state.adapters), want)


class RecompilingThenOutOfMemoryEngine(RecompilingEngine):
    """Its second program does not run."""

    def train(self, state, rows):
        if hasattr(self, "recompiled"):
            return OutOfMemoryEngine.train(self, state, rows)
        return super().train(state, rows)


@pytest.mark.usefixtures("x64")
def test_run_that_finds_no_memory_saves_the_state_of_before_the_step(tmp_path):
    executor = executors.Executor(
        make_engine(LARGE, RecompilingThenOutOfMemoryEngine),
        budget_bytes=10**9,
        replan=Replans(),
    )
    with pytest.raises(executors.OutOfMemoryError, match="out of memory in step 2"):
        train_in_loop(executor, tmp_path)
    found = restored(executor.engine, tmp_path / "1")
    assert (found.step, found.data) == (1, {"taken": 1})
    want = plain_results()[0][2]
    comparing.assert_trees_close(jax.device_get(found.state.adapters), want)


class NoEvaluationEngine(ElasticEngine):
    """Trains, but finds no memory to evaluate."""

    def evaluate(self, state, rows):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.mark.usefixtures("x64")
def test_evaluation_that_finds_no_memory_ends_the_run_with_its_state_saved(tmp_path):
    executor = executors.Executor(
        make_engine(LARGE, NoEvaluationEngine), budget_bytes=10**9, replan=Replans()
    )
    match = "out of memory in the evaluation after step 1: .* lower memory_budget"
    with pytest.raises(executors.OutOfMemoryError, match=match):
        train_in_loop(executor, tmp_path, evaluates=True)
    found = restored(executor.engine, tmp_path / "1")
    assert (found.step, found.data) == (1, {"taken": 1})
    want = plain_results()[0][2]
    comparing.assert_trees_close(jax.device_get(found.state.adapters), want)
