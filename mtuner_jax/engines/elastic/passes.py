"""Forward and backward loops over segments of layers, inside `shard_map`.

What a plan calls `rest`, `fwd_keep` and `bwd_keep` happens here: a layer's weights are
raised from what is held to whole before it runs (`segment_weights`), in the forward and
again in the backward loop, and what is kept on the way goes to the backward loop
(stacked) or to the next forward pass (in the arena). The backward loop is written out
with `jax.vjp` of one layer instead of differentiating through the scan, so that what
lives when is decided here and nowhere else.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.engines.elastic import segment_weights
from mtuner_jax.engines.elastic.segment_weights import Blocks, Forwards, Layer, Segment
from mtuner_jax.ops import arenas, dropout, tapes
from mtuner_jax.ops.low_rank.operands import Dropout, LayerAdapters, Lora
from mtuner_jax.planning.plans import SAVED_TENSORS
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is the same for all layers of a part of the batch.

    Attributes:
      model: The decoder.
      axes: All mesh axes, slowest link first.
      context: What `model.context` returned.
      drop: Randomness of the step, or None.
      adapters: {module: {"lora_a": [L, ...], "lora_b": [L, ...]}}, marked as varying
        over the mesh.
      scalings: {module: [L]}.
    """

    model: Decoder
    axes: tuple[str, ...]
    context: Any
    drop: Dropout | None
    adapters: Params
    scalings: dict[str, jax.Array]

    def layer_adapters(self, layer: jax.Array) -> Params:
        """The adapters of one layer."""
        return jax.tree.map(
            lambda stack: segment_weights.at(stack, layer), self.adapters
        )

    def apply(
        self,
        weights: Params,
        adapters: Params,
        x_BTD: jax.Array,
        *,
        layer: jax.Array,
        tape: tapes.Tape,
    ) -> jax.Array:
        """One layer on whole weights, [B, T, D] -> [B, T, D]."""
        loras = {
            module: Lora(
                adapter["lora_a"],
                adapter["lora_b"],
                segment_weights.at(self.scalings[module], layer),
            )
            for module, adapter in adapters.items()
        }
        drop = self.drop
        if drop is not None:
            drop = drop._replace(key=dropout.fold_in(drop.key, layer))
        return self.model.layer(
            weights,
            LayerAdapters(loras, drop),
            x_BTD,
            context=self.context,
            tape=tape,
        )


class Kept(NamedTuple):
    """What a segment's forward loop leaves for its backward loop, stacked by layer.

    Attributes:
      tensors: The tensors that the plan saves, by name.
      blocks: Weights kept by `fwd_keep`.
      inputs: Layer inputs on the host: one stack, or nothing if they are in the arena.
        With `prefetch`, the stack of all layers but the last, if there are any, and
        the last layer's input by itself.
    """

    tensors: Mapping[str, jax.Array]
    blocks: Blocks
    inputs: list[jax.Array]


def forward(
    run: Run, segments: list[Segment], x_BTD: jax.Array, arena: jax.Array
) -> tuple[jax.Array, list[Kept], jax.Array]:
    """Runs the layers of all segments.

    Returns:
      (x after the last layer, what each segment kept, the arena).
    """
    kept: list[Kept] = []
    ready: Layer | None = None
    state = Forwards(x_BTD, arena)
    for number, segment in enumerate(segments):
        following = segments[number + 1] if number + 1 < len(segments) else None
        if segment.plan.prefetch:
            if ready is None:
                ready, state = segment.ready_forward(0, state)
            state, ready, left = _forward_ahead(run, segment, following, (state, ready))
        else:
            state, left = _forward_plain(run, segment, state)
            ready = None
        # The last layer runs outside of the loop. XLA else puts what it leaves into the
        # stacks, or sends it to the host, when the backward pass asks for it.
        tied: Any = jax.lax.optimization_barrier((left, state.x_BTD))
        left, state = tied[0], state._replace(x_BTD=tied[1])
        kept.append(left)
    return state.x_BTD, kept, state.arena


def _forward_plain(run, segment, state):
    """A loop that gathers a layer and runs it."""

    def body(state, index):
        layer, state = segment.ready_forward(index, state)
        return _run_forward(run, segment, layer, (state, index))

    indices = jnp.arange(segment.plan.num_layers, dtype=jnp.int32)
    return jax.lax.scan(body, state, indices)


