import itertools
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from mtuner_jax.settings import programs
from scripts.benchmarks import (
    peer_runs,
    run_lists,
    run_records,
    server_plan,
    server_runs,
)
from scripts.benchmarks.run_lists import Kind
from scripts.benchmarks.run_records import State

SCRIPT = pathlib.Path(server_runs.__file__)
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
# A peer that prints as torch_fsdp2.py does; a batch of 4 is too much for it.
PEER = """
import os, sys
for case in sys.argv[1:]:
    batch = case.split(",")[0]
    if case.startswith("4,"):
        print(case, "out of memory", flush=True)
        sys.exit("went on after that")
    print(f"FSDP2+PEFT {os.environ['MODEL']} batch={batch}/GPU seq=64 checkpointing=1 "
          f"mode=zero3 liger={os.environ['LIGER']}: 100 ms {int(batch) * 640} tokens/s "
          f"peak {os.environ['MEMORY_GIB']}.5 GiB", flush=True)
"""
LAUNCHER = """
import subprocess, sys
assert sys.argv[1:3] == ["--nproc-per-node", "8"], sys.argv
sys.exit(subprocess.run([sys.executable, *sys.argv[3:]]).returncode)
"""


def plan(folder, *more):
    """Plans of two GPUs; flags given again replace these."""
    arguments = [
        *("plan", "--folder", str(folder), "--devices", "2", "--slow_cap", "14"),
        *("--models", "llama2-7b", "--max_lengths", "1024", "4096"),
        *("--global_batch_sizes", "2", "8", "--tail_rows", "8"),
    ]
    assert server_runs.main([*arguments, *more]) == 0
    return run_lists.read(folder)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    return folder, plan(folder)


@pytest.fixture
def tiny(tmp_path):
    """A list for eight virtual CPU devices with a model of two layers."""
    shape = tmp_path / "tiny"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(SHAPE))
    folder = tmp_path / "runs"
    listed = plan(
        folder,
        *(
            "--platform",
            "cpu",
            "--devices",
            "8",
            "--settings",
            "slow",
            "--slow_cap",
            "1",
        ),
        *("--models", str(shape), "--max_lengths", "64", "--seconds", "0.01"),
        *("--global_batch_sizes", "32", "--tail_rows=[]"),
    )
    return folder, listed


def files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(folder, listed, run, *events, **fields):
    results = folder / "results"
    results.mkdir(exist_ok=True)
    writer = run_records.Writer(results / "made-up.jsonl", listed)
    for event in events:
        writer.write(run, event, **fields)


def run(folder, *more):
    return server_runs.main(["run", "--folder", str(folder), *more])


def test_the_same_request_gives_the_same_files(planned, tmp_path):
    folder, listed = planned
    again = plan(tmp_path / "again")
    assert again == listed
    assert files(tmp_path / "again") == files(folder)


def test_most_deciding_runs_come_first(planned):
    _, listed = planned
    assert listed.runs[0].kind is Kind.LINKS
    # Of each setting: the case with most to be won, its best static plan beside it.
    firsts = [run for run in listed.runs if server_plan.PLANNED in run.roles]
    gains = [gain(listed, run) for run in firsts if run.setting == "slow"]
    assert gains[0] > 1.2
    assert all(one > other - 0.05 for one, other in itertools.pairwise(gains))
    assert any(role.startswith("static") for role in listed.runs[2].roles)
    order = [
        setting for setting, _ in itertools.groupby(r.setting for r in listed.runs)
    ]
    assert order[:4] == ["slow", "fast", "slow", "fast"]


def gain(listed, planned_run):
    statics = [
        run.predicted_ms
        for run in listed.runs
        if run.case == planned_run.case and "static" in " ".join(run.roles)
    ]
    return round(min(statics) / planned_run.predicted_ms, 2)


