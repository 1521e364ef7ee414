"""Where the adapter of `init_adapter` is found."""

import json

import pytest

from mtuner_jax.checkpoints import step_dirs
from mtuner_jax.configs import ConfigError
from mtuner_jax.runs import warm_starts


def add_adapter(folder):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def add_checkpoint(run, step):
    path = run / "checkpoints" / str(step)
    for item in ("state", "data", "meta"):
        (path / item).mkdir(parents=True)
    (path / "commit_success.txt").touch()
    (path / "meta/metadata").write_text(json.dumps({"format": step_dirs.FORMAT}))
    return add_adapter(path / "adapter")


def test_an_adapters_folder_a_run_and_a_checkpoint_may_be_named(tmp_path):
    adapter = add_adapter(tmp_path / "run/adapter")
    step = add_checkpoint(tmp_path / "run", 20)
    assert warm_starts.locate(str(tmp_path / "run")) == adapter
    assert warm_starts.locate(str(adapter)) == adapter
    assert warm_starts.locate(str(step.parent)) == step


def test_a_run_that_was_killed_has_the_adapter_of_its_newest_checkpoint(tmp_path):
    add_checkpoint(tmp_path, 9)
    step = add_checkpoint(tmp_path, 10)
    assert warm_starts.locate(str(tmp_path)) == step


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no adapter_config.json there, in adapter/"):
        warm_starts.locate(str(tmp_path))
