import dataclasses

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware import machines
from mtuner_jax.hardware.machines import Hardware, Link
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import durations, forecasts, kernels, passes
from mtuner_jax.planning.plans import (
    AdapterState,
    Plan,
    Saved,
    SegmentPlan,
    StepChoices,
    Table,
)
from mtuner_jax.planning.sites import Site
from tests import small_plans

MACHINE = Hardware(
    name="round figures",
    device="card",
    mesh_sizes=(2, 2, 2),
    links=(
        Link(bytes_per_s=10e9, latency_s=1e-3),
        Link(bytes_per_s=20e9, latency_s=1e-4),
        Link(bytes_per_s=40e9, latency_s=1e-5),
    ),
    memory_bytes=2**36,
    pool_fraction=1.0,
    reserve_bytes=0,
    matmul_flops_per_s=((512, 100e12), (2048, 200e12)),
    attention_flops_per_s=100e12,
    memory_bytes_per_s=1e12,
    kernel_s=1e-6,
    host_bytes_per_s=5e9,
    overlap_slowdown=1.25,
    sources={},
)


SEVEN = small_plans.decoder(num_layers=32, rows=(2, 4096), **small_plans.SEVEN)
THIRTEEN = small_plans.decoder(
    num_layers=40, widths=(5120, 13824), heads=(40, 40), rows=(2, 4096)
)
SEVENTY = small_plans.decoder(
    num_layers=80, widths=(8192, 28672), heads=(64, 8), rows=(2, 4096)
)


def site_of(workload, *, rows=1, merge_gathers=True):
    axes = Axes(data=(2, 2, 2))
    return Site(workload=workload, axes=axes, rows=rows, merge_gathers=merge_gathers)


def layer(segment, *, rows=1, merge_gathers=True, workload=SEVEN, machine=MACHINE):
    site = site_of(workload, rows=rows, merge_gathers=merge_gathers)
    clock = durations.Clock(site=site, hardware=machine)
    return clock.layer(segment, forecasts.layer_bytes(site, segment))


def segment(rest=0, fwd_keep=0, bwd_keep=0, *, saved=Saved.LAYER_INPUT, prefetch=True):
    return SegmentPlan(
        num_layers=1,
        rest_axes=rest,
        fwd_keep_axes=fwd_keep,
        bwd_keep_axes=bwd_keep,
        saved=saved,
        prefetch=prefetch,
    )


def stages(phase):
    return [collective.axes for collective in phase.collectives]


@pytest.mark.parametrize(
    ("treatment", "forward", "backward"),
    [
        (segment(), [(0, 3)], [(0, 3)]),
        (segment(1, 1, 1), [(1, 3)], [(1, 3)]),
        (segment(3, 3, 3), [], []),
        (segment(0, 1, 0), [(0, 1), (1, 3)], [(1, 3)]),
        (segment(0, 0, 2), [(2, 3)], [(0, 2), (2, 3)]),
        (segment(0, 1, 2), [(2, 3)], [(1, 2), (2, 3)]),
        (segment(0, 2, 1), [(1, 2), (2, 3)], [(2, 3)]),
        (segment(0, 3, 3), [], []),
        (segment(0, 3, 0), [(0, 3)], []),
    ],
)
def test_a_copy_kept_in_between_splits_a_gather(treatment, forward, backward):
    found = layer(treatment)
    assert (stages(found.forward), stages(found.backward)) == (forward, backward)


def test_every_foreign_byte_is_received_once():
    whole = SEVEN.layer_weight_bytes
    for treatment in (segment(), segment(0, 1, 0), segment(0, 2, 0)):
        received = sum(c.received_bytes for c in layer(treatment).forward.collectives)
        assert received == whole - whole // 8