def _forward_ahead(run, segment, following, state_and_ready):
    """A loop that gathers the next layer before it runs the one at hand.

    The last layer runs outside of it, so that the first layer of the following segment
    can be gathered meanwhile.
    """
    state, layer = state_and_ready

    def run_one(layer, state, index):
        return _run_forward(run, segment, layer, (state, index))

    def body(carry, index):
        state, layer, left = carry
        next_layer, state = segment.ready_forward(index + 1, state)
        state, one = run_one(layer, state, index)
        return (state, next_layer, _put(left, one, index)), one.inputs

    one = jax.eval_shape(run_one, layer, state, jnp.int32(0))[1]
    left, inputs = _room(one, segment.plan.num_layers, run.axes), []
    if segment.last:
        indices = jnp.arange(segment.last, dtype=jnp.int32)
        carry = (state, layer, left)
        (state, layer, left), inputs = jax.lax.scan(body, carry, indices)
    next_layer = None
    if following is not None and following.plan.prefetch:
        next_layer, state = following.ready_forward(0, state)
    last = jnp.int32(segment.last)
    state, one = run_one(layer, state, last)
    left = _put(left, one, last)._replace(inputs=[*inputs, *one.inputs])
    return state, next_layer, left


def _room(one, num_layers, axes):
    """Stacks for what each layer leaves on the device.

    They are carried: unlike a scan's own outputs, they also take, without a copy, what
    a layer outside of the loop leaves.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.pcast(
            jnp.zeros((num_layers, *leaf.shape), leaf.dtype), axes, to="varying"
        ),
        one._replace(inputs=[]),
    )


def _put(stacks, one, index):
    return jax.tree.map(
        lambda stack, leaf: jax.lax.dynamic_update_index_in_dim(stack, leaf, index, 0),
        stacks,
        one._replace(inputs=[]),
    )


def _run_forward(run, segment, layer, state_and_index):
    """Saves a layer's input, runs it and returns (state, what it leaves)."""
    (x_BTD, arena), index = state_and_index
    inputs = []
    if segment.on_host:
        inputs = [jax.device_put(x_BTD, jax.memory.Space.Host)]
    else:
        arena = arenas.write(arena, segment.row("input", index), [x_BTD])
    tape = tapes.Tape(SAVED_TENSORS[segment.plan.saved])
    number = segment.start + index
    x_BTD = run.apply(
        layer.weights, run.layer_adapters(number), x_BTD, layer=number, tape=tape
    )
    return Forwards(x_BTD, arena), Kept(tape.recorded, layer.kept, inputs)


def forward_only(run: Run, segment: Segment, x_BTD: jax.Array) -> jax.Array:
    """A segment for evaluation: gathered from what is held at rest, nothing kept."""

    def body(x_BTD, index):
        blocks, others = segment.held(index)
        full, _ = segment.through(blocks, segment.plan.rest_axes, len(segment.axes))
        number = segment.start + index
        adapters = run.layer_adapters(number)
        weights = segment.assemble(full, others)
        x_BTD = run.apply(weights, adapters, x_BTD, layer=number, tape=tapes.Tape())
        return x_BTD, None

    indices = jnp.arange(segment.plan.num_layers, dtype=jnp.int32)
    return jax.lax.scan(body, x_BTD, indices)[0]


class Ready(NamedTuple):
    """A layer whose backward pass can run.

    Attributes:
      weights: Its whole weights.
      x_BTD: Its input, if that came from the host.
    """

    weights: Params
    x_BTD: jax.Array | None


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


def backward(
    run: Run, segments: list[Segment], kept: list[Kept], state: Backwards
) -> Backwards:
    """Runs the layers of all segments backwards and adds up adapter gradients."""
    ready: Ready | None = None
    for number in reversed(range(len(segments))):
        segment = segments[number]
        left, state = _held_back(kept[number], state)
        if segment.plan.prefetch:
            if ready is None:
                ready, state = _last_ready(segment, left, state)
            before = (segments[number - 1], kept[number - 1]) if number else None
            state, ready = _backward_ahead(run, segment, (left, before), (state, ready))
        else:
            state = _backward_plain(run, segment, left, state)
            ready = None
    return state


def _backward_plain(run, segment, kept, state):
    def body(state, index):
        x_BTD, state = _take_input(segment, _fetched(kept, index), index, state)
        weights, state = _raise(segment, index, kept.blocks, state)
        saved = _saved_of(kept, index)
        return _run_backward(run, segment, (weights, saved, x_BTD, index), state), None

    indices = jnp.arange(segment.plan.num_layers, dtype=jnp.int32)
    return jax.lax.scan(body, state, indices, reverse=True)[0]


