import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.calibration import benches, calibrations, links, sections
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from scripts import calibrate

SIZES = dataclasses.replace(
    benches.SMALL,
    tokens=(8, 16),
    hidden=16,
    intermediate=32,
    num_heads=2,
    head_dim=8,
    row_tokens=8,
    gather_bytes=(2**10, 2**14),
    host_bytes=2**12,
    run_s=1e-5,
    repeats=1,
)


def bench(mesh, **sizes):
    sizes = dataclasses.replace(SIZES, **sizes)
    devices = meshes.make(meshes.parse(mesh), jax.devices())
    return calibrate.bench_on(devices, sizes, memory_fraction=0.0)


def calibration(base=None, stamp="now"):
    return calibrations.Calibration(
        bench=bench("2x2x2"),
        name="mine",
        path=pathlib.Path("mine.json"),
        base=base,
        stamp=stamp,
    )


@pytest.fixture(scope="module")
def results():
    return list(sections.measure(bench("2x2x2")))


def test_every_section_works_on_eight_cpu_devices(results):
    assert [section.name for section in results] == list(sections.SECTIONS)
    assert [section.error for section in results] == [""] * len(results)
    figures = {field for section in results for field in section.figures}
    assert figures == set(machines.FIGURES) - {"reserve_bytes"}


def test_a_hosts_memory_is_what_its_container_may_take(tmp_path):
    limit = tmp_path / "memory.max"
    whole = sections.host_bytes(limit=limit)
    assert whole > 2**28
    for text, want in (("max\n", whole), ("12345678\n", 12345678), ("9" * 20, whole)):
        limit.write_text(text)
        assert sections.host_bytes(limit=limit) == want


def test_a_calibration_is_a_machine_that_is_found_again(results, tmp_path):
    described = calibrations.describe(calibration(stamp="a day, 8 x cpu"), results)
    machines.write(tmp_path / "mine.json", described)
    found = machines.find("mine", mesh_sizes=(2, 2, 2), directory=tmp_path)
    assert found == described
    assert found.device == "cpu"
    assert len(found.links) == 3
    assert [tokens for tokens, _ in found.matmul_flops_per_s] == [8, 16]
    assert found.sources["links"] == "measured: a day, 8 x cpu"
    assert found.sources["reserve_bytes"].startswith("assumed:")
    assert found.sources.keys() == set(machines.FIGURES)


