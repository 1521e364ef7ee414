"""Whole runs of a tiny model: stopped, refused, going on."""

import json
import logging
import os
import resource
import signal
import statistics
import threading
import time

import pytest

from mtuner_jax.checkpoints import step_dirs, store
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.training import logs, stopping
from tests import tiny_runs


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    os.environ["MTUNER_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    yield tiny_runs.workshop(tmp_path_factory.mktemp("workshop"))
    del os.environ["MTUNER_CACHE_DIR"]


@pytest.fixture(scope="module")
def finished(workshop):
    """A run of six steps that was never stopped."""
    assert tiny_runs.train(workshop, "finished") == 0
    return workshop / "finished"


def meanwhile(do, *, when):
    """Does something in a thread once a condition holds."""

    def watch():
        while not when():
            time.sleep(0.002)
        do()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def signal_after(run, *, lines, number, delay_s=0.0):
    """Sends this process a signal when a run has so many records."""

    def send():
        time.sleep(delay_s)
        os.kill(os.getpid(), number)

    path = run / "metrics.jsonl"
    return meanwhile(
        send,
        when=lambda: path.exists() and len(path.read_text().splitlines()) >= lines,
    )


def test_ctrl_c_while_training_saves_the_step_and_the_run_goes_on_bit_for_bit(
    workshop, finished, caplog
):
    caplog.set_level(logging.INFO, "mtuner_jax")
    name = "stopped"
    run, without = workshop / name, {"save_steps": 0, "max_steps": 10**6}
    thread = signal_after(run, lines=2, number=signal.SIGINT)
    assert tiny_runs.train(workshop, name, **without) == stopping.STOPPED
    thread.join()
    (step,) = step_dirs.scan(run / "checkpoints").complete
    assert (run / "adapter/adapter_model.safetensors").is_file()
    last = caplog.records[-1].message
    assert f"stopped by SIGINT after step {step} of 1000000, saved in" in last
    assert tiny_runs.train(workshop, name, max_steps=step + 2) == 0
    got, want = tiny_runs.curve(run), tiny_runs.curve(finished)
    both = min(len(got), len(want))
    assert got[:both] == want[:both]
    assert [record[0] for record in got] == list(range(1, step + 3))


def test_a_signal_in_an_evaluation_cuts_it_off_and_it_is_made_up_for(workshop):
    run = workshop / "evaluating"
    held_out = workshop / "held_out.jsonl"
    held_out.write_text("\n".join(tiny_runs.rows(1500, seed=1)))
    changes = {"eval_dataset": held_out, "eval_steps": 1, "save_steps": 0}
    thread = signal_after(run, lines=1, number=signal.SIGUSR1, delay_s=0.1)
    assert tiny_runs.train(workshop, "evaluating", **changes) == stopping.STOPPED
    thread.join()
    assert step_dirs.scan(run / "checkpoints").complete == (1,)
    assert tiny_runs.curve(run)[-1][0] == 1
    assert "eval_loss" not in (run / "metrics.jsonl").read_text()
    changes = {**changes, "max_eval_batches": 1, "max_steps": 2}
    assert tiny_runs.train(workshop, "evaluating", **changes) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    found = [("eval_loss" in record, record["step"]) for record in records]
    assert found == [(False, 1), (True, 1), (False, 2), (True, 2)]


def test_time_decides_when_to_save_where_save_steps_does_not(workshop, caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    run = workshop / "timed"
    minutes = {"save_steps": 0, "save_minutes": 1e-9, "save_total_limit": 9}
    watched = {**minutes, "watchdog_minutes": 1e-4}
    assert tiny_runs.train(workshop, "timed", **watched, max_steps=3) == 0
    assert "step 1 has not ended after" in caplog.text
    assert step_dirs.scan(run / "checkpoints").complete == (1, 2, 3)
    at_the_end = {**minutes, "save_minutes": 0}
    assert tiny_runs.train(workshop, "untimed", **at_the_end, max_steps=3) == 0
    assert step_dirs.scan(workshop / "untimed/checkpoints").complete == (3,)


def other_model(workshop):
    return {"model": tiny_runs.write_model(workshop / "other", seed=1)}


def longer_data(workshop):
    path = workshop / "longer.jsonl"
    path.write_text("\n".join(tiny_runs.rows(13)))
    return {"dataset.path": path}


REFUSALS = {
    "other model": (
        other_model,
        r"the base model is another one: the content of model.safetensors changed",
    ),
    "longer data": (
        longer_data,
        r"the dataset has 13 rows, was 12; first different row: 13 \(.*longer.jsonl:13"
        r"\)\. .* --init_adapter .*finished$",
    ),
    "other rank": ({"lora.r": 4}, r"lora.r was 2, now 4 .* values \(--lora.r 2\)"),
    "other seed": ({"seed": 7}, r"run: seed was 42, now 7 is asked .*--seed 42\)"),
    "other batch": ({"global_batch_size": 4}, "global_batch_size was 2, now 4"),
    "no resume": ({"resume_from_checkpoint": "none"}, "holds another run's"),
    "no such model": ({"model": "/nope"}, "'?/nope'?"),
    "no such plan": ({"plan": "fspd"}, "fspd"),
    "budget": ({"plan": "auto", "mesh": "pcie8", "memory_budget": 1e-3}, "memory_bud"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_start_leaves_a_used_folder_byte_for_byte(workshop, finished, name):
    changes, text = REFUSALS[name]
    changes = changes(workshop) if callable(changes) else changes
    before = tiny_runs.contents(finished)
    with pytest.raises(ValueError, match=text):
        tiny_runs.train(workshop, "finished", **changes)
    assert tiny_runs.contents(finished) == before


def test_other_adapters_are_refused_before_the_data_is_read(workshop, finished, caplog):
    caplog.set_level(logging.INFO, "mtuner_jax")
    with pytest.raises(ConfigError, match=r"lora.lora_alpha was 32.0, now 8.0 is"):
        tiny_runs.train(workshop, "finished", **{"lora.lora_alpha": 8})
    assert caplog.messages and "training data" not in caplog.text


def test_a_refused_start_makes_no_folder(workshop):
    with pytest.raises(ConfigError):
        tiny_runs.train(workshop, "never", **{"lora.target_modules": "q_porj"})
    assert not (workshop / "never").exists()


def test_an_accepted_start_writes_what_was_said_before_it(finished):
    log = (finished / "train.log").read_text()
    first = log.splitlines()[0]
    assert "platform cpu was asked for: mesh 1 runs on 1 virtual CPU device" in first
    assert {"config.yaml", "run_info.json", "plan.json", "data_rows.npz"} <= {
        path.name for path in finished.iterdir()
    }


@pytest.fixture
def full_disk():
    """A function after which no large file can be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_a_run_with_one_line_and_older_checkpoints(
    workshop, full_disk, capfd
):
    run = workshop / "full"
    long = {"max_steps": 10**6, "save_total_limit": 10**6, "lora.r": 128}
    first = run / "checkpoints/1/commit_success.txt"
    thread = meanwhile(full_disk, when=first.exists)
    with logs.to_console(), pytest.raises(store.SaveError) as raised:
        tiny_runs.train(workshop, "full", **long)
    thread.join()
    text = str(raised.value)
    assert text.endswith(
        "could not be written: File too large; older checkpoints are untouched; check "
        "free space and permissions there"
    )
    assert "\n" not in text
    shown = capfd.readouterr().err.partition("step 1/")[2]
    assert "Traceback" not in shown and "RESOURCE_EXHAUSTED" not in shown
    assert step_dirs.scan(run / "checkpoints").complete
    assert text in (run / "train.log").read_text()


def test_adapters_without_a_gradient_are_named_after_the_first_step(workshop, caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    changes = {
        "model": tiny_runs.write_model(workshop / "zeros", zero=("1.mlp.",)),
        "lora.target_modules": "q_proj,up_proj,down_proj",
        "max_steps": 2,
    }
    assert tiny_runs.train(workshop, "silent", **changes) == 0
    told = [text for text in caplog.messages if "no gradient" in text]
    (text,) = told
    assert text.startswith(
        "2 of 6 adapters got no gradient in step 1: model.layers.1.mlp.up_proj, "
        "model.layers.1.mlp.down_proj; they stay without effect."
    )


def test_all_adapters_of_a_usual_run_have_gradients(workshop, caplog):
    caplog.set_level(logging.WARNING, "mtuner_jax")
    changes = {"mesh": "4", "plan": "fsdp", "global_batch_size": 4, "max_steps": 1}
    assert tiny_runs.train(workshop, "usual", **changes) == 0
    assert "no gradient" not in caplog.text


def test_a_warm_start_takes_the_weights_alone_and_other_data(workshop, finished):
    held_out = {"eval_dataset": workshop / "data.jsonl", "eval_on_start": "true"}
    changes = {**longer_data(workshop), **held_out, "max_steps": 1}
    warm = {**changes, "init_adapter": finished, "learning_rate": 1e-30}
    assert tiny_runs.train(workshop, "warm", **warm) == 0
    run = workshop / "warm"
    pair = [
        (folder / "adapter/adapter_model.safetensors").read_bytes()
        for folder in (run, finished)
    ]
    assert pair[0] == pair[1]
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["eval_loss"] < tiny_runs.curve(finished)[0][1] - 1
    # The second start goes on from its own checkpoint.
    again = {**warm, "max_steps": 2, "init_adapter": "/nowhere"}
    assert tiny_runs.train(workshop, "warm", **again) == 0
    assert [record[0] for record in tiny_runs.curve(run)] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora.r": 4}, r"lora.r is 2 there and 4 here; set --lora.r 2$"),
        ({"lora.lora_alpha": 8}, r"lora_alpha is 32.0 there and 8.0 here"),
        ({"lora.target_modules": "q_proj"}, r"set --lora.target_modules q_proj,k_proj"),
        ({"init_adapter": "/nowhere"}, "no adapter_config.json there"),
    ],
)
def test_a_warm_start_with_another_adapter_is_refused_by_setting(
    workshop, finished, changes, text
):
    with pytest.raises(ConfigError, match=text):
        tiny_runs.train(workshop, "cold", **{"init_adapter": finished, **changes})
    assert not (workshop / "cold").exists()


def test_a_signal_during_a_save_waits_for_it_and_ends_with_one_line(workshop, caplog):
    caplog.set_level(logging.INFO, "mtuner_jax")
    run = workshop / "saving"
    begun = meanwhile(
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        when=lambda: any((run / "checkpoints").glob("2.orbax-checkpoint-tmp*")),
    )
    long = {"max_steps": 10**6, "lora.r": 128}
    assert tiny_runs.train(workshop, "saving", **long) == stopping.STOPPED
    begun.join()
    found = step_dirs.scan(run / "checkpoints")
    assert found.complete and not found.skipped
    assert caplog.messages[-1].startswith("stopped by SIGTERM after step ")


def forgets_in_step_2(workshop):
    """Evaluations at each step, of which the second is worse than the first."""
    held_out = workshop / "other_words.jsonl"
    held_out.write_text("\n".join(tiny_runs.rows(6, seed=5)))
    return {
        "eval_dataset": held_out,
        "eval_steps": 1,
        "learning_rate": 0.3,
        "early_stopping_patience": 2,
        "early_stopping_threshold": 100,
        "save_best": "true",
        "save_steps": 1,
        "save_total_limit": 1,
        "max_steps": 60,
    }


def evaluations(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if "eval_loss" in record]
    return [(record["step"], record["eval_loss"]) for record in records]


def test_the_best_checkpoint_is_kept_and_a_run_without_gain_ends_early(
    workshop, caplog
):
    caplog.set_level(logging.INFO, "mtuner_jax")
    run, changes = workshop / "best", forgets_in_step_2(workshop)
    # In two parts, so that what evaluations have shown has to survive.
    assert tiny_runs.train(workshop, "best", **{**changes, "max_steps": 2}) == 0
    assert tiny_runs.train(workshop, "best", **changes) == 0
    found = evaluations(run)
    best_step, best_loss = min(found, key=lambda pair: pair[1])
    last = found[-1][0]
    assert (best_step, last) == (1, 3)
    assert step_dirs.scan(run / "checkpoints").complete == (best_step, last)
    assert "stopped early: 2 evaluations without a lower loss" in caplog.text
    assert (
        f"best: step {best_step}, eval loss {best_loss:.4f}: {run}/adap" in caplog.text
    )
    pair = [
        (run / folder / "adapter_model.safetensors").read_bytes()
        for folder in ("adapter_best", f"checkpoints/{best_step}/adapter")
    ]
    assert (
        pair[0] == pair[1] != (run / "adapter/adapter_model.safetensors").read_bytes()
    )
    assert tiny_runs.train(workshop, "best", **changes) == 0  # it stays ended
    assert evaluations(run) == found


def test_step_times_are_those_of_their_step(workshop):
    run = workshop / "times"
    assert tiny_runs.train(workshop, "times", save_steps=0) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first, *others = [record["step_time"] for record in map(json.loads, lines)]
    # The first one compiles; none of the others is short by what came before. The
    # median stands for them: a busy machine makes single ones long.
    usual = statistics.median(others)
    assert first > 5 * usual
    assert min(others) > 0.2 * usual


@pytest.mark.parametrize(
    "setting", [{"save_best": True}, {"early_stopping_patience": 1}]
)
def test_what_rests_on_evaluations_asks_for_them(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name}=.* needs evaluations: set eval_st"):
        RunConfig(**setting)
