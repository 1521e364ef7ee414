import dataclasses
import sys

import jax
import jax.numpy as jnp
import pytest

from models import llama, llama_configs, llama_sizes
from mtuner_jax import meshes, sizes
from mtuner_jax.adapters import lora
from mtuner_jax.configs import LoraConfig, OptimizerConfig
from mtuner_jax.engines import (
    aot,
    base_weights,
    elastic_step,
    hlo_programs,
    programs,
    step_specs,
)
from mtuner_jax.planning import plans
from mtuner_jax.training import optimizers

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not aot.available(), reason=aot.unavailable_reason()),
]

A100 = aot.TARGETS["a100-40gb"]
INPUT, GATES = plans.Saved.LAYER_INPUT, plans.Saved.ATTENTION_AND_GATES
SMALL = llama_configs.LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
)
TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step and what XLA allocated for it."""

    spec: elastic_step.StepSpec
    arguments: aot.StepArguments
    result: aot.CompileOnly


def segment(num_layers, rest=0, *, bwd=None, **settings):
    """A segment that keeps no copies unless told."""
    return plans.SegmentPlan(
        num_layers=num_layers,
        rest_axes=rest,
        fwd_keep_axes=rest,
        bwd_keep_axes=rest if bwd is None else bwd,
        **settings,
    )


def compile_plan(config, segments, *, tokens=TOKENS, target=A100, **lora_settings):
    """Compiles a step of 8 devices and one row each."""
    implementation = "cudnn" if aot.has_cudnn() else "xla"
    model = llama.Llama(config, attention_implementation=implementation)
    plan = plans.Plan(
        mesh_sizes=(2, 2, 2),
        segments=tuple(segments),
        microbatch=1,
        accumulation=1,
    )
    specs = lora.resolve(LoraConfig(r=16), model.linears(), num_layers=model.num_layers)
    spec = elastic_step.StepSpec(
        model=model,
        plan=plan,
        mesh=aot.topology_mesh(target, plan.mesh_sizes),
        adapters=specs,
    )
    optimizer = optimizers.adamw(OptimizerConfig(), lambda step: 1e-4)
    arguments = aot.abstract_arguments(
        spec, optimizer, max_length=tokens, dtype=jnp.bfloat16
    )
    result = aot.compile_train(spec, optimizer, max_length=tokens)
    return Compiled(spec=spec, arguments=arguments, result=result)


def layer_bytes(config):
    """bfloat16 bytes of one layer's linears, whole."""
    linears = llama.Llama(config).linears()
    return 2 * sum(linear.in_dim * linear.out_dim for linear in linears)


def argument_bytes(compiled, *, tokens):
    """Weights, adapters, two moments, batch and kept copies on one device, by hand.

    `sample_ids` is dropped by jit: it is not used without dropout.
    """
    spec = compiled.spec
    weights = base_weights.num_bytes(compiled.arguments.weights)
    adapters = 4 * lora.num_parameters(spec.adapters)
    counters = 4 * 3  # the step, Adam's count and the schedule's
    rows = spec.plan.accumulation * spec.plan.microbatch
    state = 3 * adapters + counters
    return weights + state + 5 * 4 * rows * tokens + arena_bytes(spec, tokens=tokens)


def layout_of(spec, *, tokens):
    return step_specs.arena_layout(spec, "main", max_length=tokens)


def arena_bytes(spec, *, tokens):
    """bfloat16 bytes of what crosses the border of steps."""
    layout = layout_of(spec, tokens=tokens)
    return 2 * layout.rows * layout.width if layout.has_copies else 0


