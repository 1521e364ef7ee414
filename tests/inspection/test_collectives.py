import collections
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from models import llama
from mtuner_jax.adapters import lora
from mtuner_jax.devices import meshes
from mtuner_jax.engines.elastic import engine, steps
from mtuner_jax.numbers import chunking
from mtuner_jax.planning import plans
from tests import tiny
from tests.engines.elastic import plan_cases
from tests.inspection import collectives, hlo_programs
from tests.inspection.collectives import Collective

TOKENS = 12
OPTIMIZER = optax.adamw(1e-2)
GATES = plans.Saved.ATTENTION_AND_GATES
RANDOM = (101, 103, 109, 117, 121, 123)


class ReducingLlama(llama.Llama):
    """A decoder with a mistake: its layers talk to other devices."""

    def layer(self, weights, adapters, x_BTD, *, context, tape):
        x_BTD = super().layer(weights, adapters, x_BTD, context=context, tape=tape)
        return x_BTD + 0.0 * jax.lax.psum(x_BTD, meshes.AXES[:1])


def make_spec(mesh_text, segments, *, variant="gqa", kind=llama.Llama, **settings):
    """A step of the tiny decoder; `settings` are fields of `Plan`."""
    model = kind(tiny.VARIANTS[variant])
    mesh = plan_cases.mesh_of(mesh_text)
    plan = plans.Plan(
        mesh_sizes=tuple(mesh.devices.shape),
        segments=tuple(segments),
        **{"microbatch": 1, "accumulation": 1, **settings},
    )
    return spec_of(model, plan, mesh)


def spec_of(model, plan, mesh):
    """A step of weights in float32, whatever the plan says."""
    plan = dataclasses.replace(plan, weight_dtype="float32")
    return steps.StepSpec(
        model=model, plan=plan, mesh=mesh, adapters=tiny.adapters(model)
    )


def segment(num_layers=3, rest=0, *, fwd=None, bwd=None, **settings):
    """A segment that keeps no copies unless told."""
    return plans.SegmentPlan(
        num_layers=num_layers,
        rest_axes=rest,
        fwd_keep_axes=rest if fwd is None else fwd,
        bwd_keep_axes=rest if bwd is None else bwd,
        **settings,
    )