def test_a_gather_costs_what_its_slowest_axis_costs():
    (merged,) = layer(segment(1, 1, 1)).forward.collectives
    received = SEVEN.layer_weight_bytes * 3 // 4
    assert merged.received_bytes == received
    assert merged.seconds == pytest.approx(1e-4 + received / 20e9)
    (seven,) = layer(segment(1, 1, 1), merge_gathers=False).forward.collectives
    assert seven.seconds == pytest.approx(7e-4 + received / 20e9)


def test_an_axis_of_one_device_has_no_link():
    machine = dataclasses.replace(MACHINE, links=MACHINE.links[:1], mesh_sizes=(2,))
    assert durations.link(machine, Axes(data=(1, 2)), 1) == MACHINE.links[0]


def test_an_unknown_link_is_an_error():
    machine = dataclasses.replace(MACHINE, links=MACHINE.links[:1], mesh_sizes=(2,))
    with pytest.raises(ConfigError, match="describes 1 links, mesh 2x2 has 2 axes"):
        durations.link(machine, Axes(data=(2, 2)), 1)


@pytest.mark.parametrize(
    ("saved", "redone"),
    [
        (Saved.LINEARS, ()),
        (Saved.ATTENTION_AND_GATES, ("o_proj",)),
        (Saved.ATTENTION, ("o_proj", "gate_proj", "up_proj")),
        (
            Saved.LAYER_INPUT,
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
        ),
    ],
)
def test_what_is_not_saved_is_computed_again(saved, redone):
    workload = dataclasses.replace(
        SEVEN,
        linears=tuple(dataclasses.replace(one, rank=0) for one in SEVEN.linears),
    )
    machine = dataclasses.replace(
        MACHINE, kernel_s=0.0, memory_bytes_per_s=1e30, attention_flops_per_s=1e30
    )
    forward, backward = kernels.layer(site_of(workload), machine, saved)
    weights = {one.name: one.in_dim * one.out_dim for one in workload.linears}
    seconds = 2 * 4096 / 200e12
    assert forward == pytest.approx(seconds * sum(weights.values()))
    again = sum(weights[name] for name in redone)
    assert backward == pytest.approx(seconds * (sum(weights.values()) + again))


def test_attention_runs_again_only_where_it_is_not_saved():
    machine = dataclasses.replace(MACHINE, attention_flops_per_s=1.0)
    flops = 2 * 4096 * 4096 * 4096
    for saved, passes_of_attention in (
        (Saved.ATTENTION, 2.5),
        (Saved.LAYER_INPUT, 3.5),
    ):
        forward, backward = kernels.layer(site_of(SEVEN), machine, saved)
        assert forward == pytest.approx(flops, rel=1e-6)
        assert backward == pytest.approx(passes_of_attention * flops, rel=1e-6)


def test_few_tokens_reach_a_lower_rate():
    rates = [kernels.matmul_rate(MACHINE, n) for n in (1, 512, 1280, 2048, 9999)]
    assert rates == [100e12, 100e12, 150e12, 200e12, 200e12]


def test_an_input_on_the_host_is_sent_and_fetched():
    found = layer(segment(saved=Saved.LAYER_INPUT_ON_HOST))
    moved = 4096 * 4096 * 2
    for phase in (found.forward, found.backward):
        assert phase.host is not None
        assert phase.host.received_bytes == moved
        assert phase.host_s == pytest.approx(moved / 5e9)
    assert layer(segment()).forward.host_s == 0.0


@pytest.mark.parametrize("kind", ["gathered", "split", "resident"])
def test_tables_are_received_where_they_are_not_resident(kind):
    table = Table(kind)
    chosen = StepChoices(
        mesh_sizes=(2, 2, 2), microbatch=1, accumulation=1, embedding=table, head=table
    )
    found = durations.step(SEVEN, MACHINE, chosen)
    received = {
        "embed": sum(c.received_bytes for c in found.embed.collectives),
        "head": sum(c.received_bytes for c in found.head.collectives),
        "loss": sum(c.received_bytes for c in found.loss.collectives),
    }
    foreign = SEVEN.table_bytes * 7 // 8
    vectors = 7 * 4096 * 4096 * 2
    want = {
        "gathered": {"embed": foreign, "head": foreign, "loss": 0},
        "resident": {"embed": 0, "head": 0, "loss": 0},
        # Vectors once to look up, twice for the loss; beside them ids and sums.
        "split": {"embed": vectors, "head": 0, "loss": 2 * vectors},
    }[kind]
    for part, num_bytes in want.items():
        assert received[part] == pytest.approx(num_bytes, rel=0.02)


