import pytest

from scripts.benchmarks import comparison_tables, run_records
from scripts.benchmarks.run_lists import Kind, ListedRun, RunList, Setting
from scripts.benchmarks.run_records import RunEvent

CASE = {
    "kind": Kind.STEP,
    "setting": "slow",
    "model": "llama2-70b",
    "max_length": 1024,
    "global_batch_size": 32,
}


def step(role, ms, communication_ms=0.0, **changed):
    return ListedRun(
        name=f"slow/llama2-70b/32x1024/{role}",
        roles=(role,),
        predicted_ms=ms,
        predicted_gib=38.0,
        predicted_communication_ms=communication_ms,
        **{**CASE, **changed},
    )


LINKS = ListedRun(name="slow/links", kind=Kind.LINKS, setting="slow")
PLANNED, STATIC, OTHER = (
    step("planned", 800.0),
    step("static fsdp", 1000.0),
    step("static hsdp-1/4", 1100.0),
)
FILLINGS = tuple(
    step(role, 900.0, communication_ms)
    for role, communication_ms in (
        ("nothing kept", 900.0),
        ("one ratio", 800.0),
        ("progressive", 500.0),
    )
)
NO_TAIL, TAIL = (
    step("no tail", 1200.0, global_batch_size=112),
    step("tail", 1000.0, global_batch_size=112),
)
PEER = ListedRun(
    name="slow/llama2-70b/1024/peer-zero3-1",
    roles=("zero3 + checkpointing",),
    **{**CASE, "kind": Kind.PEER, "global_batch_size": 128},
)
LIST = RunList(
    mesh="2x2x2",
    num_devices=8,
    platform="gpu",
    settings=(
        Setting(
            name="slow",
            environment={"NCCL_P2P_DISABLE": "1"},
            pool_gib=40.0,
            capped=True,
            hardware="h200x8-pcie",
        ),
    ),
    runs=(LINKS, PLANNED, STATIC, OTHER, *FILLINGS, NO_TAIL, TAIL, PEER),
    unplanned=(("slow llama2-70b 8 x 8192", "no plan fits: 50 GiB"),),
)


def result(ms, **more):
    found = {
        "step_ms": ms,
        "step_ms_min_max": [ms - 1, ms + 1],
        "steps": 3,
        "compiled_gib": 39.0,
        "device": "8 x NVIDIA H200",
        "versions": "jax 0.11.2",
    }
    return found | more


@pytest.fixture
def record(tmp_path):
    writer = run_records.Writer(tmp_path / "a.jsonl", LIST)

    def write(run, found=None, **fields):
        event = RunEvent.FAILED if "error" in fields else RunEvent.DONE
        fields |= {} if found is None else {"result": found}
        writer.write(run, event, **fields)

    return write


@pytest.fixture
def text(tmp_path):
    return lambda: comparison_tables.markdown(run_records.read(LIST, [tmp_path]))


def cells(text, section, first):
    """Cells of a section's first row that begins with this cell."""
    lines = text.partition(f"## {section}")[2].partition("\n## ")[0].splitlines()
    rows = ([c.strip() for c in line.strip("|").split("|")] for line in lines)
    return next(row for row in rows if row[0] == first)


def test_planned_stands_beside_the_fastest_static_plan_and_peer(record, text):
    record(PLANNED, result(820.0))
    record(STATIC, result(1100.0))
    record(OTHER, result(1025.0))
    batches = [
        {"batch": batch, "step_ms": 1.0, "tokens_per_s": rate, "peak_gib": 30.0}
        for batch, rate in ((2.0, 20000.0), (4.0, 32000.0), (8.0, 99000.0))
    ]
    record(PEER, {"batches": batches, "first_not": 16.0})
    row = cells(text(), "Planned against", "slow")
    assert row[1:5] == ["llama2-70b, 32 x 1024", "820.0", "1,025.0", "hsdp-1/4"]
    assert row[5:8] == ["1.25", "1.25", "39,961"]
    # Eight rows per device would be another global batch.
    assert row[8:] == ["32,000", "zero3 + checkpointing, 4", "1.25"]
    assert "| 16 | out of memory |" in text()


def test_without_any_result_everything_is_not_run_and_nothing_failed(text):
    found = text()
    assert cells(found, "Gathers", "slow")[2] == "not run"
    row = cells(found, "Planned against", "slow")
    assert row[2:4] == ["not run", "not run"] and row[8] == "not run"
    assert "failed" not in found
    assert "not run: slow llama2-70b: 32x1024/planned, 32x1024/static fsdp" in found
    assert "slow llama2-70b 8 x 8192: no plan fits (no plan fits: 50 GiB)" in found


def test_a_failure_is_told_with_its_error(record, text):
    record(PLANNED, error="RESOURCE_EXHAUSTED: out of\n memory " + "x" * 500)
    assert cells(text(), "Planned against", "slow")[2] == "failed"
    line = text().rpartition("32x1024/planned: failed, ")[2].splitlines()[0]
    assert line.startswith("RESOURCE_EXHAUSTED: out of memory x") and len(line) < 180


def test_gathers_stand_beside_the_papers(record, text):
    axes = {
        f"tier{place}": {
            "group": group,
            "received_bytes_and_s": [[1, 1.0], [7 * 10**9, 0.5]],
        }
        for place, group in enumerate((8, 4, 2))
    }
    record(LINKS, {"axes": axes})
    row = cells(text(), "Gathers", "slow")
    assert row[1:] == ["1/8", "14", "16", "16"]
    assert "| slow | 1/4 | 14 | 18.7 | 26 |" in text()


def test_communication_of_fillings_is_compared_with_nothing_kept(record, text):
    for run, ms in zip(FILLINGS, (1000.0, 900.0, 650.0), strict=True):
        more = {"communication_ms": ms, "exposed_ms": ms / 2}
        record(run, result(950.0, **more))
    lines = text().partition("## Filling")[2].splitlines()
    (progressive,) = (line for line in lines if "| progressive |" in line)
    assert progressive.endswith("| 650.0 | 325.0 | -35 % | -44 % | -41 % |")
    (one,) = (line for line in lines if "| one ratio |" in line)
    assert one.endswith("| -10 % | -11 % | -10 % |")


def test_a_tail_is_compared_with_none(record, text):
    record(NO_TAIL, result(1200.0))
    name = "slow llama2-70b, 112 x 1024"
    row = cells(text(), "Tail", name)
    assert row[1:] == ["1,200.0", "not run", "", "+20 %", "+12 %"]
    record(TAIL, result(1000.0))
    assert cells(text(), "Tail", name)[3] == "+20 %"


def test_predictions_stand_beside_what_was_measured(record, text):
    record(PLANNED, result(1000.0, measured_gib=39.5))
    row = cells(text(), "Predicted", "slow/llama2-70b/32x1024/planned")
    assert row[1:] == [
        *("1000.0 (999.0 - 1001.0)", "3", "800.0", "0.800"),
        *("39.0", "39.50", "38.0", "0.974"),
    ]
