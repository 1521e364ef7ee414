"""Forward and backward loops over segments of layers, inside `shard_map`.

What a plan calls `rest`, `fwd_keep` and `bwd_keep` happens here: a layer's weights are
raised from what is held to whole before it runs (`segment_weights`), in the forward and
again in the backward loop, and what is kept on the way goes to the backward loop
(stacked) or to the next forward pass (in the arena). The backward loop is written out
with `jax.vjp` of one layer instead of differentiating through the scan, so that what
lives when is decided here and nowhere else.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.engines.elastic import segment_weights
from mtuner_jax.engines.elastic.layer_runs import Kept, LayerRun
from mtuner_jax.engines.elastic.segment_weights import (
    Backwards,
    Forwards,
    Layer,
    Segment,
)
from mtuner_jax.ops import arenas, ordering, tapes
from mtuner_jax.planning.plans import SAVED_TENSORS
from mtuner_jax.protocols.states import Params


class Forwarded(NamedTuple):
    """What the forward loops of all segments leave.

    Attributes:
      x_BTD: Output of the last layer.
      kept: What each segment kept.
      arena: The arena, with layer inputs in it.
    """

    x_BTD: jax.Array
    kept: list[Kept]
    arena: jax.Array


class ForwardAhead(NamedTuple):
    """What a forward loop with `prefetch` carries.

    Attributes:
      state: As without it.
      layer: The layer at hand, whole; after the last layer, the following segment's
        first one if that gathers ahead too.
      stacks: What layers have left on the device.
    """

    state: Forwards
    layer: Layer | None
    stacks: Kept


def forward(
    run: LayerRun, segments: list[Segment], x_BTD: jax.Array, arena: jax.Array
) -> Forwarded:
    """Runs the layers of all segments, [B, T, D] -> [B, T, D]."""
    all_kept: list[Kept] = []
    state, ready = Forwards(x_BTD, arena), None
    for segment, following in itertools.zip_longest(segments, segments[1:]):
        if segment.plan.prefetch:
            if ready is None:
                ready, state = segment.ready_forward(0, state)
            state, ready, kept = _forward_ahead(
                run, segment, state, ready=ready, following=following
            )
        else:
            (state, kept), ready = _forward_plain(run, segment, state), None
        # The last layer runs outside of the loop. XLA else puts what it leaves into the
        # stacks, or sends it to the host, when the backward pass asks for it.
        kept, x_BTD = ordering.after(kept, state.x_BTD)
        state = state._replace(x_BTD=x_BTD)
        all_kept.append(kept)
    return Forwarded(state.x_BTD, all_kept, state.arena)


def _forward_plain(
    run: LayerRun, segment: Segment, state: Forwards
) -> tuple[Forwards, Kept]:
    """A loop that gathers a layer and runs it."""

    def body(state: Forwards, index: jax.Array) -> tuple[Forwards, Kept]:
        layer, state = segment.ready_forward(index, state)
        return _run_forward(run, segment, layer, state, index=index)

    return jax.lax.scan(body, state, segment.indices)


def _forward_ahead(
    run: LayerRun,
    segment: Segment,
    state: Forwards,
    *,
    ready: Layer,
    following: Segment | None,
) -> ForwardAhead:
    """A loop that gathers the next layer before it runs the one at hand.

    The last layer runs outside of it, so that the first layer of the following segment
    can be gathered meanwhile.
    """

    def run_one(
        layer: Layer, state: Forwards, index: jax.Array
    ) -> tuple[Forwards, Kept]:
        return _run_forward(run, segment, layer, state, index=index)

    def body(
        carry: ForwardAhead, index: jax.Array
    ) -> tuple[ForwardAhead, list[jax.Array]]:
        assert carry.layer is not None
        ahead, state = segment.ready_forward(index + 1, carry.state)
        state, one = run_one(carry.layer, state, index)
        return ForwardAhead(state, ahead, carry.stacks.put(one, index)), one.inputs

    one = jax.eval_shape(run_one, ready, state, jnp.int32(0))[1]
    carry = ForwardAhead(state, ready, _room(one, segment, run.axes))
    inputs: list[jax.Array] = []
    if segment.last:
        indices = jnp.arange(segment.last, dtype=jnp.int32)
        carry, inputs = jax.lax.scan(body, carry, indices)
    state, ahead = carry.state, None
    if following is not None and following.plan.prefetch:
        ahead, state = following.ready_forward(0, state)
    last = jnp.int32(segment.last)
    assert carry.layer is not None
    state, one = run_one(carry.layer, state, last)
    kept = carry.stacks.put(one, last)._replace(inputs=[*inputs, *one.inputs])
    return ForwardAhead(state, ahead, kept)


def _room(one: Kept, segment: Segment, axes: tuple[str, ...]) -> Kept:
    """Stacks for what each layer leaves on the device.

    They are carried: XLA would copy a scan's own outputs to append what the layer
    outside of the loop leaves; a carry takes it in place.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.pcast(
            jnp.zeros((segment.plan.num_layers, *leaf.shape), leaf.dtype),
            axes,
            to="varying",
        ),
        one._replace(inputs=[]),
    )