def test_the_list_has_all_that_the_paper_compares(planned):
    folder, listed = planned
    roles = {role for run in listed.runs for role in run.roles}
    assert {"planned", "nothing kept", "one ratio", "progressive"} <= roles
    assert {"tail", "no tail"} <= roles
    assert {"zero3", "zero2", "ddp", "zero3 + checkpointing"} <= roles
    for run in listed.runs:
        if run.kind is Kind.STEP:
            plan = plans.read(folder / run.plan)
            assert plan.rows >= run.global_batch_size
            budget = 0.97 * listed.setting(run.setting).pool_gib
            assert 0 < run.predicted_gib <= round(budget, 2)
            assert run.expected_s > 10


def test_settings_differ_in_what_a_process_cannot_change(planned):
    _, listed = planned
    slow, fast = (listed.setting(name).environment for name in ("slow", "fast"))
    assert (slow["NCCL_P2P_DISABLE"], fast["NCCL_P2P_DISABLE"]) == ("1", "0")
    assert {slow["NCCL_NVLS_ENABLE"], fast["NCCL_NVLS_ENABLE"]} == {"0"}
    assert float(slow["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == pytest.approx(
        14 / 139, 0.01
    )
    assert listed.setting("slow").hardware == "h200x2-pcie"
    assert listed.setting("fast").hardware == "h200x2"


@pytest.mark.parametrize(
    ("devices", "mesh", "hardware"), [(4, "2x2", "h200x8-pcie"), (8, "2x2x2", "pcie8")]
)
def test_other_servers_can_be_planned_for(devices, mesh, hardware, tmp_path):
    listed = plan(
        tmp_path,
        *("--devices", str(devices), "--settings", "slow", "--max_lengths", "1024"),
        *("--global_batch_sizes", "8", "--tail_rows=[]", "--slow_hardware", hardware),
    )
    assert (listed.mesh, listed.settings[0].hardware) == (mesh, hardware)


def test_runs_end_to_end_and_are_not_made_again(tiny):
    folder, listed = tiny
    environ = {**os.environ, "XLA_FLAGS": FLAGS, "MTUNER_CACHE_DIR": str(folder)}
    command = [sys.executable, str(SCRIPT), "run", "--folder", str(folder)]
    command += ["--seconds_left", "400", "--match", "links", "planned"]
    outputs = []
    for _ in range(2):
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "tiny/32x64/planned: done" in outputs[0]
    assert outputs[1].count("\n") == 1
    progress = run_records.read(listed, [folder / "results"])
    links, step = listed.runs[:2]
    assert progress.state(links) is progress.state(step) is State.DONE
    assert len(progress.of(step)) == 2
    result = progress.result(step)
    assert result["predicted_ms"] == step.predicted_ms
    assert result["predicted_gib"] == step.predicted_gib
    assert result["device"] == "8 x cpu"
    assert progress.result(links)["axes"]["tier0"]["group"] == 8
    table = folder / "table.md"
    assert (
        server_runs.main(["table", "--folder", str(folder), "--output", str(table)])
        == 0
    )
    assert f"| {result['step_ms']} (" in table.read_text()


def test_a_run_that_cannot_end_in_time_is_not_started(tiny, capsys):
    folder, listed = tiny
    start = time.monotonic()
    assert run(folder, "--seconds_left", "60") == 0
    assert time.monotonic() - start < 10
    assert f"{len(listed.runs)} open, 0 done" in capsys.readouterr().out
    assert not list((folder / "results").glob("*.log"))


def test_what_is_done_or_failed_is_left_alone(tiny, capsys):
    folder, listed = tiny
    events = run_records.RunEvent
    for one in listed.runs[:2]:
        write(folder, listed, one, events.STARTED, events.DONE)
    for one in listed.runs[2:]:
        write(folder, listed, one, events.STARTED, events.FAILED, error="no memory")
    assert run(folder, "--seconds_left", "500") == 0
    told = f"0 open, 2 done, {len(listed.runs) - 2} failed"
    assert told in capsys.readouterr().out


def test_a_process_that_does_not_start_is_told(tiny, capsys, monkeypatch):
    folder, listed = tiny
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag=1")
    assert run(folder, "--seconds_left", "400") == programs.BAD_INPUT
    assert "the process of setting slow ended with" in capsys.readouterr().err
    progress = run_records.read(listed, [folder / "results"])
    assert progress.left() == list(listed.runs)


def test_a_run_that_fails_is_recorded_with_its_error(tiny):
    folder, listed = tiny
    planned_run = listed.runs[1]
    (folder / planned_run.plan).unlink()
    assert run(folder, "--seconds_left", "400", "--match", planned_run.name) == 0
    progress = run_records.read(listed, [folder / "results"])
    assert progress.state(planned_run) is State.FAILED
    assert "no such file" in progress.error(planned_run)


def write_peer(folder):
    script, launcher = folder / "peer.py", folder / "launcher.py"
    script.write_text(PEER)
    launcher.write_text(LAUNCHER)
    flags = ["--peer_script", str(script)]
    return [*flags, "--peer_launcher", f"{sys.executable} {launcher}"]


def test_a_peer_tries_batches_until_one_does_not_fit(tiny):
    folder, listed = tiny
    flags = write_peer(folder)
    assert run(folder, "--seconds_left", "400", "--match", "zero3-1", *flags) == 0
    progress = run_records.read(listed, [folder / "results"])
    (peer,) = (one for one in listed.runs if progress.state(one) is State.DONE)
    assert peer.arguments[:2] == ("1,64,1,zero3", "2,64,1,zero3")
    found = progress.result(peer)
    assert [one["batch"] for one in found["batches"]] == [1, 2]
    assert found["batches"][1]["tokens_per_s"] == 1280
    assert found["batches"][0]["peak_gib"] == 1.5
    assert found["first_not"] == 4


def test_a_peer_that_hangs_is_cut_off(tiny):
    folder, listed = tiny
    script = folder / "peer.py"
    script.write_text("import time; time.sleep(100)")
    command = [sys.executable, "-c", "import time; time.sleep(100)", str(script)]
    peer = next(one for one in listed.runs if one.kind is Kind.PEER)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="nothing after 1 s"):
        peer_runs.measure(peer, listed, command, limit_s=1.0)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seconds_left", "3"), "seconds_left=3.0: more than 12"),
        (
            ("--seconds_left", "90", "--peer_script", "no.py"),
            "--peer_script no.py: no such file",
        ),
    ],
)
def test_bad_input_is_told(flags, message, tiny, capsys):
    folder, _ = tiny
    assert run(folder, *flags) == programs.BAD_INPUT
    assert f"error: {message}" in capsys.readouterr().err


