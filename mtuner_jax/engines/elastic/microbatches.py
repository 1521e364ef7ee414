"""One microbatch of one device, inside `shard_map`: loss, gradients, kept copies.

The main part of the layers runs forward for the whole microbatch. The tail runs part
by part: forward, loss and backward at once, so that what it saves lives shortly
(split-batch backward priority, mTuner, ATC'25). Then the main part runs backward. A
plan without a tail has one part and no layers in it, and is the same program.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtuner_jax.adapters import lora
from mtuner_jax.engines.elastic import passes, segment_weights, step_specs
from mtuner_jax.engines.elastic.segment_weights import Segment
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.ops import arenas, dropout, elastic, vocabulary
from mtuner_jax.ops.cross_entropy import api as cross_entropy
from mtuner_jax.ops.cross_entropy.operands import TokenLoss, Tokens
from mtuner_jax.ops.low_rank.operands import Dropout
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
      adapters: Whole adapters, marked as varying over the mesh.
      weights: This device's share of the frozen weights.
      step: Optimizer steps done, for dropout; None means no dropout.
    """

    adapters: Params
    weights: Params
    step: jax.Array | None


def add(spec: StepSpec, inputs: Inputs, sums: Sums, batch: Batch) -> Sums:
    """Runs a microbatch forward and backward and adds to the sums."""
    run = _run(spec, inputs, batch)
    main = _segments(spec, inputs.weights, "main", batch.input_ids.shape[-1])
    x_BTD = _embed(spec, inputs.weights, batch.input_ids)
    x_BTD, kept, arena = passes.forward(run, main, x_BTD, sums.arenas["main"])
    table = _head_table(spec, inputs.weights)
    tail = _segments(spec, inputs.weights, "tail", batch.input_ids.shape[-1])

    def chunk(carry, rows):
        return _tail_chunk(spec, inputs, (tail, table), carry, rows)

    chunks = spec.plan.tail_chunks
    carry = (sums.grads, sums.total, sums.arenas["tail"])
    if chunks == 1:
        carry, dx_BTD = chunk(carry, (x_BTD, batch))
    else:
        cut = jax.tree.map(
            lambda field: field.reshape(chunks, -1, *field.shape[1:]), (x_BTD, batch)
        )
        carry, dx = jax.lax.scan(chunk, carry, cut)
        dx_BTD = dx.reshape(x_BTD.shape)
    grads, total, tail_arena = carry
    state = passes.Backwards(dx_BTD, arena, grads)
    state = passes.backward(run, main, kept, state)
    return Sums(state.grads, total, {"main": state.arena, "tail": tail_arena})


def evaluate(spec: StepSpec, inputs: Inputs, batch: Batch) -> TokenLoss:
    """Loss sums of a microbatch, forward only; nothing is kept."""
    run = _run(spec, inputs, batch)
    x_BTD = _embed(spec, inputs.weights, batch.input_ids)
    for part in step_specs.PARTS:
        for segment in _segments(spec, inputs.weights, part, batch.input_ids.shape[-1]):
            x_BTD = passes.forward_only(run, segment, x_BTD)
    normed_BTD = spec.model.final_norm(inputs.weights["head"]["norm"], x_BTD)
    loss, _ = _token_losses(
        spec, _head_table(spec, inputs.weights), normed_BTD, batch, with_grad=False
    )
    return TokenLoss(loss, jnp.sum(batch.weights).astype(loss.dtype))


def fill_arena(
    spec: StepSpec, weights: Params, part: str, *, max_length: int
) -> jax.Array:
    """The arena as a step leaves it: the copies in place, gathered anew."""
    layout = step_specs.arena_layout(spec, part, max_length=max_length)
    arena = empty_arena(spec, layout, weights)
    for segment in _segments(spec, weights, part, max_length):
        if segment.keeps_backward:
            arena = segment_weights.fill(segment, arena)
    return arena


