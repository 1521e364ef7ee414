import dataclasses
import io
import json
import logging
import math

import pytest

from mtuner_jax import configs
from mtuner_jax.training import metrics, reporters, run_dirs

RATES = metrics.Rates(num_devices=8, flops_per_token=1.0, peak_flops_per_s=None)
CONFIG = configs.RunConfig(report_to="none", plot_loss=False, logging_steps=2)


def record(step, loss=2.0):
    return metrics.StepRecord(
        step=step,
        epoch=0.1 * step,
        loss=loss,
        lr=1e-4,
        grad_norm=0.5,
        tokens=1000,
        trained_tokens=400,
        step_time=0.5,
        data_time=0.01,
    )


@pytest.fixture
def run(tmp_path):
    run = run_dirs.claim(str(tmp_path / "demo"), resume_from=None)
    run.root.mkdir()
    return run


def reporter(run, config=CONFIG, **changes):
    options = {"rates": RATES, "total_steps": 5, **changes}
    return reporters.Reporter(run, config, **options)


def test_every_step_is_in_the_file_and_every_second_on_the_console(run, caplog):
    caplog.set_level(logging.INFO)
    with reporter(run) as report:
        for step in range(1, 6):
            report.step(record(step))
        report.evaluation(metrics.EvalRecord(step=5, eval_loss=1.5, eval_tokens=1234))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 5]
    assert [line["total_tokens"] for line in lines[:5]] == [1e3, 2e3, 3e3, 4e3, 5e3]
    shown = [message for message in caplog.messages if message.startswith("step")]
    assert [message.split()[1] for message in shown] == ["2/5", "4/5", "5/5", "5"]
    assert "loss 2.0000  lr 1.00e-04  grad_norm 0.500  2,000 tok/s  0.50 s" in shown[0]
    assert "eval_loss 1.5000  eval_perplexity 4.48  (1,234 tokens)" in shown[-1]


def test_a_resumed_run_goes_on_counting(run):
    with reporter(run) as report:
        for step in (1, 2, 3):
            report.step(record(step))
    with reporter(run, start_step=2) as report:
        assert report.step(record(3)).total_tokens == 3000
    assert [line["step"] for line in metrics.read(run.metrics)] == [1, 2, 3]


def test_a_loss_that_is_not_finite_ends_the_run_and_the_curve_so_far_is_drawn(run):
    config = dataclasses.replace(CONFIG, plot_loss=True)
    with (
        pytest.raises(metrics.NonFiniteError, match="step 2: loss=nan"),
        reporter(run, config) as report,
    ):
        report.step(record(1))
        report.step(record(2, loss=math.nan))
    assert len(metrics.read(run.metrics)) == 1
    assert run.loss_plot.read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_an_event_file_and_none_switches_it_off(run):
    pytest.importorskip("tensorboardX")
    with reporter(run) as report:
        report.step(record(1))
    assert not run.tensorboard.exists()
    with reporter(run, dataclasses.replace(CONFIG, report_to="tensorboard")) as report:
        report.step(record(1))
        report.evaluation(metrics.EvalRecord(step=1, eval_loss=1.5, eval_tokens=1))
    (events,) = run.tensorboard.glob("events.out.tfevents.*")
    content = events.read_bytes()
    for tag in (b"train/loss", b"train/tokens_per_sec", b"eval/perplexity"):
        assert tag in content
    assert b"train/mfu" not in content


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "has_bar"), [(Terminal, True), (io.StringIO, False)]
)
def test_a_bar_is_drawn_on_a_terminal_only(stream, has_bar, caplog):
    caplog.set_level(logging.INFO)
    output = stream()
    console = reporters._Console(
        total_steps=4, start_step=2, logging_steps=1, stream=output
    )
    for step in (3, 4):
        console.step(RATES.fill(record(step), tokens_before=0))
    console.close()
    assert ("loss 2.0000, 2,000 tok/s" in output.getvalue()) is has_bar
    assert ("4/4" in output.getvalue()) is has_bar
    assert [getattr(line, "file_only", False) for line in caplog.records] == [
        has_bar
    ] * 2
