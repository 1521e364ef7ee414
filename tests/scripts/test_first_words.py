"""What a program says first, as a user starts it."""

import os
import pathlib
import subprocess
import sys

import pytest

from mtuner_jax.configs import LoraConfig, PlanConfig, RunConfig
from mtuner_jax.settings import programs
from scripts.benchmarks import bench_configs

ROOT = pathlib.Path(__file__).parents[2]
SLOW = {"jax", "jaxlib", "flax", "transformers", "torch", "orbax", "grain"}


@pytest.mark.parametrize("program", ["train", "plan", "bench"])
def test_a_wrong_flag_is_told_before_anything_slow_is_imported(program):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", f"scripts/{program}.py", "--seeed", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.splitlines()
    said = [line for line in lines if not line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in lines}
    assert done.returncode == 2
    assert said == [said[0]]
    assert said[0].startswith("error: --seeed: unknown setting seeed; ")
    assert "yaml" in imported
    assert imported.isdisjoint(SLOW)


def test_libraries_do_not_speak_before_a_program(monkeypatch):
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    monkeypatch.delenv(name, raising=False)
    assert programs.guarded(lambda: int(os.environ[name]) - 1) == 0


def test_planning_and_measuring_assume_what_training_does():
    run, lora = RunConfig(), LoraConfig()
    plan = PlanConfig()
    bench = bench_configs.parse(["--random_init"])
    for name in ("packing", "attention", "dtype", "memory_budget", "hardware", "mesh"):
        asked = getattr(run, name)
        assert (getattr(plan, name), getattr(bench, name)) == (asked, asked), name
    assert (plan.max_length, plan.lora) == (run.max_length, lora)
    assert (bench.r, bench.lora_dropout) == (lora.r, lora.lora_dropout)
