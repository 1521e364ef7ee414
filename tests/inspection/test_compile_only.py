import dataclasses
import math
import sys

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from models import llama, llama_configs, llama_sizes
from mtuner_jax.adapters import lora
from mtuner_jax.configs import LoraConfig, OptimizerConfig
from mtuner_jax.devices import meshes, shardings
from mtuner_jax.engines.elastic import steps
from mtuner_jax.hardware import cards
from mtuner_jax.inspection import compile_only
from mtuner_jax.planning import plans, workloads
from mtuner_jax.planning.costs import forecasts
from mtuner_jax.training import optimizers
from tests.inspection import collectives, hlo_programs

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        not compile_only.available(), reason=compile_only.unavailable_reason()
    ),
]

A100 = cards.A100_PCIE
TARGETS = {"a100-40gb": A100, "h100-80gb": cards.H100_SXM}
INPUT, GATES = plans.Saved.LAYER_INPUT, plans.Saved.ATTENTION_AND_GATES
LINEARS, HOST = plans.Saved.LINEARS, plans.Saved.LAYER_INPUT_ON_HOST
RANK = 16
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
MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step, what the memory model says of it and what XLA allocated for it."""

    spec: steps.StepSpec
    forecast: forecasts.Forecast
    result: compile_only.CompileOnly

    @property
    def allocated(self):
        return self.result.allocated


def segment(num_layers, rest=0, *, fwd=None, bwd=None, **settings):
    """A segment that keeps no copies unless told."""
    return plans.SegmentPlan(
        num_layers=num_layers,
        rest_axes=rest,
        fwd_keep_axes=rest if fwd is None else fwd,
        bwd_keep_axes=rest if bwd is None else bwd,
        **settings,
    )


def ahead(*arguments, **settings):
    """A segment that gathers a layer ahead, as the planner's do."""
    return segment(*arguments, prefetch=True, **settings)


def workload(config, *, tokens, **lora_settings):
    """What the planner is told of a model."""
    model = llama.Llama(config)
    specs = lora.resolve(
        LoraConfig(r=RANK, **lora_settings), model.linears(), num_layers=1
    )
    adapted = {spec.module for spec in specs}
    layers = model.shapes()["layers"]
    return workloads.Workload(
        model="llama",
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        linears=tuple(
            workloads.LinearSizes(
                name=linear.module.rpartition(".")[2],
                in_dim=linear.in_dim,
                out_dim=linear.out_dim,
                reads=linear.reads,
                rank=RANK * (linear.module in adapted),
            )
            for linear in model.linears()
        ),
        replicated_layer_weights=sum(
            math.prod(shape[1:])
            for leaves in layers.values()
            for leaf, shape in leaves.items()
            if not any(shardings.LOGICAL_DIMS[leaf])
        ),
        max_length=tokens,
        global_batch_size=8,
        attention="cudnn" if compile_only.has_cudnn() else "xla",
    )


def compile_plan(config, segments, *, tokens=TOKENS, target=A100, **settings):
    """Compiles a step of 8 devices, one row each unless told."""
    targets = settings.pop("target_modules", "all-linear")
    implementation = "cudnn" if compile_only.has_cudnn() else "xla"
    model = llama.Llama(config, attention_implementation=implementation)
    plan = plans.Plan(
        mesh_sizes=(2, 2, 2),
        segments=tuple(segments),
        **{"microbatch": 1, "accumulation": 1, **settings},
    )
    chosen = LoraConfig(r=RANK, target_modules=targets)
    spec = steps.StepSpec(
        model=model,
        plan=plan,
        mesh=compile_only.topology_mesh(target, plan.mesh_sizes),
        adapters=lora.resolve(chosen, model.linears(), num_layers=model.num_layers),
    )
    optimizer = optimizers.adamw(OptimizerConfig(), lambda step: 1e-4)
    sizes = workload(config, tokens=tokens, target_modules=targets)
    return Compiled(
        spec=spec,
        forecast=forecasts.forecast(plan, sizes),
        result=compile_only.compile_train(spec, optimizer, max_length=tokens),
    )


def layer_bytes(config):
    """bfloat16 bytes of one layer's linears, whole."""
    linears = llama.Llama(config).linears()
    return 2 * sum(linear.in_dim * linear.out_dim for linear in linears)


def saved_bytes(config, *, tokens):
    """What a layer saves with `attention_and_gates` for one row, bfloat16."""
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    statistics = 4 * config.num_heads
    return tokens * (2 * (2 * q + 2 * kv + 2 * config.intermediate_size) + statistics)


@pytest.fixture(scope="module")
def nothing_kept():
    return compile_plan(SMALL, [ahead(8)])


@pytest.fixture(scope="module")
def more_kept():
    return compile_plan(SMALL, [ahead(8, 1, bwd=2, saved=GATES)])