def saved_bytes(config, *, tokens):
    """What a layer saves with `attention_and_gates` for one row, bfloat16."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    statistics = 4 * config.num_heads
    return tokens * (2 * (2 * q + 2 * kv + 2 * config.intermediate_size) + statistics)


@pytest.fixture(scope="module")
def nothing_kept():
    return compile_plan(SMALL, [segment(8)])


@pytest.fixture(scope="module")
def more_kept():
    return compile_plan(SMALL, [segment(8, 1, saved=GATES)])


def test_arguments_are_weights_adapters_moments_and_batch(nothing_kept):
    want = argument_bytes(nothing_kept, tokens=TOKENS)
    assert nothing_kept.result.allocated.arguments == want


def test_mesh_is_arranged_as_that_of_present_devices():
    got = aot.topology_mesh(A100, (2, 2, 2))
    want = meshes.make(meshes.parse("2x2x2"), jax.devices())
    assert got.axis_names == want.axis_names
    assert got.axis_types == want.axis_types
    assert [device.id for device in got.devices.flat] == list(range(8))


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_target_is_understood(target):
    mesh = aot.topology_mesh(aot.TARGETS[target], (2, 2))
    kinds = {device.device_kind for device in mesh.devices.flat}
    assert kinds == {aot.TARGETS[target].device}


def test_one_more_axis_at_rest_adds_one_more_share_of_the_weights(
    nothing_kept, more_kept
):
    more = (
        more_kept.result.allocated.arguments - nothing_kept.result.allocated.arguments
    )
    assert more == 8 * layer_bytes(SMALL) // 8


def test_saved_tensors_cost_their_size(nothing_kept, more_kept):
    more = (
        more_kept.result.allocated.temporaries
        - nothing_kept.result.allocated.temporaries
    )
    want = 8 * saved_bytes(SMALL, tokens=TOKENS)
    # Within one layer's worth: the backward pass has less to recompute.
    assert abs(more - want) <= want / 8


def test_gathers_move_the_bytes_of_the_plan(nothing_kept):
    moved = programs.total_bytes(hlo_programs.collectives(nothing_kept.result.hlo))
    tables = 2 * 2 * SMALL.vocab_size * SMALL.hidden_size
    assert moved["all_gather"] == 2 * 8 * layer_bytes(SMALL) + tables
    adapters = lora.num_parameters(nothing_kept.spec.adapters)
    assert moved["all_reduce"] == 4 * adapters + 2 * 4


def test_one_layer_segments_gather_twice():
    result = compile_plan(
        dataclasses.replace(SMALL, num_layers=2),
        [segment(1), segment(1)],
        target_modules=("q_proj",),
    ).result
    moved = programs.total_bytes(hlo_programs.collectives(result.hlo))
    tables = 2 * 2 * SMALL.vocab_size * SMALL.hidden_size
    assert moved["all_gather"] == 2 * 2 * layer_bytes(SMALL) + tables


@pytest.mark.parametrize("bwd_keep_axes", [1, 2, 3])
def test_copies_kept_after_backward_cost_their_arena(nothing_kept, bwd_keep_axes):
    kept = compile_plan(SMALL, [segment(8, bwd=bwd_keep_axes)])
    was, now = nothing_kept.result.allocated, kept.result.allocated
    assert now.arguments - was.arguments == arena_bytes(kept.spec, tokens=TOKENS) > 0
    assert now.arguments == argument_bytes(kept, tokens=TOKENS)
    assert now.outputs <= was.outputs + 8  # one more pointer: the arena is donated
    # Inputs were in an arena of the step's own before. Beyond that, at most the copy
    # on its way to the arena and the one at hand: within a layer's whole weights.
    arenas = [
        2 * layout.rows * layout.width
        for layout in (
            layout_of(compiled.spec, tokens=TOKENS) for compiled in (nothing_kept, kept)
        )
    ]
    surplus = now.total - was.total - (arenas[1] - arenas[0])
    assert 0 <= surplus <= layer_bytes(SMALL)


def test_copies_lie_where_layer_inputs_lay():
    """Long rows: inputs are larger than copies, which then cost next to nothing."""
    was, now = (
        compile_plan(SMALL, [segment(8, bwd=axes)], tokens=4096).result.allocated
        for axes in (0, 1)
    )
    copies = 8 * layer_bytes(SMALL) // 4
    assert now.total - was.total <= copies / 3
    assert now.total - was.total <= 0.03 * was.total


@pytest.mark.parametrize(
    ("bwd_keep_axes", "saved"),
    [
        (0, INPUT),
        (0, GATES),
        (1, INPUT),
    ],
)
def test_one_layer_segments_need_hardly_more_than_one_segment(bwd_keep_axes, saved):
    """Loops of one trip are unrolled; XLA must not gather or recompute early."""
    config = dataclasses.replace(llama_sizes.SIZES["llama2-7b"], num_layers=4)
    settings = {"bwd": bwd_keep_axes, "saved": saved}
    together, apart = (
        compile_plan(config, segments, tokens=2048).result.allocated.temporaries
        for segments in ([segment(4, **settings)], 4 * [segment(1, **settings)])
    )
    assert apart <= 1.5 * together


GRID = {
    f"{name} {saved} {target}": (name, saved, target)
    for name in ("llama2-7b", "llama2-13b", "llama2-70b")
    for saved in (INPUT, GATES)
    for target in ("a100-40gb",)
}


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID)
def test_published_shapes_need_what_the_plan_says(case, capsys):
    name, saved, target = GRID[case]
    config = llama_sizes.SIZES[name]
    compiled = compile_plan(
        config,
        [segment(config.num_layers, saved=saved)],
        tokens=4096,
        target=aot.TARGETS[target],
    )
    allocated = compiled.result.allocated
    assert allocated.arguments == argument_bytes(compiled, tokens=4096)
    kept = config.num_layers * 2 * 4096 * config.hidden_size
    if saved is GATES:
        kept += config.num_layers * saved_bytes(config, tokens=4096)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{case}: {sizes.gib(allocated.total)} = "
            f"{sizes.gib(allocated.arguments)} inputs + "
            f"{sizes.gib(allocated.temporaries)} temporaries "
            f"({sizes.gib(kept)} saved); cuDNN "
            f"{sizes.gib(compiled.result.cudnn_workspace_bytes)}; "
            f"{compiled.result.compile_s:.0f} s\n"
        )
    # The rest is two layers in flight, logits, gradients: at most five whole layers
    # and three copies of the adapters.
    adapters = 4 * lora.num_parameters(compiled.spec.adapters)
    tables = 2 * 2 * config.vocab_size * config.hidden_size
    limit = kept + 5 * layer_bytes(config) + 3 * adapters + tables
    assert kept < allocated.temporaries < limit
