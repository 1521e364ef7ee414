import dataclasses

import pytest

from mtuner_jax.configs import ConfigError
from scripts.benchmarks import run_lists, run_records
from scripts.benchmarks.run_lists import Kind, ListedRun, RunList, Setting
from scripts.benchmarks.run_records import RunEvent, State

SETTING = Setting(
    name="slow", environment={}, pool_gib=40.0, capped=True, hardware="h200x8-pcie"
)
ONE, TWO, PEER = (
    ListedRun(name="one", kind=Kind.STEP, setting="slow", expected_s=10.0),
    ListedRun(name="two", kind=Kind.STEP, setting="slow", expected_s=20.0),
    ListedRun(name="peer", kind=Kind.PEER, setting="slow", expected_s=30.0),
)
LIST = RunList(
    mesh="2x2x2",
    num_devices=8,
    platform="gpu",
    settings=(SETTING,),
    runs=(ONE, TWO, PEER),
    unplanned=(("slow 7b", "too large"),),
)


@pytest.fixture
def writer(tmp_path):
    return run_records.Writer(tmp_path / "a.jsonl", LIST)


def progress(tmp_path):
    return run_records.read(LIST, [tmp_path])


def test_a_list_is_read_back_and_its_digest_tells_it_from_others(tmp_path):
    (tmp_path / run_lists.FILE).write_text(run_lists.FORMAT.to_json(LIST))
    assert run_lists.read(tmp_path) == LIST
    other = dataclasses.replace(LIST, runs=(ONE,))
    assert other.digest != LIST.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ('{"version": 0}', "version 0 is not 1"),
        ('{"version": 1}', "misses the field .*settings"),
        ("[]", "a JSON object, not list"),
    ],
)
def test_a_file_that_is_no_list_is_refused(text, message, tmp_path):
    (tmp_path / run_lists.FILE).write_text(text)
    with pytest.raises(ConfigError, match=message):
        run_lists.read(tmp_path)


def test_done_and_failed_runs_are_not_left(writer, tmp_path):
    writer.write(ONE, RunEvent.STARTED)
    writer.write(ONE, RunEvent.DONE, result={"step_ms": 3.0}, seconds=5.0)
    writer.write(TWO, RunEvent.STARTED)
    writer.write(TWO, RunEvent.FAILED, error="RESOURCE_EXHAUSTED", seconds=1.0)
    found = progress(tmp_path)
    assert found.left() == [PEER]
    assert found.result(ONE) == {"step_ms": 3.0}
    assert found.error(TWO) == "RESOURCE_EXHAUSTED"


def test_a_run_that_was_cut_off_is_tried_once_more_with_more_time(writer, tmp_path):
    writer.write(ONE, RunEvent.STARTED)
    assert progress(tmp_path).state(ONE) is State.OPEN  # the machine went away
    writer.write(ONE, RunEvent.CUT_OFF, seconds=100.0)
    assert progress(tmp_path).state(ONE) is State.OPEN
    assert progress(tmp_path).expected_s(ONE) == pytest.approx(130.0)
    writer.write(ONE, RunEvent.STARTED)
    assert progress(tmp_path).state(ONE) is State.CUT_OFF
    writer.write(ONE, RunEvent.DONE)
    assert progress(tmp_path).state(ONE) is State.DONE


@pytest.mark.parametrize(("seconds", "scale"), [(15.0, 1.5), (1.0, 0.5), (99.0, 3.0)])
def test_expectations_follow_runs_of_the_same_kind(seconds, scale, writer, tmp_path):
    writer.write(ONE, RunEvent.DONE, seconds=seconds)
    assert progress(tmp_path).expected_s(TWO) == scale * 20.0
    assert progress(tmp_path).expected_s(PEER) == 30.0


def test_results_that_lie_in_two_folders_count_once(writer, tmp_path):
    writer.write(ONE, RunEvent.STARTED)
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    writer.write(ONE, RunEvent.DONE)
    found = run_records.read(LIST, [copied, tmp_path, tmp_path / "missing"])
    assert [record.event for record in found.records] == [
        RunEvent.STARTED,
        RunEvent.DONE,
    ]


def test_a_line_that_was_not_finished_is_left_out(writer, tmp_path, caplog):
    writer.write(ONE, RunEvent.STARTED)
    with writer.path.open("a") as file:
        file.write('{"run": "on')
    assert len(progress(tmp_path).records) == 1
    assert "line 2 is left out" in caplog.text


def test_results_of_another_list_are_refused(writer, tmp_path):
    writer.write(ONE, RunEvent.STARTED)
    other = dataclasses.replace(LIST, mesh="2x4")
    with pytest.raises(ConfigError, match=f"results of list {LIST.digest}, this one"):
        run_records.read(other, [tmp_path])