def test_single_measurements_are_kept(results):
    details = {section.name: section.details for section in results}
    json.dumps(details)
    received = {
        axis: [count for count, _ in found["received_bytes_and_s"]]
        for axis, found in details["links"].items()
    }
    assert received == {
        "tier0": [2**10 * 7 // 8, 2**14 * 7 // 8],
        "tier1": [2**10 * 3 // 4, 2**14 * 3 // 4],
        "tier2": [2**10 // 2, 2**14 // 2],
    }
    assert details["layer"]["tokens"] == 8
    assert details["layer"]["forward_s"] > 0.0


def test_one_device_has_no_links():
    names = ("memory", "links", "overlap", "host")
    memory, links, overlap, host = sections.measure(bench("1"), names)
    assert not any(section.error for section in (memory, links, overlap, host))
    assert links.figures == {"links": ()}
    assert overlap.figures == {"overlap_slowdown": 1.0}


def test_a_section_that_fails_leaves_the_others_their_results():
    broken = bench("2", gather_bytes=())
    names = ("links", "overlap", "memory", "kernel")
    links, overlap, memory, kernel = sections.measure(broken, names)
    assert (
        links.error.startswith("MeasurementError: a link is fitted to two sizes")
        and not links.figures
    )
    assert "section links has no result" in overlap.error
    assert not memory.error and not kernel.error
    assert kernel.figures["kernel_s"] > 0.0


def test_a_rate_above_the_peak_of_the_card_is_refused():
    rates = {"matmul_flops_per_s": ((8, 1e12), (16, 3e12))}
    section = benches.Section(figures=rates)
    with pytest.raises(benches.MeasurementError, match=r"3e\+12 .* peak is 2e\+12"):
        sections._check_rates(section, 2e12)
    sections._check_rates(section, 4e12)
    sections._check_rates(section, None)
    sections._check_rates(benches.Section(), 2e12)


def test_what_failed_is_taken_from_the_preset_or_is_an_error(results):
    kept = [section for section in results if section.name not in ("links", "host")]
    base = machines.preset("pcie8")
    described = calibrations.describe(calibration(base=base), kept)
    assert described.links == base.links
    assert described.host_bytes_per_s == base.host_bytes_per_s
    text = f"assumed: not measured, as in pcie8 ({base.sources['links']})"
    assert described.sources["links"] == text
    assert described.sources["kernel_s"] == "measured: now"
    with pytest.raises(ConfigError, match="not measured in host_bytes_per_s, links"):
        calibrations.describe(calibration(), kept)


@pytest.mark.parametrize("latency_s", [0.0, 2e-5])
def test_the_fit_recovers_a_latency_and_a_bandwidth(latency_s):
    points = [(size, latency_s + size / 25e9) for size in (2**20, 2**24, 2**29)]
    link = links.fit_link(points)
    assert link.bytes_per_s == pytest.approx(25e9, rel=1e-9)
    assert link.latency_s == pytest.approx(latency_s, abs=1e-12)


@pytest.mark.parametrize("seconds", [(1e-6, 1e-4, 1e-2), (1e-2, 1e-3, 1e-5)])
def test_times_without_a_latency_give_a_bandwidth_alone(seconds):
    link = links.fit_link(list(zip((100, 1000, 10000), seconds, strict=True)))
    assert link.latency_s == 0.0
    assert 100 / max(seconds) < link.bytes_per_s < 10000 / min(seconds)


@pytest.mark.parametrize(
    ("both_s", "slowdown"), [(0.9, 1.0), (1.0, 1.0), (1.09, 1 / 0.9), (2.0, 2.0)]
)
def test_products_slow_down_by_what_they_lose_beside_gathers(both_s, slowdown):
    found = links.slowdown(1.0, 0.9, both_s)
    assert found == pytest.approx(slowdown)


def test_a_loop_does_all_of_its_products_and_gathers():
    where = bench("2x2")
    num, width = 3, 8
    weights = [where.random(i, (width, width), scale=0.3) for i in range(2)]
    operand = where.random(5, (16, width))
    shard = jnp.arange(4.0 * 2).reshape(4, 2)
    run = links._side_by_side(where, ("tier1",), num)
    product, kept, marks = run(links.LoopState(operand, shard, jnp.zeros(4)), weights)
    want = operand @ np.linalg.matrix_power(np.asarray(weights[0] @ weights[1]), num)
    np.testing.assert_allclose(product, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(kept, shard)
    # Each of the six gathers brings the last element of the pair of devices.
    np.testing.assert_array_equal(marks, [6 * 3.0, 6 * 3.0, 6 * 7.0, 6 * 7.0])


@pytest.mark.parametrize(
    ("products", "gathers", "counts"),
    [(True, False, (2, 0)), (False, True, (0, 2)), (True, True, (2, 2))],
)
def test_each_gather_stands_beside_one_product(products, gathers, counts):
    where = bench("2x2")
    weights = [where.random(i, (8, 8)) for i in range(2)]
    operand = where.random(5, (16, 8)) if products else None
    state = links._state(where, operand, 2 if gathers else 0)
    run = links._side_by_side(where, ("tier1",), 3)
    text = run.lower(state, weights).as_text()
    found = (text.count("stablehlo.dot_general"), text.count("stablehlo.all_gather"))
    assert found == counts


def test_calls_to_warm_up_are_not_timed():
    calls = []
    seconds = bench("1", repeats=4).call_s(calls.append, 1)
    assert len(calls) == 3 + 4
    assert 0.0 < seconds < 1.0


def test_a_loop_takes_longer_the_longer_it_is():
    def step(x, y):
        return x @ y

    x = jnp.ones((64, 64))
    where = bench("1", repeats=3)
    short, long = (num * where.looped_s(step, x, x, num=num) for num in (10, 10000))
    assert long > 10 * short


def test_the_length_of_a_loop_goes_by_what_a_step_should_take():
    where = bench("1", run_s=1.0)
    assert [where.num_steps(s) for s in (1e-9, 0.01, 100.0)] == [1000, 100, 4]
    assert math.prod(where.random(0, (3, 5)).shape) == 15