def test_a_launcher_that_is_not_there_is_told(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text("")
    with pytest.raises(ConfigError, match="no torchrun-of-old on the PATH"):
        peer_runs.check(script, "torchrun-of-old --standalone")


def test_too_few_devices_are_told(planned, capsys, monkeypatch):
    folder, _ = planned
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if pathlib.Path("/dev/nvidia0").exists():
        pytest.skip("a machine with GPUs")
    assert run(folder, "--seconds_left", "90") == programs.BAD_INPUT
    assert "error: platform=gpu" in capsys.readouterr().err


def test_results_of_another_list_are_refused(tiny, planned, capsys):
    folder, listed = tiny
    _, other = planned
    write(folder, other, listed.runs[0], run_records.RunEvent.STARTED)
    assert run(folder, "--seconds_left", "90") == programs.BAD_INPUT
    error = capsys.readouterr().err
    assert f"results of list {other.digest}, this one is {listed.digest}" in error


def test_plans_that_cannot_be_are_refused(tmp_path, capsys):
    wrong = (
        (["--slow_cap", "500"], "slow_cap=500 GiB per device: NVIDIA H200 has 139.0"),
        (["--settings", "medium"], "settings=['medium']"),
        (["--models", "llama2-8b"], "did you mean llama2-"),
    )
    for flags, message in wrong:
        arguments = ["plan", "--folder", str(tmp_path), "--devices", "2", *flags]
        assert server_runs.main(arguments) == programs.BAD_INPUT
        assert message in capsys.readouterr().err


def test_a_folder_without_a_list_says_what_makes_one(tmp_path, capsys):
    assert run(tmp_path, "--seconds_left", "90") == programs.BAD_INPUT
    assert "make it with `server_runs.py plan`" in capsys.readouterr().err
