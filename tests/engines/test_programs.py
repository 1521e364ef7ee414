import collections
import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from models import llama
from mtuner_jax import meshes
from mtuner_jax.engines import aot, elastic_step, hlo_programs, programs
from mtuner_jax.engines.programs import Collective
from mtuner_jax.planning import plans
from tests import tiny

TOKENS = 12
OPTIMIZER = optax.adamw(1e-2)
INPUT, GATES = plans.Saved.LAYER_INPUT, plans.Saved.ATTENTION_AND_GATES


class ReducingLlama(llama.Llama):
    """A decoder with a mistake: its layers talk to other devices."""

    def layer(self, weights, adapters, x_BTD, *, context, tape):
        x_BTD = super().layer(weights, adapters, x_BTD, context=context, tape=tape)
        return x_BTD + 0.0 * jax.lax.psum(x_BTD, meshes.AXES[:1])


def make_spec(mesh_text, segments, *, variant="gqa", accumulation=1, kind=llama.Llama):
    """`segments` holds (layers, rest_axes, saved)."""
    model = kind(tiny.VARIANTS[variant])
    mesh = meshes.make(meshes.parse(mesh_text), jax.devices())
    plan = plans.Plan(
        mesh_sizes=tuple(mesh.devices.shape),
        segments=tuple(
            plans.SegmentPlan(num_layers=layers, rest_axes=rest, saved=saved)
            for layers, rest, saved in segments
        ),
        microbatch=1,
        accumulation=accumulation,
    )
    return elastic_step.StepSpec(
        model=model, plan=plan, mesh=mesh, adapters=tiny.adapters(model)
    )


def trace(spec):
    arguments = aot.abstract_arguments(
        spec, OPTIMIZER, max_length=TOKENS, dtype=jnp.float32
    )
    return elastic_step.build_train(spec, OPTIMIZER).trace(*arguments)


