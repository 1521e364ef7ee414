"""Runs of PyTorch FSDP2 + Liger by a script that is not part of this project.

What the script has to understand: `torchrun --nproc-per-node N SCRIPT CASE ...` with
cases `BATCH_PER_GPU,TOKENS,CHECKPOINTING(0|1),MODE`, the variables MODEL (7b, ...),
LIGER and MEMORY_GIB; for each case it prints a line with `batch=B/GPU`, `X ms`,
`Y tokens/s` and `peak Z GiB`, or with `out of memory`.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mtuner_jax.configs import ConfigError
from scripts.benchmarks.planned_cases import PlannedCase
from scripts.benchmarks.run_lists import Case, Kind, ListedRun, RunList

# (checkpointing, mode), most deciding first; two of them in a round.
VARIANTS = tuple(itertools.product(("1", "0"), ("zero3", "ddp", "zero2")))
_IN_A_ROUND = 2
OUT_OF_MEMORY = "out of memory"
# A start of all processes; of each case, the model's, its steps, each so many times as
# long as ours, and at least a share of the largest batch's.
_START_S, _CASE_S, _STEPS, _SLOWER, _LEAST_SHARE = 60.0, 15.0, 6, 1.5, 0.2
_MOST_S = 450.0
_TAIL_CHARS = 600
_LINE = re.compile(
    r"batch=(?P<batch>\d+)/GPU.* (?P<step_ms>[\d.]+) ms "
    r"(?P<tokens_per_s>[\d.]+) tokens/s peak (?P<peak_gib>[\d.]+) GiB"
)


@dataclasses.dataclass
class _Output:
    """What a peer has printed: its batches, whether it is through, the last words."""

    batches: list[dict[str, float]] = dataclasses.field(default_factory=list)
    first_not: float = 0.0
    ended: bool = False
    tail: str = ""


def listed(
    cases: Sequence[PlannedCase], rounds: Mapping[Case, int], *, devices: int
) -> Iterator[tuple[ListedRun, int]]:
    """(run, round) for each mode, of each setting, model and length.

    A run tries batches in powers of two up to the largest global batch.

    Args:
      cases: What is planned.
      rounds: By case.
      devices: GPUs of the server.
    """
    groups: dict[tuple[str, str, int], list[PlannedCase]] = {}
    for one in cases:
        groups.setdefault(one.case[:3], []).append(one)
    for group in groups.values():
        largest = max(group, key=lambda one: one.case.global_batch_size)
        case, rows = largest.case, max(largest.case.global_batch_size // devices, 1)
        plan = largest.statics[0][1] if largest.statics else largest.planned
        batches, expected_s = _batches(rows, largest.place.step_s(plan))
        least = min(rounds[one.case] for one in group)
        for number, (checkpointing, mode) in enumerate(VARIANTS):
            name = f"{case.shape}/{case.max_length}/peer-{mode}-{checkpointing}"
            label = " + checkpointing" if checkpointing == "1" else ""
            run = ListedRun(
                **case._asdict(),
                name=f"{case.setting}/{name}",
                kind=Kind.PEER,
                roles=(f"{mode}{label}",),
                arguments=tuple(
                    f"{batch},{case.max_length},{checkpointing},{mode}"
                    for batch in batches
                ),
                expected_s=round(expected_s, 1),
            )
            yield run, least + number // _IN_A_ROUND


def _batches(rows: int, step_s: float) -> tuple[list[int], float]:
    """Rows per device to try, and the seconds of all, as many as a call has time for.

    Args:
      rows: The most.
      step_s: Of our static plan with that many.
    """
    found, expected_s = [1], _START_S
    while True:
        share = max(found[-1] / rows, _LEAST_SHARE)
        expected_s += _CASE_S + _STEPS * _SLOWER * share * step_s
        following = 2 * found[-1]
        following_s = _CASE_S + _STEPS * _SLOWER * following / rows * step_s
        if following > rows or expected_s + following_s > _MOST_S:
            return found, expected_s
        found.append(following)


def check(script: str, launcher: str) -> None:
    """Refuses a script or a launcher that is not there.

    Raises:
      ConfigError: One of them is missing.
    """
    if not pathlib.Path(script).is_file():
        raise ConfigError(
            f"--peer_script {script}: no such file; leave it out to run no peers"
        )
    program = shlex.split(launcher)[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"--peer_launcher {launcher!r}: no {program} on the PATH; install PyTorch, "
            "or name the torchrun of its environment"
        )


def environment(run: ListedRun, found: RunList) -> dict[str, str]:
    """Variables of a peer's processes, beside those that are there."""
    setting = found.setting(run.setting)
    variables = {
        name: v for name, v in setting.environment.items() if "XLA" not in name
    }
    variables |= {"MODEL": run.model.rpartition("-")[2], "LIGER": "1"}
    if setting.capped:
        variables["MEMORY_GIB"] = f"{setting.pool_gib:g}"
    return variables


def measure(
    run: ListedRun, found: RunList, command: Sequence[str], *, limit_s: float
) -> dict[str, Any]:
    """Runs one mode up to the first batch that is out of memory.

    Args:
      run: The run.
      found: Its list.
      command: Launcher and script, as words; the number of processes goes between.
      limit_s: After which it is ended.

    Returns:
      {"batches": a record for each batch that fitted, "first_not": the first that did
      not, 0 if none was tried}. What was measured when time is over is kept.

    Raises:
      TimeoutError: There was no batch in time.
      RuntimeError: It ended without results for a batch; the text is its last output.
    """
    *launcher, script = command
    words = [*launcher, "--nproc-per-node", str(found.num_devices), script]
    process = subprocess.Popen(
        [*words, *run.arguments],
        env={**os.environ, **environment(run, found)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    timer = threading.Timer(limit_s, end, [process])
    timer.start()
    try:
        output = _collect(process.stdout, run)
    finally:
        in_time = time.monotonic() < deadline
        timer.cancel()
        end(process)
        process.stdout.close()
    if output.ended or (output.batches and not in_time):
        return {"batches": output.batches, "first_not": output.first_not}
    if not in_time:
        raise TimeoutError(f"nothing after {limit_s:.0f} s")
    raise RuntimeError(f"ended before its last batch: {output.tail}")


def end(process: subprocess.Popen) -> None:
    """Ends a process with all it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _collect(lines: Iterable[str], run: ListedRun) -> _Output:
    """Reads lines until the last batch is through or one does not fit."""
    found = _Output()
    for line in lines:
        found.tail = (found.tail + line)[-_TAIL_CHARS:]
        match = _LINE.search(line)
        if match:
            numbers = {key: float(v) for key, v in match.groupdict().items()}
            found.batches.append(numbers)
            found.ended = len(found.batches) == len(run.arguments)
        elif OUT_OF_MEMORY in line:
            wanted = run.arguments[len(found.batches)]
            found.first_not, found.ended = float(wanted.partition(",")[0]), True
        if found.ended:
            break
    return found
