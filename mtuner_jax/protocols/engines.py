"""What executors, loops and checkpoints know of an engine: a way to train a model.

An engine owns what a plan holds on the devices (frozen weights, arenas, buffers on
their way) and the programs that use it. Only its state leaves it: a pytree of its own
with the scalar `step`, optimizer steps done. That is adapters and their moments, a
stack of many adapters, or all weights of a model on the host.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from mtuner_jax.ops.cross_entropy.operands import TokenLoss
from mtuner_jax.protocols.states import Batch, Params, StepMetrics

State = Any


class Engine(Protocol):
    """Trains with one plan."""

    @property
    def program(self) -> object | None:
        """What trains now: another object once it was compiled anew, None before."""
        ...

    @property
    def devices(self) -> Sequence[jax.Device]:
        """Those of this process."""
        ...

    @property
    def device_rows(self) -> int:
        """Rows of a batch that a device runs at once."""
        ...

    def load(self) -> None:
        """Brings to the devices what the plan holds there, unless it is there."""
        ...

    def release(self) -> None:
        """Frees what `load` brought; the engine can be loaded again."""
        ...

    def init(self) -> State:
        """A fresh state, placed as the plan says."""
        ...

    def abstract_state(self) -> State:
        """The state as `jax.ShapeDtypeStruct` with shardings."""
        ...

    def train(self, state: State, rows: Batch) -> tuple[State, StepMetrics]:
        """One optimizer step on a global batch [B, T]; `state` is donated."""
        ...

    def evaluate(self, state: State, rows: Batch) -> TokenLoss:
        """Sums over a batch [B, T], on their way."""
        ...

    def export(self, state: State) -> Params:
        """What the run is for, such as the adapters, copied to the host."""
        ...

    def compiled_bytes(self) -> int:
        """Bytes that training takes on a device, as compiled; compiles if needed."""
        ...