@pytest.mark.parametrize("name", ["nothing_kept", "more_kept"])
def test_inputs_and_outputs_are_forecast_to_the_byte(name, request):
    compiled = request.getfixturevalue(name)
    assert compiled.allocated.arguments == compiled.forecast.arguments_bytes
    assert compiled.allocated.outputs == compiled.forecast.outputs


def test_mesh_is_arranged_as_that_of_present_devices():
    got = compile_only.topology_mesh(A100, (2, 2, 2))
    want = meshes.make(meshes.parse("2x2x2"), jax.devices())
    assert got.axis_names == want.axis_names
    assert got.axis_types == want.axis_types
    assert [device.id for device in got.devices.flat] == list(range(8))


@pytest.mark.parametrize("card", cards.CARDS, ids=lambda card: card.title)
def test_every_card_is_understood(card):
    mesh = compile_only.topology_mesh(compile_only.target_of(card.device), (2, 2))
    kinds = {device.device_kind for device in mesh.devices.flat}
    assert kinds == {card.device}
    capabilities = {device.compute_capability for device in mesh.devices.flat}
    assert capabilities == {"{}.{}".format(*card.xla.compute_capability)}


@pytest.mark.slow
@pytest.mark.parametrize("card", [cards.L40S, cards.RTX_4090], ids=lambda c: c.title)
def test_ada_cards_compile_as_their_forecast_says(card):
    compiled = compile_plan(SMALL, [ahead(8, 1, bwd=2, saved=GATES)], target=card)
    assert compiled.allocated.arguments == compiled.forecast.arguments_bytes
    assert compiled.allocated.outputs == compiled.forecast.outputs
    same = compile_plan(SMALL, [ahead(8, 1, bwd=2, saved=GATES)])
    assert compiled.allocated.total == pytest.approx(same.allocated.total, rel=0.02)


def test_a_cache_of_compiled_programs_is_left_alone(nothing_kept, tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    try:
        for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
            jax.config.update(name, value)
        optimizer = optimizers.adamw(OptimizerConfig(), lambda step: 1e-4)
        compile_only.compile_train(nothing_kept.spec, optimizer, max_length=TOKENS)
        assert not list(tmp_path.iterdir())  # a second reader could not load it
        jax.jit(lambda x: x * 3)(1.0)
        assert list(tmp_path.iterdir())  # what this process can run is kept as before
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_one_more_axis_at_rest_adds_one_more_share_of_the_weights(
    nothing_kept, more_kept
):
    more = more_kept.allocated.arguments - nothing_kept.allocated.arguments
    copies = more_kept.forecast.kept_arenas
    assert more == 8 * layer_bytes(SMALL) // 8 + copies
    assert copies >= 8 * layer_bytes(SMALL) // 2


def test_saved_tensors_cost_their_size(nothing_kept, more_kept):
    more = more_kept.allocated.temporaries - nothing_kept.allocated.temporaries
    # Layer inputs moved to the arena that is an input.
    more += nothing_kept.forecast.step_arenas - more_kept.forecast.step_arenas
    want = 8 * saved_bytes(SMALL, tokens=TOKENS)
    assert more_kept.forecast.saved == want
    # Within one layer's worth: the backward pass has less to recompute.
    assert abs(more - want) <= want / 8


def test_gathers_move_the_bytes_of_the_plan(nothing_kept):
    moved = collectives.total_bytes(hlo_programs.collectives(nothing_kept.result.hlo))
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
    moved = collectives.total_bytes(hlo_programs.collectives(result.hlo))
    tables = 2 * 2 * SMALL.vocab_size * SMALL.hidden_size
    assert moved["all_gather"] == 2 * 2 * layer_bytes(SMALL) + tables


@pytest.mark.slow
@pytest.mark.parametrize("bwd_keep_axes", [1, 2, 3])
def test_copies_kept_after_backward_cost_their_arena(nothing_kept, bwd_keep_axes):
    kept = compile_plan(SMALL, [ahead(8, bwd=bwd_keep_axes)])
    was, now = nothing_kept.allocated, kept.allocated
    assert now.arguments - was.arguments == kept.forecast.kept_arenas > 0
    assert now.outputs == kept.forecast.outputs  # one more pointer: it is donated
    # Inputs were in an arena of the step's own before. Beyond that, at most the copy
    # on its way to the arena and the one at hand: within a layer's whole weights.
    arenas = kept.forecast.kept_arenas - nothing_kept.forecast.step_arenas
    assert 0 <= now.total - was.total - arenas <= layer_bytes(SMALL)


@pytest.mark.slow
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
        compile_plan(config, segments, tokens=2048).allocated.temporaries
        for segments in ([segment(4, **settings)], 4 * [segment(1, **settings)])
    )
    assert apart <= 1.5 * together


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatch"),
    [("llama2-7b", 4), ("llama2-13b", 4), ("llama2-30b", 6), ("llama2-70b", 8)],
)
def test_copies_hide_in_the_memory_of_layer_inputs(name, microbatch):
    """Layer inputs are larger than copies here, so the arena hardly grows.

    Gathers are merged, as static plans of `train.py` have it on several GPUs.
    """
    config = llama_sizes.SIZES[name]
    was, now = (
        compile_plan(
            config,
            [ahead(config.num_layers, bwd=axes)],
            tokens=4096,
            microbatch=microbatch,
            merge_gathers=True,
        )
        for axes in (0, 1)
    )
    copies = config.num_layers * layer_bytes(config) // 4
    assert now.forecast.kept_arenas >= copies > 2**30
    assert now.allocated.total - was.allocated.total <= 512 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4])
