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
from mtuner_jax.engines import profile_guided
from mtuner_jax.engines.elastic import steps
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


class OutOfMemoryStep(profile_guided.GuidedStep):
    """Fails as XLA does: after it has taken the donated state and arenas."""

    def __call__(self, state, *args):
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def make_setup(plan, step_class=profile_guided.GuidedStep):
    """A setup of the small model on four devices."""
    model, specs, weights, _, _ = plan_cases.setting("gqa", np.dtype("float64"))
    mesh = plan_cases.mesh_of("4")
    spec = steps.StepSpec(model=model, plan=plan, mesh=mesh, adapters=specs)
    sharded = plan_cases.engine_weights(
        model, plan, mesh, weights, dtype=np.dtype("float64")
    )
    programs = executors.Programs(
        spec=spec,
        train=step_class(
            steps.build_train(spec, plan_cases.OPTIMIZER),
            compiler_options={},
            profile_directory=None,
        ),
        evaluate=steps.build_eval(spec),
        state_shardings=steps.state_shardings(spec, plan_cases.OPTIMIZER),
        learning_rate=lambda step: 0.1,
    )
    arenas = steps.init_arenas(spec, sharded, max_length=plan_cases.TOKENS)
    return executors.Setup(programs=programs, weights=sharded, arenas=arenas)


def run(executor):
    """Losses of all steps, and the adapters after them."""
    _, _, _, params, batches = plan_cases.setting("gqa", np.dtype("float64"))
    optimizer = plan_cases.OPTIMIZER
    state = TrainState(params, jax.jit(optimizer.init)(params), jnp.int32(0))
    state = jax.device_put(jax.device_get(state), executor.programs.state_shardings)
    losses = []
    for rows in batches:
        state, metrics = executor.train(state, rows)
        losses.append(np.asarray(metrics.loss))
    return losses, jax.device_get(state.adapters)


def plain():
    """The same of the plain unsharded program."""
    results = plan_cases.plain_run("gqa", 0.0, np.dtype("float64"))
    return [np.asarray(loss) for loss, _, _ in results], results[-1][2]


@pytest.mark.usefixtures("x64")
def test_run_survives_an_allocation_that_fails():
    asked = []

    def rebuild(missing_bytes):
        asked.append(missing_bytes)
        return make_setup(SMALL)

    executor = executors.Executor(
        make_setup(LARGE, OutOfMemoryStep), budget_bytes=10**9, rebuild=rebuild
    )
    comparing.assert_trees_close(run(executor), plain())
    assert asked == [50_000_000]
    assert executor.programs.spec.plan == SMALL


@pytest.mark.usefixtures("x64")
def test_program_that_exceeds_the_budget_is_replaced_after_the_step():
    asked = []

    def rebuild(missing_bytes):
        asked.append(missing_bytes)
        setup = make_setup(SMALL)
        executor._budget_bytes = 10**9
        return setup

    executor = executors.Executor(make_setup(LARGE), budget_bytes=1, rebuild=rebuild)
    comparing.assert_trees_close(run(executor), plain())
    assert len(asked) == 1 and asked[0] > 0


@pytest.mark.usefixtures("x64")
def test_plans_are_changed_a_few_times_at_most():
    executor = executors.Executor(
        make_setup(LARGE, OutOfMemoryStep),
        budget_bytes=10**9,
        rebuild=lambda missing_bytes: make_setup(SMALL, OutOfMemoryStep),
    )
    with pytest.raises(
        executors.OutOfMemoryError,
        match=r"out of memory in step 1: the plan runs 2 rows of 8 tokens on a device "
        r"at once, .* the plan was changed 3 times; lower memory_budget, ",
    ):
        run(executor)
    assert executor._replans == executors.MAX_REPLANS


@pytest.mark.usefixtures("x64")
def test_plan_of_the_users_own_is_not_changed():
    setup = make_setup(LARGE, OutOfMemoryStep)
    executor = executors.Executor(setup, budget_bytes=10**9, rebuild=None)
    with pytest.raises(
        executors.OutOfMemoryError,
        match=r"step 1: the plan runs 4 rows of 8 tokens .* the budget is "
        r"1,000,000,000; use --plan auto .* gradient_checkpointing=true",
    ) as failed:
        run(executor)
    assert isinstance(failed.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.usefixtures("x64")
def test_what_was_compiled_is_told_when_memory_runs_out_later():
    executor = executors.Executor(make_setup(LARGE), budget_bytes=0, rebuild=None)
    run(executor)
    step, compiled = executor.programs.train, executor.programs.train.compiled
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


@pytest.mark.parametrize("rebuild", [None, make_setup])
@pytest.mark.usefixtures("x64")
def test_program_over_the_budget_that_may_not_be_replaced_is_told(rebuild, caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    executor = executors.Executor(make_setup(LARGE), budget_bytes=1234, rebuild=rebuild)
    executor._replans = executors.MAX_REPLANS
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


@pytest.mark.usefixtures("x64")
def test_strict_plan_ends_a_run_after_a_good_step_and_saves_it(tmp_path):
    executor = executors.Executor(
        make_setup(LARGE), budget_bytes=1000, rebuild=None, strict=True
    )
    _, _, _, params, batches = plan_cases.setting("gqa", np.dtype("float64"))
    state = TrainState(params, jax.jit(plan_cases.OPTIMIZER.init)(params), jnp.int32(0))
    state = jax.device_put(jax.device_get(state), executor.programs.state_shardings)
    abstract = store.abstract_like(state)
    meta = metas.RunMeta(base_model="", data="", lora="", seed=0, rng="")
    data = types.SimpleNamespace(train=Rows(batches), eval=None)
    reported = Steps()
    match = r"strict_plan: .* bytes per device, [\d,]+ more than the budget; raise"
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        keeper = loops.Keeper(
            checkpoints=checkpoints, meta=meta, write_adapter=lambda *_: None
        )
        loop = loops.Loop(RunConfig(), executor, data=data, keeper=keeper)
        with pytest.raises(executors.OverBudgetError, match=match) as refused:
            loop.run(state, reported, total_steps=3)
    assert refused.value.missing_bytes > 0
    assert reported == [1]
    with store.Store(tmp_path, save_total_limit=1) as checkpoints:
        restored = checkpoints.restore(tmp_path / "1", abstract, meta=meta)
    assert (restored.step, restored.data) == (1, {"taken": 1})
    results = plan_cases.plain_run("gqa", 0.0, np.dtype("float64"))
    comparing.assert_trees_close(jax.device_get(restored.state.adapters), results[0][2])
