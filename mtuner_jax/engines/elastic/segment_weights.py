"""A segment of layers: its plan, its weights, and where its layers lie in the arena.

A layer's weights are raised from what is held to whole here, for the forward and for
the backward pass. The loops that do so layer by layer are in `passes`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtuner_jax.ops import arenas, elastic, ordering
from mtuner_jax.planning.costs.arena_layouts import ArenaLayout
from mtuner_jax.planning.plans import Saved, SegmentPlan
from mtuner_jax.protocols.states import Params

# The part of {module: {leaf: array}} that is split over devices.
Blocks = Params


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


class Backwards(NamedTuple):
    """What the backward loops carry.

    Attributes:
      dx_BTD: Gradient to the output of the layer at hand.
      arena: The arena.
      grads: Sums of adapter gradients, [L, ...] like the adapters.
    """

    dx_BTD: jax.Array
    arena: jax.Array
    grads: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment's plan, weights and place in the arena.

    Attributes:
      plan: The treatment.
      start: Index of its first layer in the model.
      first: Index of its first layer in the arena.
      table: Rows of the table of weights, {module: {leaf: `layouts.FrozenArray`}}.
      shards: Stacks of this device's share, {module: {leaf: [layers, ...]}}.
      arena: The arena's layout.
      axes: Data axes of the mesh, slowest link first.
      dtype: What layers compute in.
    """

    plan: SegmentPlan
    start: int
    first: int
    table: Params
    shards: Params
    arena: ArenaLayout
    axes: tuple[str, ...]
    dtype: np.dtype

    @property
    def last(self) -> int:
        """Index of the last layer within the segment."""
        return self.plan.num_layers - 1

    @property
    def indices(self) -> jax.Array:
        """Indices of all layers within the segment, int32."""
        return jnp.arange(self.plan.num_layers, dtype=jnp.int32)

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

    def ready_forward(
        self, index: jax.Array | int, state: Forwards
    ) -> tuple[Layer, Forwards]:
        """Raises layer `index` to whole for its forward pass.

        Starts from the copy of the last backward pass, if there is one, else from what
        is held at rest. Nothing is gathered before `state.x_BTD` is there.
        """
        resting = self._resting(index)
        blocks, held = self._split(resting), self.plan.rest_axes
        if self.keeps_backward:
            held = self.plan.bwd_keep_axes
            blocks, arena = self._take_copy(blocks, index, state.arena)
            state = state._replace(arena=arena)
        if held < len(self.axes):
            # Loops of one trip are unrolled; without it XLA gathers early there.
            blocks, x_BTD = ordering.after(blocks, state.x_BTD)
            state = state._replace(x_BTD=x_BTD)
        whole, kept = self._raise(blocks, held, self.plan.fwd_keep_axes)
        kept = kept if self.keeps_forward else {}
        return Layer(self._usable(resting, whole), kept), state

    def ready_backward(
        self, index: jax.Array | int, kept: Blocks, state: Backwards
    ) -> tuple[Params, Backwards]:
        """Raises layer `index` to whole for its backward pass.

        The copy for the next forward pass, if the plan keeps one, goes to the arena.
        Nothing is gathered before `state.dx_BTD` is there.

        Args:
          index: The layer, within the segment.
          kept: What the forward pass kept of all layers, stacked, or nothing.
          state: The state before the layer's backward pass.
        """
        # A layer outside of a loop would else be cut out of its stack long before.
        later, dx_BTD = ordering.after(jnp.asarray(index), state.dx_BTD)
        resting = self._resting(later)
        blocks, held = self._split(resting), self.plan.rest_axes
        if self.keeps_forward:
            held = self.plan.fwd_keep_axes
            blocks = jax.tree.map(lambda stack: at(stack, later), kept)
        if held < len(self.axes):
            # Loops of one trip are unrolled. Without it XLA then merges this gather
            # with the forward's, or gathers early, and so keeps whole weights.
            blocks, dx_BTD = ordering.after(blocks, dx_BTD)
        whole, copy = self._raise(blocks, held, self.plan.bwd_keep_axes)
        state = state._replace(dx_BTD=dx_BTD)
        if self.keeps_backward:
            state = state._replace(arena=self._put_copy(copy, index, state.arena))
        return self._usable(resting, whole), state

    def ready_once(self, index: jax.Array | int) -> Params:
        """Raises layer `index` to whole from what is held at rest; nothing is kept."""
        resting = self._resting(index)
        held = self.plan.rest_axes
        whole, _ = self._raise(self._split(resting), held, len(self.axes))
        return self._usable(resting, whole)

    def fill(self, arena: jax.Array) -> jax.Array:
        """Gathers the copies of all layers into the arena."""
        rest, keep = self.plan.rest_axes, self.plan.bwd_keep_axes

        def body(arena: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            copy = jax.tree.map(
                lambda block: elastic.change(
                    block, axes=self.axes, held=rest, want=keep
                ),
                self._split(self._resting(index)),
            )
            return self._put_copy(copy, index, arena), None

        return jax.lax.scan(body, arena, self.indices)[0]

    def _resting(self, index: jax.Array | int) -> Params:
        """Layer `index`'s weights as they are held at rest."""
        return jax.tree.map(lambda stack: at(stack, index), self.shards)

    def _split(self, weights: Params) -> Blocks:
        """The split ones of a layer's weights."""
        return {
            module: {
                leaf: array
                for leaf, array in leaves.items()
                if self.table[module][leaf].is_split
            }
            for module, leaves in weights.items()
        }

    def _usable(self, resting: Params, whole: Blocks) -> Params:
        """A layer's weights for products: whole, without padding, converted."""
        weights = {
            module: {**leaves, **whole[module]} for module, leaves in resting.items()
        }
        return jax.tree.map(
            lambda row, array: row.usable(array, self.dtype), self.table, weights
        )

    def _raise(self, blocks: Blocks, held: int, stop: int) -> tuple[Blocks, Blocks]:
        """(whole weights, their parts held over `stop` axes); see `elastic.through`."""
        leaves, tree = jax.tree.flatten(blocks)
        raised = [
            elastic.through(block, axes=self.axes, held=held, stop=stop)
            for block in leaves
        ]
        whole = tree.unflatten([block.whole for block in raised])
        return whole, tree.unflatten([block.part for block in raised])

    def _take_copy(
        self, blocks: Blocks, index: jax.Array | int, arena: jax.Array
    ) -> tuple[Blocks, jax.Array]:
        """Layer `index`'s copy, instead of its `blocks` at rest, and the arena."""
        factor = 1
        for axis in self.axes[self.plan.rest_axes : self.plan.bwd_keep_axes]:
            factor *= jax.lax.axis_size(axis)
        leaves, tree = jax.tree.flatten(blocks)
        shapes = [(leaf.shape[0] * factor, *leaf.shape[1:]) for leaf in leaves]
        copy, arena = arenas.take(arena, self.row("copy", index), shapes)
        return tree.unflatten(copy), arena

    def _put_copy(
        self, copy: Blocks, index: jax.Array | int, arena: jax.Array
    ) -> jax.Array:
        """Writes layer `index`'s copy, in the dtype that products take it in."""
        values = [block.astype(self.dtype) for block in jax.tree.leaves(copy)]
        return arenas.write(arena, self.row("copy", index), values)


def at(stack: jax.Array, index: jax.Array | int) -> jax.Array:
    """Entry `index` of a stack, [n, ...] -> [...]."""
    return jax.lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)
