import json
import pathlib
import subprocess
import sys

import jax
import pytest

from mtuner_jax import configs
from mtuner_jax.checkpoints import step_dirs
from mtuner_jax.settings import cli
from mtuner_jax.training import run_dirs


def add_checkpoint(run, step):
    path = run / "checkpoints" / str(step)
    for item in ("state", "data", "meta"):
        (path / item).mkdir(parents=True)
    (path / "commit_success.txt").touch()
    (path / "meta" / "metadata").write_text(json.dumps({"format": step_dirs.FORMAT}))
    return path


def claim(root, asked):
    return run_dirs.claim(str(root), resume_from=step_dirs.find(asked, root))


def test_a_new_folder_and_one_without_checkpoints_are_free(tmp_path):
    run = claim(tmp_path / "a" / "b", "auto")
    assert not run.root.parent.exists()  # it is not accepted yet
    run.root.mkdir(parents=True)
    run.config.write_text("seed: 1\n")
    assert claim(run.root, "none") == run


def test_a_run_with_checkpoints_goes_on_or_is_refused(tmp_path):
    add_checkpoint(tmp_path, 3)
    path = add_checkpoint(tmp_path, 7)
    assert claim(tmp_path, "auto").checkpoints == tmp_path / "checkpoints"
    assert claim(tmp_path, str(path)).root == tmp_path
    with pytest.raises(
        configs.ConfigError, match=r"another run's checkpoints up to step 7: go on from"
    ):
        claim(tmp_path, "none")


def test_going_on_from_another_runs_checkpoint_needs_a_folder_without_any(tmp_path):
    other = add_checkpoint(tmp_path / "other", 5)
    assert claim(tmp_path / "new", str(other)).root == tmp_path / "new"
    add_checkpoint(tmp_path / "used", 1)
    with pytest.raises(configs.ConfigError, match="choose another --output_dir"):
        claim(tmp_path / "used", str(other))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(configs.ConfigError, match="is a file"):
        run_dirs.claim(str(tmp_path / "file"), resume_from=None)


def test_the_written_config_parses_back_and_changes_are_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    run = claim(tmp_path, "auto")
    config = configs.RunConfig(max_steps=20, lora=configs.LoraConfig(r=4))
    run_dirs.write_config(run, config)
    assert cli.load_yaml(run.config, configs.RunConfig) == config
    assert not caplog.text
    run_dirs.write_config(run, configs.RunConfig(max_steps=40))
    assert "changed since the last start: max_steps 20 -> 40" in caplog.text
    assert "changed since the last start: lora.r 4 -> 16" in caplog.text


def test_run_info_names_versions_devices_and_command_and_keeps_earlier_starts(tmp_path):
    run = claim(tmp_path, "auto")
    run_dirs.write_info(run, ["train.py", "--seed", "1"])
    run_dirs.write_info(run, ["train.py", "--seed", "2"])
    info = json.loads(run.info.read_text())
    assert info["argv"] == ["train.py", "--seed", "2"]
    assert [start["argv"][-1] for start in info["earlier_starts"]] == ["1"]
    assert info["versions"]["jax"] == jax.__version__
    assert info["python"] == sys.version.split()[0]
    assert info["devices"] == {"cpu": jax.device_count()}
    assert info["host"]
    root = pathlib.Path(run_dirs.__file__).parents[2]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    if git.returncode == 0 and (root / ".git").exists():
        assert info["git_commit"].removesuffix("+changes") == git.stdout.strip()
    else:
        assert info["git_commit"] is None
