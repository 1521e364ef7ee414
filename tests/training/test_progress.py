import json
import math

from mtuner_jax.training import metrics, progress


def after(*losses, threshold=0.0):
    found = progress.Progress()
    for step, loss in enumerate(losses):
        record = metrics.EvalRecord(step=step, eval_loss=loss, eval_tokens=1)
        found = found.after(record, threshold=threshold)
    return found


def test_the_lowest_loss_is_the_best_and_evaluations_since_are_counted():
    found = after(3.0, 2.0, 2.5, 2.0)
    assert (found.best_step, found.best_loss) == (1, 2.0)
    assert (found.evaluated, found.without_gain) == (3, 2)


def test_a_loss_that_falls_by_less_than_the_threshold_is_best_but_no_gain():
    found = after(3.0, 2.95, 2.92, threshold=0.1)
    assert (found.best_step, found.without_gain) == (2, 2)
    assert after(3.0, 2.95, 2.89, threshold=0.1).without_gain == 0


def test_a_loss_that_is_no_number_is_never_the_best():
    found = after(2.0, math.nan, math.inf)
    assert (found.best_step, found.without_gain) == (0, 2)


def test_progress_survives_json_before_and_after_evaluations():
    for found in (progress.Progress(), after(3.0, 2.0)):
        text = json.dumps(found.to_json(), allow_nan=False)
        assert progress.from_json(json.loads(text)) == found
