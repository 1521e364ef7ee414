"""A segment of layers: its plan, its weights, and where its layers lie in the arena.

A layer's weights are raised from what is held to whole here, for the forward and for
the backward pass. The loops that do so layer by layer are in `passes`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.devices import shardings
from mtuner_jax.ops import arenas, elastic
from mtuner_jax.planning.costs.arena_layouts import ArenaLayout
from mtuner_jax.planning.plans import Saved, SegmentPlan
from mtuner_jax.protocols.states import Params

# The weights of one layer that are split over devices, in a fixed order.
Blocks = list[jax.Array]


class Layer(NamedTuple):
    """A layer that is ready to run: its whole weights.

    Attributes:
      weights: {module: {leaf: array}}.
      kept: The split weights as far as they were gathered at the segment's keep ratio,
        or nothing.
    """

    weights: Params
    kept: Blocks


class Forwards(NamedTuple):
    """What the forward loops carry.

    Attributes:
      x_BTD: Input of the layer at hand.
      arena: The arena.
    """

    x_BTD: jax.Array
    arena: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment's plan, weights and place in the arena.

    Attributes:
      plan: The treatment.
      start: Index of its first layer in the model.
      first: Index of its first layer in the arena.
      shards: Stacks of this device's share, {module: {leaf: [layers, ...]}}.
      arena: The arena's layout.
      axes: All mesh axes, slowest link first.
    """

    plan: SegmentPlan
    start: int
    first: int
    shards: Params
    arena: ArenaLayout
    axes: tuple[str, ...]

    @property
    def last(self) -> int:
        """Index of the last layer within the segment."""
        return self.plan.num_layers - 1

    @property
    def keeps_forward(self) -> bool:
        """Whether a copy goes from forward to backward."""
        return self.plan.fwd_keep_axes > self.plan.rest_axes

    @property
    def keeps_backward(self) -> bool:
        """Whether a copy goes from backward to the next forward."""
        return self.plan.bwd_keep_axes > self.plan.rest_axes

    @property
    def on_host(self) -> bool:
        """Whether layer inputs wait in pinned host memory."""
        return self.plan.saved is Saved.LAYER_INPUT_ON_HOST

    def row(self, kind: str, index: jax.Array | int) -> jax.Array:
        """First arena row of layer `index`'s "input" or "copy"."""
        starts = getattr(self.arena, f"{kind}_starts")
        return at(jnp.asarray(starts, jnp.int32), self.first + index)

    def held(self, index: jax.Array | int) -> tuple[Blocks, Params]:
        """Layer `index`'s split weights at rest, and its other ones."""
        blocks: Blocks = []
        others: Params = {}
        for module, leaves in self.shards.items():
            for leaf, stack in leaves.items():
                if shardings.is_sharded(leaf):
                    blocks.append(at(stack, index))
                else:
                    others.setdefault(module, {})[leaf] = at(stack, index)
        return blocks, others

    def assemble(self, blocks: Blocks, others: Params) -> Params:
        """Split and other weights, back in one tree."""
        left = iter(blocks)
        return {
            module: {
                leaf: next(left) if shardings.is_sharded(leaf) else others[module][leaf]
                for leaf in leaves
            }
            for module, leaves in self.shards.items()
        }

    def block_shapes(self, held: int) -> list[tuple[int, ...]]:
        """Shapes of a layer's split weights when held over `held` axes."""
        factor = 1
        for axis in self.axes[self.plan.rest_axes : held]:
            factor *= jax.lax.axis_size(axis)
        return [
            (stack.shape[1] * factor, *stack.shape[2:])
            for leaves in self.shards.values()
            for leaf, stack in leaves.items()
            if shardings.is_sharded(leaf)
        ]

    def ready_forward(
        self, index: jax.Array | int, state: Forwards
    ) -> tuple[Layer, Forwards]:
        """Raises layer `index` to whole for its forward pass.

        Starts from the copy of the last backward pass, if there is one, else from what
        is held at rest. Nothing is gathered before `state.x_BTD` is there.
        """
        blocks, others = self.held(index)
        held = self.plan.rest_axes
        if self.keeps_backward:
            held = self.plan.bwd_keep_axes
            shapes = self.block_shapes(held)
            blocks, arena = arenas.take(state.arena, self.row("copy", index), shapes)
            state = state._replace(arena=arena)
        if held < len(self.axes):
            # Loops of one trip are unrolled; without it XLA gathers early there.
            tied: Any = jax.lax.optimization_barrier((blocks, state.x_BTD))
            blocks = tied[0]
            state = state._replace(x_BTD=tied[1])
        full, kept = self.through(blocks, held, self.plan.fwd_keep_axes)
        kept = kept if self.keeps_forward else []
        return Layer(self.assemble(full, others), kept), state

    def ready_backward(
        self, index: jax.Array | int, kept: Blocks, dx_BTD: jax.Array
    ) -> tuple[Params, Blocks, jax.Array]:
        """Raises layer `index` to whole for its backward pass.

        Args:
          index: The layer, within the segment.
          kept: What its forward pass kept of all layers, stacked, or nothing.
          dx_BTD: The gradient at hand; nothing is gathered before it is there.

        Returns:
          (whole weights, the copy for the next forward pass or nothing, dx_BTD).
        """
        # A layer outside of a loop would else be cut out of its stack long before.
        later: Any = jax.lax.optimization_barrier((jnp.asarray(index), dx_BTD))
        index, dx_BTD = later
        blocks, others = self.held(index)
        held = self.plan.rest_axes
        if self.keeps_forward:
            held = self.plan.fwd_keep_axes
            blocks = list[jax.Array](at(stack, index) for stack in kept)
        if held < len(self.axes):
            # Loops of one trip are unrolled. Without it XLA then merges this gather
            # with the forward's, or gathers early, and so keeps whole weights.
            tied: Any = jax.lax.optimization_barrier((blocks, dx_BTD))
            blocks, dx_BTD = tied
        full, copy = self.through(blocks, held, self.plan.bwd_keep_axes)
        copy = copy if self.keeps_backward else []
        return self.assemble(full, others), copy, dx_BTD

    def through(self, blocks: Blocks, held: int, stop: int) -> tuple[Blocks, Blocks]:
        """(whole weights, their parts held over `stop` axes); see `elastic.through`."""
        pairs = [
            elastic.through(block, axes=self.axes, held=held, stop=stop)
            for block in blocks
        ]
        return [full for full, _ in pairs], [part for _, part in pairs]


def fill(segment: Segment, arena: jax.Array) -> jax.Array:
    """Gathers the copies of a segment's layers into the arena."""
    rest, keep = segment.plan.rest_axes, segment.plan.bwd_keep_axes

    def body(arena, index):
        blocks, _ = segment.held(index)
        copy = [
            elastic.change(block, axes=segment.axes, held=rest, want=keep)
            for block in blocks
        ]
        return arenas.write(arena, segment.row("copy", index), copy), None

    indices = jnp.arange(segment.plan.num_layers, dtype=jnp.int32)
    return jax.lax.scan(body, arena, indices)[0]


def at(stack: jax.Array, index: jax.Array | int) -> jax.Array:
    """Entry `index` of a stack, [n, ...] -> [...]."""
    return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
