import json
import pathlib
import subprocess
import sys

from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import timelines
from scripts import plot as script
from tests.small_plans import PLAN, PLAYED

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "plot.py"


def plot(*arguments, cwd):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(SCRIPT.parents[1])},
    )


def make_run(folder):
    folder.mkdir()
    lines = [json.dumps({"step": i, "loss": 2.0 / i}) for i in range(1, 4)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_one_run_gets_its_plot_and_two_are_compared(tmp_path):
    a = make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    done = plot(a, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (a / "training_loss.png").exists()
    assert plot("a", "b", "--output", "c.png", cwd=tmp_path).returncode == 0
    assert (tmp_path / "c.png").exists()


def test_a_folder_without_losses_is_an_error(tmp_path):
    done = plot(tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "metrics.jsonl holds no losses" in done.stderr


def test_a_runs_plan_is_drawn_into_its_folder(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert script.main([str(run)]) == 0
    assert "run has no plan.json and no timeline.json" in capsys.readouterr().out
    (run / "plan.json").write_text(plans.to_json(PLAN))
    (run / "timeline.json").write_text(timelines.to_json(PLAYED))
    assert script.main([str(run), "--microbatch", "1"]) == 0
    assert (run / "plan.png").exists()
    assert script.main([str(run), "--microbatch", "7"]) == 2
    assert "microbatch=7: the plan has 2" in capsys.readouterr().err
