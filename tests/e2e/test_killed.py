"""A run that is killed with -9, again and again, ends as one that never was."""

import os
import random
import signal
import time

import pytest

from tests import tiny_runs

CHANGES = {"max_steps": 40, "save_total_limit": 2}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return tiny_runs.workshop(tmp_path_factory.mktemp("workshop"))


def kill(workshop, name, *, step, delay_s):
    """Starts the run and kills it a moment after a step was recorded."""
    process = tiny_runs.start(workshop, name, **CHANGES)
    path = workshop / name / "metrics.jsonl"
    while process.poll() is None and len(lines(path)) < step:
        time.sleep(0.002)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0), told


def lines(path):
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def check(workshop, moments):
    """The curve and the adapter are those of a run that was never killed."""
    os.environ["MTUNER_CACHE_DIR"] = str(workshop / "cache")
    assert tiny_runs.train(workshop, "whole", **CHANGES) == 0
    for step, delay_s in moments:
        kill(workshop, "killed", step=step, delay_s=delay_s)
    assert tiny_runs.train(workshop, "killed", **CHANGES) == 0
    whole, killed = (workshop / name for name in ("whole", "killed"))
    assert tiny_runs.curve(killed) == tiny_runs.curve(whole)
    file = "adapter/adapter_model.safetensors"
    assert (killed / file).read_bytes() == (whole / file).read_bytes()


def test_a_run_killed_twice_ends_as_one_that_never_was(workshop):
    check(workshop, [(3, 0.01), (12, 0.03)])


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments_ends_as_one_that_never_was(tmp_path):
    chance = random.Random(20)
    workshop = tiny_runs.workshop(tmp_path)
    steps = sorted(chance.randint(0, 36) for _ in range(20))
    moments = [(step, chance.uniform(0, 0.1 if step else 6)) for step in steps]
    check(workshop, moments)
