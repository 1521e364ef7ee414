import json
import math

import jax
import pytest

from mtuner_jax.training import metrics


def record(step=1, **changes):
    values = {
        "epoch": 0.1,
        "loss": 2.0,
        "lr": 1e-4,
        "grad_norm": 0.5,
        "tokens": 1000,
        "trained_tokens": 400,
        "step_time": 0.5,
        "data_time": 0.01,
    }
    return metrics.StepRecord(step=step, **{**values, **changes})


RATES = metrics.Rates(num_devices=8, flops_per_token=3e9, peak_flops_per_s=1e12)


def test_rates_follow_the_documented_formulas():
    filled = RATES.fill(record(), tokens_before=5000)
    assert filled.tokens_per_sec == 2000
    assert filled.tokens_per_sec_per_device == 250
    assert filled.mfu == pytest.approx(3e9 * 1000 / 0.5 / (8 * 1e12))
    assert filled.total_tokens == 6000


def test_mfu_is_null_where_the_peak_is_unknown():
    rates = metrics.Rates(num_devices=8, flops_per_token=3e9, peak_flops_per_s=None)
    line = metrics.to_line(rates.fill(record(), tokens_before=0))
    assert json.loads(line)["mfu"] is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_ends_the_run(name, bad):
    metrics.check_finite(record())
    with pytest.raises(
        metrics.NonFiniteError, match=rf"step 7: {name}={bad}\. The run"
    ):
        metrics.check_finite(record(step=7, **{name: bad}))


def test_records_read_back_and_eval_lines_have_the_perplexity(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics.append(path, record())
    metrics.append(path, metrics.EvalRecord(step=1, eval_loss=1.5, eval_tokens=77))
    metrics.append(path, metrics.EvalRecord(step=1, eval_loss=1e4, eval_tokens=77))
    step, good, huge = metrics.read(path)
    assert list(step) == [
        "step",
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "trained_tokens",
        "step_time",
        "data_time",
        "peak_memory",
        "total_tokens",
        "tokens_per_sec",
        "tokens_per_sec_per_device",
        "mfu",
    ]
    assert good["eval_perplexity"] == pytest.approx(math.exp(1.5))
    assert huge["eval_perplexity"] is None


def test_after_a_resume_each_step_stands_once(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    total = 0
    for step in range(1, 6):
        filled = RATES.fill(record(step=step), tokens_before=total)
        total = filled.total_tokens
        metrics.append(path, filled)
    metrics.append(path, metrics.EvalRecord(step=5, eval_loss=1.0, eval_tokens=1))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert metrics.cut_after(path, 3) == 3000
    metrics.append(path, record(step=4))
    assert [line["step"] for line in metrics.read(path)] == [1, 2, 3, 4]
    assert f"{path}:7 is no record, passed over" in caplog.text


def test_a_new_run_has_nothing_to_cut(tmp_path):
    assert metrics.cut_after(tmp_path / "metrics.jsonl", 0) == 0
    assert not list(tmp_path.iterdir())


def test_summary_ignores_the_step_that_compiles():
    records = [
        {"step": 1, "loss": 3.0, "tokens_per_sec": 1.0},
        {"step": 2, "loss": 2.0, "tokens_per_sec": 100.0},
        {"step": 2, "eval_loss": 2.5},
        {"step": 3, "loss": 1.0, "tokens_per_sec": 200.0},
    ]
    assert metrics.summarize(records) == metrics.Summary(
        steps=3, first_loss=3.0, last_loss=1.0, eval_loss=2.5, tokens_per_sec=150.0
    )
    assert metrics.summarize([]).tokens_per_sec is None


def test_cpus_report_no_peak_memory():
    assert metrics.peak_memory(jax.devices("cpu")) is None
