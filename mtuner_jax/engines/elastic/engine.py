"""The elastic engine: a plan's compiled step with the weights and arenas it holds."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mtuner_jax.adapters import lora
from mtuner_jax.engines import compiling, profile_guided
from mtuner_jax.engines.elastic import steps
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.ops.cross_entropy.operands import TokenLoss
from mtuner_jax.protocols.engines import State
from mtuner_jax.protocols.states import Batch, Params, TrainState


class StepArguments(NamedTuple):
    """A step's inputs as `jax.ShapeDtypeStruct` with shardings."""

    state: Any
    weights: Params
    batch: Batch
    arenas: steps.Arenas


@dataclasses.dataclass(kw_only=True, eq=False)
class ElasticEngine:
    """Trains LoRA adapters with one plan (`protocols.engines.Engine`).

    Attributes:
      spec: What its programs are built from.
      optimizer: Of the adapters.
      max_length: Tokens in a row (T).
      load_weights: Reads or makes the frozen weights in their shardings.
      compiler_options: Of the training step, beside those the plan implies.
      profile_directory: Where profiles for guided compilation are kept; None
        switches profiling off.
      weights: The frozen weights; None while they are not loaded.
      arenas: What a step hands on to the next one.
    """

    spec: StepSpec
    optimizer: optax.GradientTransformation
    max_length: int
    load_weights: Callable[[], Params]
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    profile_directory: pathlib.Path | None = None
    weights: Params | None = None
    arenas: steps.Arenas = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def step(self) -> profile_guided.GuidedStep:
        """(state, weights, batch, arenas) -> (state, StepMetrics, arenas)."""
        return self.guided(steps.build_train(self.spec, self.optimizer))

    def guided(self, jitted: Any) -> profile_guided.GuidedStep:
        """A jitted step with this engine's compiler options and profiles."""
        return profile_guided.GuidedStep(
            jitted,
            compiler_options=self._options | self.compiler_options,
            profile_directory=self.profile_directory,
        )

    @property
    def program(self) -> jax.stages.Compiled | None:
        """The compiled training step, once there is one."""
        return self.step.compiled

    @property
    def devices(self) -> Sequence[jax.Device]:
        """Those of this process."""
        return self.spec.mesh.local_devices

    @property
    def device_rows(self) -> int:
        """Rows of a microbatch."""
        return self.spec.plan.microbatch

    def load(self) -> None:
        """Loads the weights and gathers what the arenas keep."""
        if self.weights is None:
            self.weights = self.load_weights()
            self.arenas = steps.init_arenas(
                self.spec, self.weights, max_length=self.max_length
            )

    def release(self) -> None:
        """Frees weights and arenas."""
        self.weights, self.arenas = None, {}

    def init(self) -> State:
        """Fresh adapters and moments."""
        return steps.init_state(self.spec, self.optimizer)

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state."""
        return abstract_state(self.spec, self.optimizer)

    def train(self, state: State, rows: Any) -> tuple[State, Any]:
        """One optimizer step on a global batch [B, T]; `state` is donated."""
        state, metrics, self.arenas = self.step(
            state, self.weights, self.put(rows), self.arenas
        )
        return state, metrics

    def evaluate(self, state: TrainState, rows: Batch) -> TokenLoss:
        """Sums over a batch [B, T], on their way."""
        return self._evaluation(state.adapters, self.weights, self.put(rows))

    def export(self, state: State) -> Params:
        """{module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}} on the host."""
        return jax.device_get(state.adapters)

    def compiled_bytes(self) -> int:
        """XLA's buffer assignment of the training step, per device."""
        return compiling.compiled_bytes(self.program or self.compile()).total

    def compile(self) -> jax.stages.Compiled:
        """Compiles the training step; nothing has to be loaded for it."""
        return self.step.compile(*self.arguments())

    def arguments(self) -> tuple[Any, ...]:
        """The training step's inputs, without allocating any."""
        return abstract_arguments(self.spec, self.optimizer, max_length=self.max_length)

    def on(self, mesh: jax.sharding.Mesh) -> Self:
        """The same engine on other devices, with nothing loaded."""
        spec = dataclasses.replace(self.spec, mesh=mesh)
        return dataclasses.replace(self, spec=spec, weights=None, arenas={})

    def put(self, rows: Batch) -> Batch:
        """A global batch [B, T] on the devices, cut as the plan runs it."""
        return steps.put(steps.cut(rows, self.spec.plan), self.spec.mesh)

    @functools.cached_property
    def _evaluation(self) -> Any:
        return steps.build_eval(self.spec, compiler_options=self._options)

    @property
    def _options(self) -> dict[str, Any]:
        devices = self.spec.mesh.devices
        return compiling.options(
            on_gpu=devices.flat[0].platform != "cpu",
            num_devices=devices.size,
            merge_gathers=self.spec.plan.merge_gathers,
        )


def abstract_state(
    spec: StepSpec, optimizer: optax.GradientTransformation
) -> TrainState:
    """Shapes, dtypes and shardings of what `steps.init_state` returns."""

    def init() -> TrainState:
        adapters = lora.init(spec.adapters, jax.random.key(0))
        return TrainState(adapters, optimizer.init(adapters), jnp.int32(0))

    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        jax.eval_shape(init),
        steps.state_shardings(spec, optimizer),
    )


def abstract_arguments(
    spec: StepSpec, optimizer: optax.GradientTransformation, *, max_length: int
) -> StepArguments:
    """The inputs of `steps.build_train`, without allocating any.

    Args:
      spec: The step.
      optimizer: Its optimizer.
      max_length: Tokens in a row (T).
    """
    return arguments_with(abstract_state(spec, optimizer), spec, max_length=max_length)


def arguments_with(state: Any, spec: StepSpec, *, max_length: int) -> StepArguments:
    """The inputs of a training step of any state, without allocating any."""
    plan, mesh = spec.plan, spec.mesh
    shape = (plan.accumulation, plan.num_devices * plan.microbatch, max_length)
    rows = steps.rows_sharding(mesh)
    batch: Any = {
        name: jax.ShapeDtypeStruct(
            shape, np.float32 if name == "weights" else np.int32, sharding=rows
        )
        for name in Batch._fields
        if name != "adapter_ids" or spec.stack is not None
    }
    return StepArguments(
        state=state,
        weights=jax.tree.map(lambda row: row.abstract(mesh), spec.table),
        batch=Batch(**batch),
        arenas=steps.abstract_arenas(spec, max_length=max_length),
    )
