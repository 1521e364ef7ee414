"""A wait that does not end is told with its remedy."""

import logging
import threading
import time
import types

import pytest

from mtuner_jax.training import watchdogs


def test_a_slow_wait_is_told_while_it_lasts_and_a_quick_one_is_not():
    told = []
    with watchdogs.Watchdog(0.1, lambda *what: told.append(what)) as watchdog:
        with watchdog.waiting("step 1"):
            pass
        with watchdog.waiting("step 2"):
            time.sleep(0.15)
    ((what, waited_s),) = told  # the next time would be after twice as long
    assert what == "step 2" and waited_s >= 0.1


def test_what_took_long_before_may_take_three_times_as_long():
    told = []
    with watchdogs.Watchdog(0.05, lambda *what: told.append(what)) as watchdog:
        with watchdog.waiting("step 1"):
            time.sleep(0.2)
        told.clear()
        with watchdog.waiting("step 2"):
            time.sleep(0.3)
    assert not told


def test_nothing_runs_where_it_is_switched_off():
    before = threading.active_count()
    with watchdogs.Watchdog(0, pytest.fail) as watchdog, watchdog.waiting("step 1"):
        assert threading.active_count() == before


def test_the_thread_ends_with_the_loop_also_after_an_error():
    before = threading.active_count()
    with (
        pytest.raises(RuntimeError),
        watchdogs.Watchdog(60, pytest.fail) as watchdog,
        watchdog.waiting("step 1"),
    ):
        raise RuntimeError
    assert threading.active_count() == before


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_remedy_is_for_several_gpus(platform, caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    watchdogs.warn([types.SimpleNamespace(platform=platform)], "step 1", 300.0)
    assert caplog.messages[0].startswith("step 1 has not ended after 5 minutes")
    assert ("start again with NCCL_P2P_DISABLE=1" in caplog.text) == (platform == "gpu")
