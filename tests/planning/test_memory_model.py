import dataclasses

import pytest

from mtuner_jax.ops import losses
from mtuner_jax.planning import memory_model, plans, transients, workloads

MESH = (2, 2, 2)
SAVED = tuple(plans.Saved)


def workload(num_layers=4, **changes):
    """Llama-2 7B's widths."""
    d, f = 4096, 11008
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    linears = [(name, d, d) for name in names]
    linears += [("gate_proj", d, f), ("up_proj", d, f), ("down_proj", f, d)]
    made = workloads.Workload(
        model="llama2-7b",
        num_layers=num_layers,
        hidden_size=d,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
        tied_embeddings=False,
        linears=tuple(
            workloads.Linear(name=name, in_dim=rows, out_dim=columns, rank=16)
            for name, rows, columns in linears
        ),
        replicated_layer_weights=2 * d,
        max_length=4096,
        global_batch_size=8,
    )
    return dataclasses.replace(made, **changes)


def segment(num_layers=4, rest=0, *, fwd=None, bwd=None, **settings):
    return plans.SegmentPlan(
        num_layers=num_layers,
        rest_axes=rest,
        fwd_keep_axes=rest if fwd is None else fwd,
        bwd_keep_axes=rest if bwd is None else bwd,
        **settings,
    )


def plan(*segments, **settings):
    return plans.Plan(
        mesh_sizes=MESH,
        segments=segments,
        **{"microbatch": 1, "accumulation": 1, **settings},
    )


def layer(made, **settings):
    rows = settings.pop("rows", 1)
    return memory_model.layer_bytes(
        workload(),
        made,
        mesh_sizes=MESH,
        rows=rows,
        merge_gathers=settings.pop("merge_gathers", False),
    )


@pytest.mark.parametrize("saved", SAVED)
def test_total_is_the_sum_of_its_parts_and_one_maximum(saved):
    made = plan(segment(2, saved=saved), segment(2, 1, fwd=2))
    forecast = memory_model.forecast(made, workload())
    static = memory_model.static_bytes(workload(), memory_model.choices(made))
    layers = [layer(made.segments[0]), layer(made.segments[1])]
    stacked = sum(2 * (one.rest + one.saved + one.fwd_copy) for one in layers)
    inputs = sum(2 * one.layer_input for one in layers)
    transient = max(static.loss_transient, *(one.transient for one in layers))
    want = static.total_bytes + stacked + inputs + transient
    empty_tail = 2 * 64
    assert forecast.total_bytes == want + empty_tail


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_copies_are_whole_weights_at_their_ratio(axes):
    whole = workload().layer_weight_bytes
    got = layer(segment(fwd=axes, bwd=axes))
    assert got.fwd_copy == got.bwd_copy == whole // 2 ** (3 - axes)


def test_a_copy_at_the_ratio_of_rest_is_none():
    got = layer(segment(rest=2))
    assert got.fwd_copy == got.bwd_copy == 0


@pytest.mark.parametrize("num_tokens", [1, 24, 1024, 4096, 3 * 8192])
@pytest.mark.parametrize("vocab_size", [256, 4000, 32000, 128256])
def test_chunks_of_tokens_are_those_of_the_loss(num_tokens, vocab_size):
    got = transients.chunk_tokens(num_tokens, vocab_size)
    assert got == losses.chunk_tokens(num_tokens, vocab_size)