def _run_forward(
    run: LayerRun, segment: Segment, layer: Layer, state: Forwards, *, index: jax.Array
) -> tuple[Forwards, Kept]:
    """Saves a layer's input, runs it and returns (state, what it leaves)."""
    x_BTD, arena, inputs = state.x_BTD, state.arena, []
    if segment.on_host:
        inputs = [jax.device_put(x_BTD, jax.memory.Space.Host)]
    else:
        # Not an output of the scan: XLA allocates those for the whole loop, beside
        # the copies whose rows a layer's input can take over.
        arena = arenas.write(arena, segment.row("input", index), [x_BTD])
    tape = tapes.Tape(SAVED_TENSORS[segment.plan.saved])
    number = segment.start + index
    x_BTD = run.apply(
        layer.weights, run.layer_adapters(number), x_BTD, layer=number, tape=tape
    )
    return Forwards(x_BTD, arena), Kept(tape.recorded, layer.kept, inputs)


def forward_only(run: LayerRun, segment: Segment, x_BTD: jax.Array) -> jax.Array:
    """A segment for evaluation, [B, T, D] -> [B, T, D]; nothing is kept."""

    def body(x_BTD: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        weights = segment.ready_once(index)
        number = segment.start + index
        adapters = run.layer_adapters(number)
        x_BTD = run.apply(weights, adapters, x_BTD, layer=number, tape=tapes.Tape())
        return x_BTD, None

    return jax.lax.scan(body, x_BTD, segment.indices)[0]


class Ready(NamedTuple):
    """A layer whose backward pass can run.

    Attributes:
      weights: Its whole weights.
      x_BTD: Its input, if that came from the host.
    """

    weights: Params
    x_BTD: jax.Array | None


class BackwardAhead(NamedTuple):
    """What a backward loop with `prefetch` carries.

    Attributes:
      state: As without it.
      ready: The layer at hand; after the first layer, the last one of the segment
        before if that gathers ahead too.
    """

    state: Backwards
    ready: Ready | None


def backward(
    run: LayerRun, segments: list[Segment], kept: list[Kept], state: Backwards
) -> Backwards:
    """Runs the layers of all segments backwards and adds up adapter gradients."""
    ready = None
    for number in reversed(range(len(segments))):
        segment = segments[number]
        held_back, state = _held_back(kept[number], state)
        if segment.plan.prefetch:
            if ready is None:
                ready, state = _last_ready(segment, held_back, state)
            before = None
            if number and segments[number - 1].plan.prefetch:
                before = _Before(segments[number - 1], kept[number - 1])
            carry = BackwardAhead(state, ready)
            state, ready = _backward_ahead(
                run, segment, held_back, carry, before=before
            )
        else:
            state, ready = _backward_plain(run, segment, held_back, state), None
    return state


class _Before(NamedTuple):
    """The segment that runs backwards next, and what it kept."""

    segment: Segment
    kept: Kept


def _backward_plain(
    run: LayerRun, segment: Segment, kept: Kept, state: Backwards
) -> Backwards:
    """As `_forward_plain`, from the last layer to the first."""

    def body(state: Backwards, index: jax.Array) -> tuple[Backwards, None]:
        x_BTD, state = _take_input(segment, kept.fetched(index), state, index=index)
        weights, state = segment.ready_backward(index, kept.blocks, state)
        replay = _Replay(weights, kept.saved(index), x_BTD, index)
        return _run_backward(run, segment, replay, state), None

    return jax.lax.scan(body, state, segment.indices, reverse=True)[0]


def _backward_ahead(
    run: LayerRun,
    segment: Segment,
    kept: Kept,
    carry: BackwardAhead,
    *,
    before: _Before | None,
) -> BackwardAhead:
    """As `_forward_ahead`, from the last layer to the first.

    Inputs on the host are fetched ahead like weights.
    """

    def body(carry: BackwardAhead, index: jax.Array) -> tuple[BackwardAhead, None]:
        state, ready = carry.state, carry.ready
        assert ready is not None
        x_BTD, state = _take_input(segment, ready.x_BTD, state, index=index)
        fetched = kept.fetched(index - 1)
        weights, state = segment.ready_backward(index - 1, kept.blocks, state)
        replay = _Replay(ready.weights, kept.saved(index), x_BTD, index)
        state = _run_backward(run, segment, replay, state)
        return BackwardAhead(state, Ready(weights, fetched)), None

    left = kept
    if segment.last:
        indices = jnp.arange(1, segment.plan.num_layers, dtype=jnp.int32)
        carry, _ = jax.lax.scan(body, carry, indices, reverse=True)
        left, state = _held_back(kept, carry.state)
        carry = carry._replace(state=state)
    first, ready = jnp.int32(0), carry.ready
    assert ready is not None
    x_BTD, state = _take_input(segment, ready.x_BTD, carry.state, index=first)
    ahead = None
    if before is not None:
        ahead, state = _last_ready(before.segment, before.kept, state)
    replay = _Replay(ready.weights, left.saved(first), x_BTD, first)
    return BackwardAhead(_run_backward(run, segment, replay, state), ahead)


def _take_input(
    segment: Segment,
    fetched: jax.Array | None,
    state: Backwards,
    *,
    index: jax.Array,
) -> tuple[jax.Array, Backwards]:
    """A layer's input; its rows of the arena are free afterwards."""
    if segment.on_host:
        assert fetched is not None
        return fetched, state
    shape = state.dx_BTD.shape
    (x_BTD,), arena = arenas.take(state.arena, segment.row("input", index), [shape])
    return x_BTD, state._replace(arena=arena)


def _held_back(kept: Kept, state: Backwards) -> tuple[Kept, Backwards]:
    """Has what a segment kept read only once the gradient at hand is there.

    Without it, XLA cuts layers out of the stacks long before outside of loops, and
    fetches inputs right after they were sent to the host where a loop was unrolled.
    """
    kept, dx_BTD = ordering.after(kept, state.dx_BTD)
    return kept, state._replace(dx_BTD=dx_BTD)


def _last_ready(
    segment: Segment, kept: Kept, state: Backwards
) -> tuple[Ready, Backwards]:
    """The last layer of a segment with `prefetch`, and the state after gathering it."""
    kept, state = _held_back(kept, state)
    x_BTD = None
    if kept.inputs:
        x_BTD = jax.device_put(kept.inputs[-1], jax.memory.Space.Device)
    weights, state = segment.ready_backward(segment.last, kept.blocks, state)
    return Ready(weights, x_BTD), state


class _Replay(NamedTuple):
    """A layer that is run again to be differentiated.

    Attributes:
      weights: Its whole weights.
      saved: What its forward pass saved, by name.
      x_BTD: Its input.
      index: Its index within the segment.
    """

    weights: Params
    saved: dict[str, jax.Array]
    x_BTD: jax.Array
    index: jax.Array


def _run_backward(
    run: LayerRun, segment: Segment, replay: _Replay, state: Backwards
) -> Backwards:
    """The vjp of one layer; its adapter gradients are added to the sums."""
    number = segment.start + replay.index

    def apply(adapters: Params, x_BTD: jax.Array) -> jax.Array:
        tape = tapes.Tape(SAVED_TENSORS[segment.plan.saved], saved=replay.saved)
        return run.apply(replay.weights, adapters, x_BTD, layer=number, tape=tape)

    _, pullback = jax.vjp(apply, run.layer_adapters(number), replay.x_BTD)
    # XLA would else compute the adapters' gradients at the end of the step, with all
    # that they need kept alive, where a loop was unrolled.
    d_adapters, dx_BTD = ordering.after(*pullback(state.dx_BTD))
    # Sums are carried and written in place: stacked outputs of the loop would be
    # allocated beside the sums of the microbatches before.
    grads = jax.tree.map(
        lambda total, part: jax.lax.dynamic_update_index_in_dim(
            total, segment_weights.at(total, number) + part, number, 0
        ),
        state.grads,
        d_adapters,
    )
    return state._replace(dx_BTD=dx_BTD, grads=grads)
