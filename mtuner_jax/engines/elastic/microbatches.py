"""One microbatch of one device, inside `shard_map`: loss, gradients, kept copies.

The main part of the layers runs forward for the whole microbatch. The tail runs part
by part: forward, loss and backward at once, so that what it saves lives shortly
(split-batch backward priority, mTuner, ATC'25). Then the main part runs backward. A
plan without a tail has one part and no layers in it, and is the same program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.engines.elastic import passes, step_specs, token_adapters
from mtuner_jax.engines.elastic.layer_runs import LayerRun
from mtuner_jax.engines.elastic.segment_weights import Backwards, Segment
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.ops import arenas, elastic, vocabulary
from mtuner_jax.ops.cross_entropy import api as cross_entropy
from mtuner_jax.ops.cross_entropy.operands import LossTokens, TokenLoss
from mtuner_jax.planning.costs.arena_layouts import ArenaLayout
from mtuner_jax.planning.plans import Table
from mtuner_jax.protocols.states import Batch, Params


class Sums(NamedTuple):
    """What microbatches add to, and the memory they hand on.

    Attributes:
      grads: Adapter gradients of the sum of token losses.
      total: Loss and trained tokens.
      arenas: {part: [rows, width]}; those with copies outlive the step.
    """

    grads: Params
    total: TokenLoss
    arenas: dict[str, jax.Array]


class Inputs(NamedTuple):
    """What microbatches read.

    Attributes:
      adapters: Whole adapters, marked as varying over the data axes.
      weights: This device's share of the frozen weights.
      step: Optimizer steps done, for dropout, of a stack [A] those of each adapter;
        None means no dropout.
    """

    adapters: Params
    weights: Params
    step: jax.Array | None


class Tail(NamedTuple):
    """What all parts of a microbatch share in the tail.

    Attributes:
      segments: Its segments.
      table: The output table: whole [V, D], or this device's rows.
    """

    segments: list[Segment]
    table: jax.Array


class TailSums(NamedTuple):
    """What the parts of a microbatch in the tail add to; see `Sums`."""

    grads: Params
    total: TokenLoss
    arena: jax.Array


class ChunkRows(NamedTuple):
    """Part of a microbatch: output of the main part [B, T, D], and its batch."""

    x_BTD: jax.Array
    batch: Batch[jax.Array]


def add(spec: StepSpec, inputs: Inputs, sums: Sums, batch: Batch[jax.Array]) -> Sums:
    """Runs a microbatch forward and backward and adds to the sums."""
    run = _run(spec, inputs, batch)
    length = batch.input_ids.shape[-1]
    main = _segments(spec, inputs.weights, "main", max_length=length)
    x_BTD = _embed(spec, inputs.weights, batch.input_ids)
    x_BTD, kept, arena = passes.forward(run, main, x_BTD, sums.arenas["main"])
    table = _head_table(spec, inputs.weights)
    tail = Tail(_segments(spec, inputs.weights, "tail", max_length=length), table)

    def chunk(carry: TailSums, rows: ChunkRows) -> tuple[TailSums, jax.Array]:
        return _tail_chunk(spec, inputs, tail, carry, rows=rows)

    chunks, rows = spec.plan.tail_chunks, ChunkRows(x_BTD, batch)
    carry = TailSums(sums.grads, sums.total, sums.arenas["tail"])
    if chunks == 1:
        carry, dx_BTD = chunk(carry, rows)
    else:
        cut = jax.tree.map(
            lambda field: field.reshape(chunks, -1, *field.shape[1:]), rows
        )
        carry, dx = jax.lax.scan(chunk, carry, cut)
        dx_BTD = dx.reshape(x_BTD.shape)
    state = passes.backward(run, main, kept, Backwards(dx_BTD, arena, carry.grads))
    return Sums(state.grads, carry.total, {"main": state.arena, "tail": carry.arena})


def evaluate(spec: StepSpec, inputs: Inputs, batch: Batch[jax.Array]) -> TokenLoss:
    """Loss sums of a microbatch, forward only; nothing is kept."""
    run = _run(spec, inputs, batch)
    length = batch.input_ids.shape[-1]
    x_BTD = _embed(spec, inputs.weights, batch.input_ids)
    for part in step_specs.PARTS:
        for segment in _segments(spec, inputs.weights, part, max_length=length):
            x_BTD = passes.forward_only(run, segment, x_BTD)
    normed_BTD = spec.model.final_norm(_final_norm(spec, inputs.weights), x_BTD)
    loss_S, _ = _token_losses(
        spec, _head_table(spec, inputs.weights), normed_BTD, batch, with_grad=False
    )
    return token_adapters.sums(spec, loss_S, batch)


def fill_arena(
    spec: StepSpec, weights: Params, part: str, *, max_length: int
) -> jax.Array:
    """The arena as a step leaves it: the copies in place, gathered anew."""
    layout = step_specs.arena_layout(spec, part, max_length=max_length)
    arena = empty_arena(spec, layout)
    for segment in _segments(spec, weights, part, max_length=max_length):
        if segment.keeps_backward:
            arena = segment.fill(arena)
    return arena


def empty_arena(spec: StepSpec, layout: ArenaLayout) -> jax.Array:
    """An arena of zeros, [rows, width], in the dtype of activations."""
    shape = (layout.rows, layout.width)
    return arenas.empty(shape, spec.dtype, axes=spec.data_axes)


def _tail_chunk(
    spec: StepSpec, inputs: Inputs, tail: Tail, carry: TailSums, *, rows: ChunkRows
) -> tuple[TailSums, jax.Array]:
    """Forward, loss and backward of the tail on part of the microbatch.

    Returns:
      (sums, gradient to the output of the main part [B, T, D]).
    """
    run = _run(spec, inputs, rows.batch)
    x_BTD, kept, arena = passes.forward(run, tail.segments, rows.x_BTD, carry.arena)

    def norm(x_BTD: jax.Array) -> jax.Array:
        return spec.model.final_norm(_final_norm(spec, inputs.weights), x_BTD)

    normed_BTD, pullback = jax.vjp(norm, x_BTD)
    loss_S, dx_BTD = _token_losses(
        spec, tail.table, normed_BTD, rows.batch, with_grad=True
    )
    (dx_BTD,) = pullback(dx_BTD)
    state = Backwards(dx_BTD, arena, carry.grads)
    state = passes.backward(run, tail.segments, kept, state)
    sums = token_adapters.sums(spec, loss_S, rows.batch)
    total = jax.tree.map(jnp.add, carry.total, sums)
    return TailSums(state.grads, total, state.arena), state.dx_BTD


def _run(spec: StepSpec, inputs: Inputs, batch: Batch[jax.Array]) -> LayerRun:
    return LayerRun(
        model=spec.model,
        axes=spec.data_axes,
        context=spec.model.context(batch),
        drop=token_adapters.drop(spec, inputs.step, batch),
        adapters=inputs.adapters,
        scalings=token_adapters.scalings(spec),
        owners=token_adapters.owners(spec, batch),
    )


def _segments(
    spec: StepSpec, weights: Params, part: str, *, max_length: int
) -> list[Segment]:
    layout = step_specs.arena_layout(spec, part, max_length=max_length)
    indices = spec.segments(part)
    offset = spec.plan.starts[indices[0]] if indices else 0
    return [
        Segment(
            plan=spec.plan.segments[index],
            start=spec.plan.starts[index],
            first=spec.plan.starts[index] - offset,
            table=spec.table["segments"][str(index)],
            shards=weights["segments"][str(index)],
            arena=layout,
            axes=spec.data_axes,
            dtype=spec.dtype,
        )
        for index in indices
    ]


def _embed(spec: StepSpec, weights: Params, ids_BT: jax.Array) -> jax.Array:
    """Token vectors, [B, T] -> [B, T, D]."""
    table_VD, axes = weights["embed"]["table"], spec.data_axes
    if spec.plan.embedding is Table.SPLIT:
        x_BTD = vocabulary.lookup(table_VD, ids_BT, axes=axes)
    else:
        if spec.plan.embedding is Table.GATHERED:
            table_VD = elastic.gather(table_VD, axes=axes)
        x_BTD = spec.model.embed(table_VD, ids_BT)
    return x_BTD.astype(spec.dtype)


def _head_table(spec: StepSpec, weights: Params) -> jax.Array:
    """The output table as the loss takes it: whole, or this device's rows."""
    part = "head" if "table" in weights["head"] else "embed"
    table_VD = weights[part]["table"]
    if spec.plan.head is Table.SPLIT:  # rows of padding are masked by the loss
        return table_VD.astype(spec.dtype)
    if spec.plan.head is Table.GATHERED:
        table_VD = elastic.gather(table_VD, axes=spec.data_axes)
    return spec.table[part]["table"].usable(table_VD, spec.dtype)


def _final_norm(spec: StepSpec, weights: Params) -> Params:
    """Weights of the norm before the head, as products take them."""
    return jax.tree.map(
        lambda row, array: row.usable(array, spec.dtype),
        spec.table["head"]["norm"],
        weights["head"]["norm"],
    )


def _token_losses(
    spec: StepSpec,
    table: jax.Array,
    normed_BTD: jax.Array,
    batch: Batch[jax.Array],
    *,
    with_grad: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """(loss of each token [S], gradient of their sum to `normed_BTD` or None)."""
    tokens = LossTokens(
        normed_BTD.reshape(-1, normed_BTD.shape[-1]),
        batch.targets.reshape(-1),
        batch.weights.reshape(-1),
    )
    if spec.plan.head is Table.SPLIT:
        loss_S, dx_SD = vocabulary.value_and_grad(
            tokens, table, axes=spec.data_axes, vocab_size=spec.model.vocab_size
        )
    elif with_grad:
        loss_S, dx_SD = cross_entropy.value_and_grad(tokens, table)
    else:
        return cross_entropy.value(tokens, table), None
    return loss_S, dx_SD.reshape(normed_BTD.shape)
