import math

import pytest

from mtuner_jax.plots import loss_plots

PNG = b"\x89PNG\r\n\x1a\n"


def test_smoothing_of_a_constant_is_the_constant():
    assert loss_plots.smooth([2.0] * 5, half_life=3) == pytest.approx([2.0] * 5)


def test_smoothing_starts_at_the_first_value_and_follows():
    means = loss_plots.smooth([4.0, 0.0, 0.0], half_life=1)
    assert means == pytest.approx([4.0, 4 / 3, 4 / 7])


def test_smoothing_passes_over_what_is_not_finite():
    means = loss_plots.smooth([math.nan, 2.0, math.nan], half_life=2)
    assert math.isnan(means[0])
    assert means[1:] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("num_steps", [0, 1, 9, 50])
def test_runs_of_any_length_are_drawn(tmp_path, num_steps):
    records = [{"step": i + 1, "loss": 3.0 / (i + 1)} for i in range(num_steps)]
    records += [{"step": num_steps, "eval_loss": 1.0}, {"step": 99, "eval_loss": None}]
    path = tmp_path / "loss.png"
    loss_plots.write(path, {"a": records, "b": records[: num_steps // 2]})
    assert path.read_bytes().startswith(PNG)