def empty_arena(spec: StepSpec, layout, weights: Params) -> jax.Array:
    """An arena of zeros in the weights' dtype."""
    dtype = weights["head"]["norm"]["scale"].dtype
    return arenas.empty((layout.rows, layout.width), dtype, axes=spec.axes)


def _tail_chunk(spec, inputs, tail_and_table, carry, rows):
    """Forward, loss and backward of the tail on part of the microbatch."""
    tail, table = tail_and_table
    grads, total, arena = carry
    x_BTD, batch = rows
    run = _run(spec, inputs, batch)
    x_BTD, kept, arena = passes.forward(run, tail, x_BTD, arena)

    def norm(x_BTD):
        return spec.model.final_norm(inputs.weights["head"]["norm"], x_BTD)

    normed_BTD, pullback = jax.vjp(norm, x_BTD)
    loss, dx_BTD = _token_losses(spec, table, normed_BTD, batch, with_grad=True)
    (dx_BTD,) = pullback(dx_BTD)
    state = passes.Backwards(dx_BTD, arena, grads)
    state = passes.backward(run, tail, kept, state)
    tokens = jnp.sum(batch.weights).astype(loss.dtype)
    total = TokenLoss(total.loss + loss, total.tokens + tokens)
    return (state.grads, total, state.arena), state.dx_BTD


def _run(spec, inputs, batch):
    drop = None
    if inputs.step is not None and spec.dropout_rate > 0.0:
        key = dropout.fold_in(dropout.key(spec.seed), inputs.step)
        places = dropout.Places(batch.sample_ids, batch.positions)
        drop = Dropout(key, places, spec.dropout_rate)
    return passes.Run(
        model=spec.model,
        axes=spec.axes,
        context=spec.model.context(batch),
        drop=drop,
        adapters=inputs.adapters,
        scalings=lora.scaling_arrays(spec.adapters),
    )


def _segments(spec, weights, part, max_length):
    layout = step_specs.arena_layout(spec, part, max_length=max_length)
    indices = spec.segments(part)
    offset = spec.plan.starts[indices[0]] if indices else 0
    return [
        Segment(
            plan=spec.plan.segments[index],
            start=spec.plan.starts[index],
            first=spec.plan.starts[index] - offset,
            shards=weights["segments"][str(index)],
            arena=layout,
            axes=spec.axes,
        )
        for index in indices
    ]


def _embed(spec, weights, ids_BT):
    table = weights["embed"]["table"]
    if spec.plan.embedding is Table.SPLIT:
        return vocabulary.lookup(table, ids_BT, axes=spec.axes)
    if spec.plan.embedding is Table.GATHERED:
        table = elastic.gather(table, axes=spec.axes)
    return spec.model.embed(table, ids_BT)


def _head_table(spec, weights):
    """The output table as the loss takes it: whole, or this device's rows."""
    table = weights["head" if "table" in weights["head"] else "embed"]["table"]
    if spec.plan.head is Table.SPLIT:
        return table
    if spec.plan.head is Table.GATHERED:
        table = elastic.gather(table, axes=spec.axes)
    return table[: spec.model.vocab_size]


def _token_losses(spec, table, normed_BTD, batch, *, with_grad):
    """(loss sum, gradient to `normed_BTD` or None)."""
    x_SD = normed_BTD.reshape(-1, normed_BTD.shape[-1])
    targets_S, weights_S = batch.targets.reshape(-1), batch.weights.reshape(-1)
    if spec.plan.head is Table.SPLIT:
        loss, dx_SD = vocabulary.value_and_grad(
            x_SD,
            table,
            (targets_S, weights_S),
            axes=spec.axes,
            vocab_size=spec.model.vocab_size,
        )
    elif with_grad:
        tokens = Tokens(x_SD, targets_S, weights_S)
        loss, dx_SD = cross_entropy.value_and_grad(tokens, table)
    else:
        tokens = Tokens(x_SD, targets_S, weights_S)
        return cross_entropy.value(tokens, table), None
    return loss, dx_SD.reshape(normed_BTD.shape)