def _backward_ahead(run, segment, kept_and_before, state_and_ready):
    """As `_forward_ahead`, from the last layer to the first.

    Inputs on the host are fetched ahead like weights.
    """
    kept, before = kept_and_before
    state, ready = state_and_ready

    def body(carry, index):
        state, ready = carry
        x_BTD, state = _take_input(segment, ready.x_BTD, index, state)
        fetched = _fetched(kept, index - 1)
        weights, state = _raise(segment, index - 1, kept.blocks, state)
        saved = _saved_of(kept, index)
        layer = (ready.weights, saved, x_BTD, index)
        state = _run_backward(run, segment, layer, state)
        return (state, Ready(weights, fetched)), None

    if segment.last:
        indices = jnp.arange(1, segment.plan.num_layers, dtype=jnp.int32)
        (state, ready), _ = jax.lax.scan(body, (state, ready), indices, reverse=True)
        kept, state = _held_back(kept, state)
    first = jnp.int32(0)
    x_BTD, state = _take_input(segment, ready.x_BTD, first, state)
    ahead = None
    if before is not None and before[0].plan.prefetch:
        other, other_kept = before
        ahead, state = _last_ready(other, other_kept, state)
    saved = _saved_of(kept, first)
    layer = (ready.weights, saved, x_BTD, first)
    return _run_backward(run, segment, layer, state), ahead


def _take_input(segment, fetched, index, state):
    """A layer's input; its rows of the arena are free afterwards."""
    if segment.on_host:
        return fetched, state
    shape = state.dx_BTD.shape
    (x_BTD,), arena = arenas.take(state.arena, segment.row("input", index), [shape])
    return x_BTD, state._replace(arena=arena)


def _fetched(kept, index):
    """Layer `index`'s input from the stack on the host, None if it is in the arena."""
    if not kept.inputs:
        return None
    x_BTD = segment_weights.at(kept.inputs[0], index)
    return jax.device_put(x_BTD, jax.memory.Space.Device)


def _held_back(kept, state):
    """Has what a segment kept read only once the gradient at hand is there.

    Without it, XLA cuts layers out of the stacks long before outside of loops, and
    fetches inputs right after they were sent to the host where a loop was unrolled.
    """
    tied: Any = jax.lax.optimization_barrier((kept, state.dx_BTD))
    return tied[0], state._replace(dx_BTD=tied[1])


def _last_ready(segment, kept, state):
    """The last layer of a segment with `prefetch`, and the state after gathering it."""
    kept, state = _held_back(kept, state)
    x_BTD = None
    if kept.inputs:
        x_BTD = jax.device_put(kept.inputs[-1], jax.memory.Space.Device)
    weights, state = _raise(segment, segment.last, kept.blocks, state)
    return Ready(weights, x_BTD), state


def _raise(segment, index, kept, state):
    """Whole weights for a layer's backward pass; its copy goes to the arena."""
    weights, copy, dx_BTD = segment.ready_backward(index, kept, state.dx_BTD)
    state = state._replace(dx_BTD=dx_BTD)
    if copy:
        arena = arenas.write(state.arena, segment.row("copy", index), copy)
        state = state._replace(arena=arena)
    return weights, state


def _saved_of(kept, index):
    return {
        name: segment_weights.at(stack, index) for name, stack in kept.tensors.items()
    }


def _run_backward(run, segment, layer, state):
    """The vjp of one layer; its adapter gradients are added to the sums."""
    weights, saved, x_BTD, index = layer
    number = segment.start + index

    def apply(adapters, x_BTD):
        tape = tapes.Tape(SAVED_TENSORS[segment.plan.saved], saved=saved)
        return run.apply(weights, adapters, x_BTD, layer=number, tape=tape)

    _, pullback = jax.vjp(apply, run.layer_adapters(number), x_BTD)
    # The barrier has the adapters' gradients computed here and not at the end of the
    # step, with all that they need kept alive, where a loop was unrolled.
    d_adapters, dx_BTD = jax.lax.optimization_barrier(pullback(state.dx_BTD))
    grads = jax.tree.map(
        lambda total, part: jax.lax.dynamic_update_index_in_dim(
            total, segment_weights.at(total, number) + part, number, 0
        ),
        state.grads,
        d_adapters,
    )
    return state._replace(dx_BTD=dx_BTD, grads=grads)