def implied(spec):
    """What the plan says, counted by hand: float32, so 4 bytes an element."""
    axes, mesh_shape = spec.mesh.axis_names, dict(spec.mesh.shape)
    micro, shapes = (spec.plan.accumulation,), spec.model.shapes()
    found = collections.Counter()

    def add(kind, elements, axes, *, loops, backward=False):
        groups = programs.groups_of(axes, mesh_shape)
        found[
            Collective(
                kind=kind,
                groups=groups,
                result_bytes=4 * elements,
                loops=loops,
                backward=backward,
            )
        ] += 1

    vocab, width = shapes["embed"]["table"]
    padded = -(-vocab // spec.mesh.size) * spec.mesh.size
    for _ in ("embedding", "head"):
        add("all_gather", padded * width, axes[::-1], loops=micro)
    kernels = [
        leaves["kernel"] for leaves in shapes["layers"].values() if "kernel" in leaves
    ]
    for segment in spec.plan.segments:
        if segment.rest_axes == len(axes):
            continue
        for backward in (False, True):
            for _, *kernel in kernels:
                add(
                    "all_gather",
                    math.prod(kernel),
                    axes[segment.rest_axes :][::-1],
                    loops=(*micro, segment.num_layers),
                    backward=backward,
                )
    for adapter in spec.adapters:
        rank = adapter.max_rank * len(adapter.ranks)
        for dim in (adapter.in_dim, adapter.out_dim):
            add("all_reduce", rank * dim, axes, loops=())
    for _ in ("loss", "tokens"):
        add("all_reduce", 1, axes, loops=())
    return found


CASES = {
    "2x2x2 nothing kept": ("2x2x2", [(3, 0, INPUT)], {}),
    "2x2x2 saved tensors": ("2x2x2", [(3, 0, GATES)], {"accumulation": 2}),
    "2x2x2 half kept": ("2x2x2", [(3, 2, INPUT)], {}),
    "2x2x2 replicated": ("2x2x2", [(3, 3, GATES)], {"variant": "tied"}),
    "2x2x2 one-layer segments": (
        "2x2x2",
        [(1, 0, INPUT), (1, 1, GATES), (1, 3, INPUT)],
        {"accumulation": 2, "variant": "tied"},
    ),
    "8": (
        "8",
        [(2, 0, INPUT), (1, 0, GATES)],
        {"variant": "bias_and_padded_vocabulary"},
    ),
    "8 replicated": ("8", [(2, 1, INPUT), (1, 0, INPUT)], {"accumulation": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_step_holds_exactly_the_collectives_of_its_plan(name):
    mesh, segments, settings = CASES[name]
    spec = make_spec(mesh, segments, **settings)
    traced = trace(spec)
    found = programs.traced(traced.jaxpr)
    assert collections.Counter(found) == implied(spec)
    lowered = programs.lowered(traced.lower().compiler_ir("stablehlo"))
    without_direction = [dataclasses.replace(one, backward=False) for one in found]
    assert collections.Counter(lowered) == collections.Counter(without_direction)


def test_a_collective_inside_a_layer_is_noticed():
    spec = make_spec("2x2x2", [(3, 0, INPUT)], kind=ReducingLlama)
    surplus = collections.Counter(programs.traced(trace(spec).jaxpr)) - implied(spec)
    assert {one.kind for one in surplus} == {"all_reduce"}
    assert {one.backward for one in surplus} == {False, True}
    assert all(one.times == 3 and len(one.groups[0]) == 2 for one in surplus)


@pytest.mark.parametrize("rest_axes", [1, 2, 3])
def test_another_plan_has_other_collectives(rest_axes):
    nothing_kept = make_spec("2x2x2", [(3, 0, INPUT)])
    some_kept = make_spec("2x2x2", [(3, rest_axes, INPUT)])
    assert implied(nothing_kept) != implied(some_kept)
    assert collections.Counter(programs.traced(trace(some_kept).jaxpr)) != implied(
        nothing_kept
    )


def test_compiled_step_moves_the_lowered_bytes_and_reuses_the_donated_state():
    spec = make_spec("2x2x2", [(3, 1, INPUT)])
    arguments = aot.abstract_arguments(
        spec, OPTIMIZER, max_length=TOKENS, dtype=jnp.float32
    )
    traced = trace(spec)
    compiled = traced.lower().compile()
    moved = programs.total_bytes(hlo_programs.collectives(compiled.as_text()))
    assert moved == programs.total_bytes(programs.traced(traced.jaxpr))
    state_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments.state)
    )
    assert compiled.memory_analysis().alias_size_in_bytes == state_bytes


def test_only_the_state_is_donated():
    traced = trace(make_spec("2x2x2", [(3, 0, INPUT)]))
    state, weights, batch = traced.args_info[0]
    assert all(leaf.donated for leaf in jax.tree.leaves(state))
    assert not any(leaf.donated for leaf in jax.tree.leaves((weights, batch)))


def test_groups_list_the_first_axis_slowest():
    shape = {"tier0": 2, "tier1": 2, "tier2": 2}
    assert programs.groups_of(("tier2", "tier1"), shape) == (
        (0, 2, 1, 3),
        (4, 6, 5, 7),
    )
    assert programs.groups_of(("tier0",), shape) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    mesh = meshes.make(meshes.parse("8"), jax.devices())

    def until_large(x):
        return jax.lax.while_loop(
            lambda x: x[0] < 100.0, lambda x: jax.lax.pmean(x, "tier0"), x
        )

    jitted = jax.jit(
        jax.shard_map(
            until_large, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
    )
    traced = jitted.trace(jax.ShapeDtypeStruct((1,), jnp.float32))
    with pytest.raises(ValueError, match="loop of unknown length"):
        programs.traced(traced.jaxpr)
    with pytest.raises(ValueError, match="loop of unknown length"):
        programs.lowered(traced.lower().compiler_ir("stablehlo"))


def test_hlo_text_is_read_with_loops_asynchrony_and_counted_groups():
    text = """HloModule step

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %start = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%p), \
replica_groups=[2,4]<=[2,2,2]T(0,2,1), dimensions={0}
  %done = bf16[8]{0} all-gather-done(%start)
  ROOT %out = (s32[], f32[8]{0}) tuple(%p, %done)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %loop = (s32[], f32[8]{0}) while(%a), condition=%none, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %sum = (f32[8]{0}, /*index=1*/f32[]) all-reduce(%a, %a), \
replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %last = f32[8]{0} get-tuple-element(%sum), index=0
}
"""
    gather, reduce = hlo_programs.collectives(text)
    assert (gather.kind, gather.result_bytes, gather.loops) == ("all_gather", 16, (5,))
    assert gather.groups == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert (reduce.kind, reduce.result_bytes, reduce.loops) == ("all_reduce", 36, ())
    assert reduce.groups == ((0, 1), (2, 3))


def test_cudnn_workspace_is_larger_with_grouped_queries():
    call = (
        "  %bwd = (bf16[2,8,64,16]{3,1,2,0}, bf16[2,{kv},64,16]{3,1,2,0}, u8[0]{0}) "
        'custom-call(%q), custom_call_target="__cudnn$fmhaSoftmaxBackward"'
    )
    elements = 2 * 8 * 64 * 16
    equal, grouped = call.replace("{kv}", "8"), call.replace("{kv}", "2")
    assert hlo_programs.cudnn_workspace_bytes(equal) == 4 * elements
    assert hlo_programs.cudnn_workspace_bytes(grouped) == 8 * elements
