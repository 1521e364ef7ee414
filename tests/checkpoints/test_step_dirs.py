import json
import shutil

import pytest

from mtuner_jax import configs
from mtuner_jax.checkpoints import step_dirs


def make_step(directory, step, **meta):
    path = directory / str(step)
    for item in ("state", "data", "meta"):
        (path / item).mkdir(parents=True)
    (path / "commit_success.txt").write_text("")
    content = {
        "format": step_dirs.FORMAT,
        "step": step,
        "arrays": {},
        "run": {},
        **meta,
    }
    (path / "meta" / "metadata").write_text(json.dumps(content))
    return path


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (9, 100, 20):
        make_step(tmp_path, step)
    assert step_dirs.scan(tmp_path).complete == (9, 20, 100)


def test_everything_incomplete_is_passed_over_with_a_reason(tmp_path, caplog):
    make_step(tmp_path, 3)
    (tmp_path / "4").mkdir()
    (make_step(tmp_path, 5) / "commit_success.txt").unlink()
    shutil.rmtree(make_step(tmp_path, 6) / "meta")
    (make_step(tmp_path, 7) / "meta" / "metadata").write_text('{"format":')
    make_step(tmp_path, 8, format=99)
    (tmp_path / "9.orbax-checkpoint-tmp-17").mkdir()
    make_step(tmp_path, 10).rename(tmp_path / "0010")
    (tmp_path / "11").write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    assert step_dirs.newest(tmp_path) == tmp_path / "3"
    assert sorted(tmp_path.rglob("*")) == before
    skipped = step_dirs.scan(tmp_path).skipped
    assert skipped["4"] == "an empty folder"
    assert skipped["5"].endswith("commit_success.txt is missing")
    assert skipped["6"] == "meta missing: not written by mtuner-jax"
    assert skipped["7"].startswith("meta cannot be read")
    assert skipped["8"] == "its format is 99, this version reads 1"
    assert skipped["9.orbax-checkpoint-tmp-17"] == "a save that did not finish"
    assert skipped.keys() >= {"0010", "11"}
    assert f"{tmp_path / '4'} is not used: an empty folder" in caplog.text


def test_auto_and_none_and_paths_of_three_kinds(tmp_path):
    run = tmp_path / "run"
    first, second = (make_step(run / "checkpoints", step) for step in (1, 2))
    assert step_dirs.find("none", run) is None
    assert step_dirs.find("auto", run) == second
    assert step_dirs.find("auto", tmp_path / "other") is None
    assert step_dirs.find(str(first), run) == first
    assert step_dirs.find(str(run / "checkpoints"), run) == second
    assert step_dirs.find(str(run), tmp_path / "other") == second


def test_a_path_without_a_checkpoint_is_an_error_that_tells_what_there_is(tmp_path):
    make_step(tmp_path, 1)
    (tmp_path / "2").mkdir()
    with pytest.raises(
        configs.ConfigError, match=r"an empty folder\); complete steps beside it: \[1\]"
    ):
        step_dirs.find(str(tmp_path / "2"), tmp_path)
    with pytest.raises(configs.ConfigError, match="no such folder"):
        step_dirs.find(str(tmp_path / "nowhere"), tmp_path)


def test_set_aside_never_overwrites(tmp_path):
    for _ in range(2):
        make_step(tmp_path, 1)
        step_dirs.set_aside(tmp_path / "1", reason="is old")
    assert {entry.name for entry in tmp_path.iterdir()} == {"1.aside-0", "1.aside-1"}


def test_delete_removes_the_whole_step(tmp_path):
    step_dirs.delete(make_step(tmp_path, 1))
    assert not list(tmp_path.iterdir())