def trace(spec):
    arguments = engine.abstract_arguments(
        spec, OPTIMIZER, max_length=TOKENS, dtype=jnp.float32
    )
    return steps.build_train(spec, OPTIMIZER).trace(*arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implied:
    """What a plan says, counted by hand: float32 and int32, so 4 bytes an element.

    `phases` are the phases of a step in program order. What a collective belongs to is
    told by its place: the backward pass of layers that run outside of a loop, as
    `prefetch` has it, is not known by the loop's direction.
    """

    spec: steps.StepSpec

    @property
    def phases(self):
        plan = self.spec.plan
        micro = (plan.accumulation,)
        chunk = (*micro, plan.tail_chunks) if plan.tail_chunks > 1 else micro
        return {
            "adapters": self._adapters("all_gather"),
            "embedding": self._embedding(micro),
            "main forward": self._layers("main", micro, backward=False),
            "head table": self._table(plan.head, micro),
            "tail forward": self._layers("tail", chunk, backward=False),
            "loss": self._loss(chunk),
            "tail backward": self._layers("tail", chunk, backward=True),
            "main backward": self._layers("main", micro, backward=True),
            "reductions": self._adapters("reduce_scatter") + 2 * self._reduced(1),
        }

    @property
    def all(self):
        return collections.Counter(itertools.chain(*self.phases.values()))

    def _one(self, kind, elements, axes, loops=(), *, backward=False):
        groups = collectives.groups_of(tuple(axes), dict(self.spec.mesh.shape))
        return [
            Collective(
                kind=kind,
                groups=groups,
                result_bytes=4 * elements,
                loops=loops,
                backward=backward,
            )
        ]

    def _over_all(self, kind, elements, loops=()):
        return self._one(kind, elements, self.spec.data_axes[::-1], loops)

    def _reduced(self, elements):
        return self._one("all_reduce", elements, self.spec.data_axes)

    def _adapters(self, kind):
        """Sharded: whole at the start, and each its part of the sum. Else one sum."""
        split = self.spec.plan.adapters is plans.AdapterState.SHARDED
        found = []
        for adapter in self.spec.adapters:
            rank = adapter.max_rank * len(adapter.ranks)
            for elements in (rank * adapter.in_dim, rank * adapter.out_dim):
                if split:
                    parts = self.spec.mesh.size if kind == "reduce_scatter" else 1
                    found += self._over_all(kind, elements // parts)
                elif kind == "reduce_scatter":
                    found += self._reduced(elements)
        return found

    def _table(self, table, loops):
        if table is not plans.Table.GATHERED:
            return []
        vocab, width = self.spec.model.shapes()["embed"]["table"]
        padded = -(-vocab // self.spec.mesh.size) * self.spec.mesh.size
        return self._over_all("all_gather", padded * width, loops)

    def _embedding(self, loops):
        """Split: all tokens to all devices, and of the found rows each its own."""
        plan = self.spec.plan
        if plan.embedding is not plans.Table.SPLIT:
            return self._table(plan.embedding, loops)
        width = self.spec.model.shapes()["embed"]["table"][1]
        tokens = plan.microbatch * TOKENS
        return [
            *self._over_all("all_gather", self.spec.mesh.size * tokens, loops),
            *self._over_all("reduce_scatter", tokens * width, loops),
        ]

    def _loss(self, loops):
        """Split: per chunk of tokens; nothing otherwise."""
        plan, devices = self.spec.plan, self.spec.mesh.size
        if plan.head is not plans.Table.SPLIT:
            return []
        vocab, width = self.spec.model.shapes()["embed"]["table"]
        tokens = plan.microbatch // plan.tail_chunks * TOKENS
        size = chunking.loss_tokens(tokens, -(-vocab // devices))
        loops = (*loops, tokens // size)
        return [
            *self._over_all("all_gather", devices * size * width, loops),  # vectors
            *2
            * self._over_all("all_gather", devices * size, loops),  # targets, weights
            *3
            * self._over_all("all_reduce", devices * size, loops),  # top, sum, picked
            *self._over_all("reduce_scatter", size * width, loops),
        ]

    def _layers(self, part, loops, *, backward):
        found = []
        for index in self.spec.segments(part):
            segment = self.spec.plan.segments[index]
            layers = segment.num_layers
            held, stop = segment.bwd_keep_axes, segment.fwd_keep_axes
            if backward:
                held, stop = stop, held
            for elements, axes in self._stages(held, stop):
                inside = layers - 1 if segment.prefetch else layers
                if segment.prefetch:  # the first of the pass, before the loop
                    found += self._one("all_gather", elements, axes, loops)
                if inside:
                    found += self._one(
                        "all_gather",
                        elements,
                        axes,
                        (*loops, inside),
                        backward=backward,
                    )
        return found

    def _stages(self, held, stop):
        """Gathers of a layer: (elements, axes)."""
        sizes, axes = self.spec.plan.mesh_sizes, self.spec.data_axes
        ends = sorted({held, max(held, stop), len(axes)})
        layers = self.spec.model.shapes()["layers"].values()
        return [
            (
                math.prod(leaves["kernel"][1:]) // math.prod(sizes[end:]),
                axes[begin:end][::-1],
            )
            for begin, end in itertools.pairwise(ends)
            for leaves in layers
            if "kernel" in leaves
        ]


def assert_holds(spec, found):
    """That `found` are the collectives of the plan, phase after phase."""
    start = 0
    for name, phase in Implied(spec=spec).phases.items():
        got = collections.Counter(found[start : start + len(phase)])
        assert got == collections.Counter(phase), name
        start += len(phase)
    assert found[start:] == []


TAIL = {"tail_layers": 2, "tail_chunks": 2, "microbatch": 4}
SPLIT, RESIDENT = plans.Table.SPLIT, plans.Table.RESIDENT
CASES = {
    "2x2x2 nothing kept": ("2x2x2", [segment()], {}),
    "2x2x2 saved tensors": ("2x2x2", [segment(saved=GATES)], {"accumulation": 2}),
    "2x2x2 half at rest": ("2x2x2", [segment(rest=2)], {}),
    "2x2x2 replicated": (
        "2x2x2",
        [segment(rest=3, saved=GATES)],
        {"variant": "tied"},
    ),
    "2x2x2 one-layer segments": (
        "2x2x2",
        [segment(1), segment(1, 1, saved=GATES), segment(1, 3)],
        {"accumulation": 2, "variant": "tied"},
    ),
    "8": (
        "8",
        [segment(2), segment(1, saved=GATES)],
        {"variant": "bias_and_padded_vocabulary"},
    ),
    "8 replicated": ("8", [segment(2, 1), segment(1)], {"accumulation": 3}),
    "2x2x2 kept after forward": ("2x2x2", [segment(fwd=2)], {}),
    "2x2x2 kept after backward": ("2x2x2", [segment(bwd=1)], {"accumulation": 2}),
    "2x2x2 kept whole after forward": ("2x2x2", [segment(fwd=3, bwd=1)], {}),
    "2x2x2 kept whole after backward": ("2x2x2", [segment(fwd=1, bwd=3)], {}),
    "2x2x2 kept in both": ("2x2x2", [segment(2, fwd=1, bwd=2), segment(1, 1)], {}),
    "2x2x2 ahead": ("2x2x2", [segment(prefetch=True, fwd=1)], {"accumulation": 2}),
    "2x4 ahead and not": (
        "2x4",
        [segment(2, prefetch=True), segment(1, bwd=1, prefetch=False)],
        {},
    ),
    "2x4 one layer ahead": (
        "2x4",
        [segment(1), segment(1, fwd=1, bwd=1, prefetch=True), segment(1, 1)],
        {},
    ),
    "2x2x2 tail": ("2x2x2", [segment(1), segment(2, fwd=2)], TAIL),
    "2x2x2 tail ahead": (
        "2x2x2",
        [segment(1, prefetch=True), segment(2, bwd=2, prefetch=True)],
        {**TAIL, "accumulation": 2},
    ),
    "8 all in the tail": ("8", [segment()], {**TAIL, "tail_layers": 3}),
    "2x2x2 split tables": (
        "2x2x2",
        [segment(1), segment(2)],
        {**TAIL, "embedding": SPLIT, "head": SPLIT},
    ),
    "8 padded split tables": (
        "8",
        [segment()],
        {
            "embedding": SPLIT,
            "head": SPLIT,
            "microbatch": 8,
            "variant": "bias_and_padded_vocabulary",
        },
    ),
    "2x4 resident tables": (
        "2x4",
        [segment()],
        {"embedding": RESIDENT, "head": RESIDENT},
    ),
    "2x2x2 sharded adapters": (
        "2x2x2",
        [segment()],
        {"adapters": plans.AdapterState.SHARDED, "accumulation": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_step_holds_exactly_the_collectives_of_its_plan(name):
    mesh, segments, settings = CASES[name]
    spec = make_spec(mesh, segments, **settings)
    traced = trace(spec)
    found = collectives.traced(traced.jaxpr)
    assert_holds(spec, found)
    lowered = collectives.lowered(traced.lower().compiler_ir("stablehlo"))
    without_direction = [dataclasses.replace(one, backward=False) for one in found]
    assert collections.Counter(lowered) == collections.Counter(without_direction)


@pytest.mark.parametrize("seed", RANDOM)
def test_random_step_holds_exactly_the_collectives_of_its_plan(seed):
    case = plan_cases.random_case(seed)
    model = llama.Llama(tiny.VARIANTS[case.variant])
    spec = spec_of(model, case.plan, plan_cases.mesh_of(case.mesh))
    assert_holds(spec, collectives.traced(trace(spec).jaxpr))


@pytest.mark.parametrize("adapters", plans.AdapterState)
def test_adapters_are_reduced_once_a_step_outside_of_all_loops(adapters):
    spec = make_spec(
        "2x2x2",
        [segment(1, prefetch=True), segment(2, bwd=1)],
        adapters=adapters,
        accumulation=3,
        **TAIL,
    )
    found = collectives.traced(trace(spec).jaxpr)
    sharded = adapters is plans.AdapterState.SHARDED
    kind = "reduce_scatter" if sharded else "all_reduce"
    gradients = [one for one in found if one.kind == kind and one.result_bytes > 4]
    assert len(gradients) == 2 * len(spec.adapters)
    assert all(one.loops == () for one in gradients)
    moved = sum(one.result_bytes for one in gradients)
    parts = spec.mesh.size if sharded else 1
    assert moved == 4 * lora.num_parameters(spec.adapters) // parts


@pytest.mark.parametrize(("fwd", "bwd"), [(0, 0), (2, 0), (0, 2), (2, 1), (3, 3)])
def test_gathering_ahead_moves_the_same_bytes(fwd, bwd):
    """Between the same devices, in a step: only the place of a gather changes."""
    plain, ahead = (
        make_spec(
            "2x2x2",
            [segment(1, fwd=fwd, bwd=bwd, prefetch=prefetch), segment(2, 1, fwd=1)],
            accumulation=2,
        )
        for prefetch in (False, True)
    )
    assert moved_between(trace(plain)) == moved_between(trace(ahead))


def moved_between(traced):
    moved = collections.Counter()
    for one in collectives.traced(traced.jaxpr):
        moved[one.kind, one.groups] += one.total_bytes
    return moved


def test_a_collective_inside_a_layer_is_noticed():
    spec = make_spec("2x2x2", [segment()], kind=ReducingLlama)
    found = collectives.traced(trace(spec).jaxpr)
    surplus = collections.Counter(found) - Implied(spec=spec).all
    assert {one.kind for one in surplus} == {"all_reduce"}
    assert {one.backward for one in surplus} == {False, True}
    assert all(one.times == 3 and len(one.groups[0]) == 2 for one in surplus)
    with pytest.raises(AssertionError, match="all_reduce"):
        assert_holds(spec, found)


OTHERS = {
    "rest 1": (segment(rest=1), {}),
    "rest 2": (segment(rest=2), {}),
    "rest 3": (segment(rest=3), {}),
    "kept after forward": (segment(fwd=1), {}),
    "kept after backward": (segment(bwd=1), {}),
    "ahead": (segment(prefetch=True), {}),
    "tail": (segment(), {"tail_layers": 3, "tail_chunks": 2}),
    "split embedding": (segment(), {"embedding": SPLIT}),
    "split head": (segment(), {"head": SPLIT}),
    "resident head": (segment(), {"head": RESIDENT}),
    "sharded adapters": (segment(), {"adapters": plans.AdapterState.SHARDED}),
    "more microbatches": (segment(), {"accumulation": 2}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_plan_has_other_collectives(name):
    one_segment, settings = OTHERS[name]
    nothing_kept = make_spec("2x2x2", [segment()], microbatch=2)
    other = make_spec("2x2x2", [one_segment], **{"microbatch": 2, **settings})
    assert Implied(spec=nothing_kept).all != Implied(spec=other).all
    with pytest.raises(AssertionError):
        assert_holds(nothing_kept, collectives.traced(trace(other).jaxpr))


def test_forward_and_backward_gathers_are_told_apart():
    """Also those that `prefetch` puts outside of the loops."""
    after_forward, after_backward = (
        make_spec("2x2x2", [segment(prefetch=True, **keep)])
        for keep in ({"fwd": 2}, {"bwd": 2})
    )
    assert moved_between(trace(after_forward)) == moved_between(trace(after_backward))
    with pytest.raises(AssertionError, match="main forward"):
        assert_holds(after_backward, collectives.traced(trace(after_forward).jaxpr))


def tree_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


COMPILED = {
    "half at rest": ([segment(rest=1)], {}),
    "kept": (
        [segment(2, fwd=1, bwd=2), segment(1, bwd=1)],
        {"tail_layers": 1, "tail_chunks": 2, "microbatch": 2},
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_step_moves_the_lowered_bytes_and_reuses_what_is_donated(name):
    segments, settings = COMPILED[name]
    spec = make_spec("2x2x2", segments, **settings)
    arguments = engine.abstract_arguments(
        spec, OPTIMIZER, max_length=TOKENS, dtype=jnp.float32
    )
    traced = trace(spec)
    compiled = traced.lower().compile()
    moved = collectives.total_bytes(hlo_programs.collectives(compiled.as_text()))
    assert moved == collectives.total_bytes(collectives.traced(traced.jaxpr))
    arena_bytes = tree_bytes(arguments.arenas) // spec.mesh.size
    reused = compiled.memory_analysis().alias_size_in_bytes
    assert reused == tree_bytes(arguments.state) + arena_bytes


def test_state_and_arenas_are_donated_and_nothing_else():
    traced = trace(make_spec("2x2x2", [segment(1, bwd=1), segment(2)], **TAIL))
    state, weights, batch, arenas = traced.args_info[0]
    assert arenas.keys() == {"main"}
    assert all(leaf.donated for leaf in jax.tree.leaves((state, arenas)))
    assert not any(leaf.donated for leaf in jax.tree.leaves((weights, batch)))


def test_groups_list_the_first_axis_slowest():
    shape = {"tier0": 2, "tier1": 2, "tier2": 2}
    assert collectives.groups_of(("tier2", "tier1"), shape) == (
        (0, 2, 1, 3),
        (4, 6, 5, 7),
    )
    assert collectives.groups_of(("tier0",), shape) == ((0, 4), (1, 5), (2, 6), (3, 7))


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
        collectives.traced(traced.jaxpr)
    with pytest.raises(ValueError, match="loop of unknown length"):
        collectives.lowered(traced.lower().compiler_ir("stablehlo"))


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