def test_gradients_are_reduced_once_however_adapters_are_held():
    received = []
    for adapters in AdapterState:
        chosen = StepChoices(
            mesh_sizes=(2, 2, 2), microbatch=1, accumulation=4, adapters=adapters
        )
        found = durations.step(SEVEN, MACHINE, chosen)
        collectives = found.start.collectives + found.update.collectives
        received.append(sum(c.received_bytes for c in collectives))
    assert received == [2 * 4 * SEVEN.num_adapter_weights * 7 // 8] * 2


def test_one_device_communicates_nothing():
    chosen = StepChoices(mesh_sizes=(1,), microbatch=1, accumulation=1)
    machine = dataclasses.replace(MACHINE, links=(), mesh_sizes=())
    found = durations.step(SEVEN, machine, chosen)
    phases = (found.embed, found.head, found.loss, found.start, found.update)
    assert sum(phase.link_s for phase in phases) == 0.0


def two_gpus(workload, parts, *, merge_gathers=True, saved=Saved.LAYER_INPUT, rows=1):
    """A plan of ((layers, rest, fwd_keep, bwd_keep), ...)."""
    return Plan(
        mesh_sizes=(2,),
        segments=tuple(
            dataclasses.replace(
                segment(*levels, saved=saved), num_layers=layers or workload.num_layers
            )
            for layers, *levels in parts
        ),
        microbatch=rows,
        accumulation=1,
        merge_gathers=merge_gathers,
    )


NOTHING = ((0, 0, 0, 0),)
# docs/benchmarks/h200-two-gpus.md: (machine, workload, plan, milliseconds).
MEASURED = (
    ("h200x2-pcie", SEVEN, two_gpus(SEVEN, NOTHING, merge_gathers=False), 661.7),
    ("h200x2-pcie", SEVEN, two_gpus(SEVEN, NOTHING), 565.3),
    ("h200x2-pcie", SEVEN, two_gpus(SEVEN, ((12, 0, 0, 1), (20, 0, 0, 0))), 507.5),
    ("h200x2-pcie", SEVEN, two_gpus(SEVEN, ((0, 0, 1, 0),)), 504.0),
    ("h200x2-pcie", SEVEN, two_gpus(SEVEN, ((16, 1, 1, 1), (16, 0, 0, 0))), 444.2),
    ("h200x2-pcie", SEVEN, two_gpus(SEVEN, ((0, 0, 0, 1),)), 405.1),
    (
        "h200x2-pcie",
        SEVEN,
        two_gpus(SEVEN, ((0, 1, 1, 1),), saved=Saved.ATTENTION_AND_GATES),
        292.8,
    ),
    ("h200x2", SEVEN, two_gpus(SEVEN, NOTHING), 362.5),
    ("h200x2-pcie", THIRTEEN, two_gpus(THIRTEEN, NOTHING), 1050.9),
    ("h200x2-pcie", THIRTEEN, two_gpus(THIRTEEN, NOTHING, rows=3), 1835.6),
    ("h200x2-pcie", SEVENTY, two_gpus(SEVENTY, NOTHING), 5854.2),
)


@pytest.mark.parametrize("row", range(len(MEASURED)))
def test_measured_steps_are_met_within_five_percent(row):
    machine, workload, plan, milliseconds = MEASURED[row]
    found = passes.step_s(plan, workload, machines.preset(machine))
    assert 1e3 * found == pytest.approx(milliseconds, rel=0.05)