def test_a_tail_in_parts_saves_what_the_formula_says(chunks):
    """H' = (l/L)(b/B) H + (1 - l/L) H, H being what is saved for the whole batch."""
    config = dataclasses.replace(llama_sizes.SIZES["llama2-7b"], num_layers=8)
    whole, parts = (
        compile_plan(
            config,
            2 * [ahead(4, saved=LINEARS)],
            tokens=2048,
            microbatch=4,
            tail_layers=4,
            tail_chunks=count,
        ).allocated.total
        for count in (1, chunks)
    )
    stream = 2 * 4 * 2048 * config.hidden_size  # the whole microbatch's, once
    gates = 4 * saved_bytes(config, tokens=2048)
    hidden = 2 * 4 * 2048 * config.intermediate_size
    saved = 8 * (gates + hidden + 4 * stream)  # with norms, residual and input
    want = saved / 2 / chunks + saved / 2
    boundary = 2 * stream  # the tail's input and its gradient
    got = saved - (whole - parts) - boundary
    # It can be less: what the tail saved is gone when the main part goes back.
    assert 0.85 * want <= got <= 1.1 * want


def kinds(layers):
    """{kind of plan: (segments, settings of the plan)}, for a model's layers."""
    most = layers * 3 // 4
    rest = layers - most
    return {
        "nothing kept": ([ahead(layers)], {}),
        "not ahead": ([segment(layers)], {}),
        "attention saved": ([ahead(layers, saved=plans.Saved.ATTENTION)], {}),
        "gates saved": ([ahead(layers, saved=GATES)], {}),
        "linears saved": ([ahead(layers, saved=LINEARS)], {}),
        "inputs on the host": ([segment(layers, saved=HOST)], {}),
        "inputs on the host ahead": ([ahead(layers, saved=HOST)], {}),
        "1/4 at rest": ([ahead(layers, 1)], {}),
        "1/4 kept forward": ([ahead(layers, fwd=1)], {}),
        "1/4 kept backward": ([ahead(layers, bwd=1)], {}),
        "some whole": ([segment(rest, 3), ahead(most)], {}),
        "some kept": ([ahead(rest, bwd=3), ahead(most - 2), ahead(2, fwd=3)], {}),
        "merged": ([ahead(layers)], {"merge_gathers": True}),
        "split": (
            [ahead(layers)],
            {
                "embedding": plans.Table.SPLIT,
                "head": plans.Table.SPLIT,
                "adapters": plans.AdapterState.SHARDED,
            },
        ),
        "tail in parts": (
            [ahead(most), ahead(rest, saved=LINEARS)],
            {"microbatch": 4, "tail_layers": rest, "tail_chunks": 4},
        ),
    }


EVERY = tuple(kinds(8))
FEW = ("nothing kept", "linears saved", "1/4 kept backward", "some kept")
GRID = [
    *(("llama2-7b", kind, 4096, "a100-40gb") for kind in EVERY),
    *(("llama2-13b", kind, 4096, "a100-40gb") for kind in FEW),
    *(("llama2-30b", kind, 4096, "a100-40gb") for kind in FEW),
    *(("llama2-70b", kind, 4096, "a100-40gb") for kind in EVERY),
    *(
        (name, kind, tokens, "a100-40gb")
        for name in ("llama2-7b", "llama2-70b")
        for tokens in (1024, 8192)
        for kind in ("nothing kept", "gates saved")
    ),
    *(
        (name, kind, 8192, "h100-80gb")
        for name in ("llama2-7b", "llama2-70b")
        for kind in ("nothing kept", "tail in parts")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "tokens", "target"), GRID, ids=lambda value: str(value)
)
def test_published_shapes_need_what_the_model_says(name, kind, tokens, target, capsys):
    config = llama_sizes.SIZES[name]
    segments, settings = kinds(config.num_layers)[kind]
    compiled = compile_plan(
        config, segments, tokens=tokens, target=TARGETS[target], **settings
    )
    got, want = compiled.forecast, compiled.allocated
    ratio = got.total_bytes / want.total
    with capsys.disabled():
        sys.stdout.write(
            f"\n| {name} | {tokens} | {target} | {kind} | {want.total / 2**30:.2f} | "
            f"{want.arguments / 2**30:.2f} | {got.total_bytes / 2**30:.2f} | "
            f"{ratio:.3f} | {compiled.result.compile_s:.0f} |\n"
        )
    assert want.arguments == got.arguments_bytes
    assert want.outputs == got.outputs
    assert 0.98 <= ratio <= 1.05
