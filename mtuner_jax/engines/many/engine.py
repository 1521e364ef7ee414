"""The engine of many adapters: the elastic engine with another step and state."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from mtuner_jax.engines import profile_guided
from mtuner_jax.engines.elastic import engine as elastic
from mtuner_jax.engines.elastic.engine import ElasticEngine
from mtuner_jax.engines.many import steps
from mtuner_jax.engines.many.optimizers import ManyAdamW
from mtuner_jax.engines.many.states import ManyMetrics
from mtuner_jax.protocols.engines import State
from mtuner_jax.protocols.states import Batch, Params


class ManyRows(NamedTuple):
    """What an engine step runs.

    Attributes:
      batch: Rows of several adapters, [B, T], with `adapter_ids`.
      ends: Whose global batch ends with this step, bool [A].
    """

    batch: Batch
    ends: np.ndarray


@dataclasses.dataclass(kw_only=True, eq=False)
class ManyEngine(ElasticEngine):
    """Trains the adapters of `spec.stack`, each at its own pace.

    Attributes:
      many: Their optimizers; `optimizer` is not used.
    """

    many: ManyAdamW

    @functools.cached_property
    def step(self) -> profile_guided.GuidedStep:
        """(state, weights, batch, arenas, ends) -> (state, ManyMetrics, arenas)."""
        return self.guided(steps.build_train(self.spec, self.many))

    def arguments(self) -> tuple[Any, ...]:
        """The training step's inputs, without allocating any."""
        found = elastic.arguments_with(
            self.abstract_state(), self.spec, max_length=self.max_length
        )
        return (*found, jax.ShapeDtypeStruct((len(self._members),), np.bool_))

    def init(self) -> State:
        """Fresh adapters and moments."""
        return steps.init_state(self.spec)

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state."""
        return steps.abstract_state(self.spec)

    def train(self, state: State, rows: Any) -> tuple[State, ManyMetrics]:
        """One engine step on `ManyRows`; `state` is donated."""
        state, metrics, self.arenas = self.step(
            state, self.weights, self.put(rows.batch), self.arenas, rows.ends
        )
        return state, metrics

    def export(self, state: State) -> Params:
        """{adapter: what `ElasticEngine.export` gives of it}."""
        assert self.spec.stack is not None
        params = self.spec.stack.split(jax.device_get(state.adapters))
        return {one.name: p for one, p in zip(self._members, params, strict=True)}

    @property
    def _members(self) -> tuple[Any, ...]:
        assert self.spec.stack is not None
        return self.spec.stack.members
