"""A call of `server_runs.py run`: starts processes for runs and watches them."""

import dataclasses
import itertools
import math
import os
import pathlib
import shlex
import subprocess
import sys
import time

from mtuner_jax.configs import ConfigError, Platform
from mtuner_jax.devices import detection, platforms
from scripts.benchmarks import comparison_tables, peer_runs, run_lists, run_records
from scripts.benchmarks.run_lists import Kind, ListedRun, RunList
from scripts.benchmarks.run_records import Progress, Record, RunEvent

_START_S = 45.0  # imports, CUDA, the first collective
_END_S = 12.0  # kept back to end processes
_POLL_S = 0.5
_TAIL_CHARS = 800
_CHILD = pathlib.Path(__file__).with_name("server_measure.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallConfig:
    """What a call may do.

    Attributes:
      folder: That `plan` wrote.
      seconds_left: The call's time.
      results: Folder for new results; empty for that in `folder`.
      peer_script: PyTorch's, see docs/server-runs.md; empty runs no peers.
      peer_launcher: The torchrun of its environment.
      match: Only runs with one of these in their names.
    """

    folder: str = "runs/server"
    seconds_left: float = 0.0
    results: str = ""
    peer_script: str = ""
    peer_launcher: str = "torchrun"
    match: tuple[str, ...] = ("",)

    def __post_init__(self):
        if not math.isfinite(self.seconds_left) or self.seconds_left <= _END_S:
            raise ConfigError(
                f"seconds_left={self.seconds_left}: more than {_END_S:.0f}, which are "
                "kept back to end processes"
            )

    @property
    def folders(self) -> tuple[pathlib.Path, ...]:
        """Where results are read from; new ones go to the last."""
        own = pathlib.Path(self.folder) / "results"
        return (own, pathlib.Path(self.results)) if self.results else (own,)

    @property
    def results_folder(self) -> pathlib.Path:
        """Where new results go."""
        return self.folders[-1]


def run(config: CallConfig) -> Progress:
    """Makes runs until the time is over or none is left.

    Raises:
      ConfigError: Too few devices, a peer script that is missing, results of another
        list, or processes that do not start.
    """
    deadline = time.time() + config.seconds_left - _END_S
    listed = run_lists.read(pathlib.Path(config.folder))
    platforms.decide(
        Platform(listed.platform),
        listed.num_devices,
        found=detection.look(),
        mesh=listed.mesh,
    )
    if config.peer_script:
        peer_runs.check(config.peer_script, config.peer_launcher)
    config.results_folder.mkdir(parents=True, exist_ok=True)
    caller = _Caller(config, listed)
    while caller.one_more(deadline):
        pass
    return caller.read()


class _Caller:
    """Starts processes for runs and watches them."""

    def __init__(self, config: CallConfig, listed: RunList):
        self.config = config
        self.listed = listed
        stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
        self.output = config.results_folder / f"{stamp}{run_records.ENDING}"
        self.writer = run_records.Writer(self.output, listed)
        self.told = 0

    def one_more(self, deadline: float) -> bool:
        """One process with all runs that come next; False if none fits."""
        progress = self.read()
        runs = self.next_runs(progress, deadline - time.time())
        if not runs:
            return False
        if runs[0].kind is Kind.PEER:
            self.peer(runs[0], deadline)
        else:
            self.ours(runs, deadline)
        self.tell()
        return True

    def read(self) -> Progress:
        """Where all runs stand."""
        return run_records.read(self.listed, self.config.folders)

    def next_runs(self, progress: Progress, left_s: float) -> list[ListedRun]:
        """The first run that fits, and those after it that its process can make."""
        order = iter([one for one in progress.left() if self.wanted(one)])
        for first in order:
            if progress.expected_s(first) + self.start_s(first) <= left_s:
                break
        else:
            return []
        if first.kind is Kind.PEER:
            return [first]
        alike = itertools.takewhile(
            lambda one: one.kind is not Kind.PEER and one.setting == first.setting,
            order,
        )
        return [first, *alike]

    def wanted(self, one: ListedRun) -> bool:
        """Whether this call makes a run."""
        has_script = one.kind is not Kind.PEER or bool(self.config.peer_script)
        return has_script and any(part in one.name for part in self.config.match)

    def start_s(self, one: ListedRun) -> float:
        """What a process takes before its first run; in a peer's expectation."""
        return 0.0 if one.kind is Kind.PEER else _START_S

    def ours(self, runs: list[ListedRun], deadline: float) -> None:
        """A process of ours; one that ends badly costs the run it was at.

        Raises:
          ConfigError: It ended before any run.
        """
        setting = self.listed.setting(runs[0].setting)
        log = self.output.with_suffix(f".{setting.name}.log")
        command = [sys.executable, str(_CHILD), "--folder", self.config.folder]
        command += ["--output", str(self.output), "--until", str(deadline)]
        command += ["--results", *map(str, self.config.folders)]
        command += ["--runs", *(one.name for one in runs)]
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                command,
                env={**os.environ, **setting.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                in_time = self.watch(process, deadline)
            finally:
                process.kill()
                process.wait()
        last = self.read().last([one.name for one in runs])
        if last is not None and last.event is RunEvent.STARTED:
            self.close(last, in_time=in_time, code=process.returncode, log=log)
        elif in_time and process.returncode:
            raise ConfigError(
                f"the process of setting {setting.name} ended with "
                f"{process.returncode}: {_tail(log)} (all of it: {log})"
            )

    def watch(self, process: subprocess.Popen, deadline: float) -> bool:
        """Tells what is done until the process ends; False if time is over first."""
        while process.poll() is None:
            if time.time() >= deadline:
                return False
            self.tell()
            time.sleep(_POLL_S)
        return True

    def close(
        self, last: Record, *, in_time: bool, code: int, log: pathlib.Path
    ) -> None:
        """Records what became of the run that a process ended in."""
        one = self.listed.named(last.run)
        seconds = round(time.time() - last.unix_s, 1)
        if in_time:
            error = f"the process ended with {code}: {_tail(log)}"
            self.writer.write(one, RunEvent.FAILED, error=error, seconds=seconds)
        else:
            self.writer.write(one, RunEvent.CUT_OFF, seconds=seconds)

    def peer(self, one: ListedRun, deadline: float) -> None:
        """A run of the peer's script."""
        self.writer.write(one, RunEvent.STARTED)
        start = time.monotonic()
        command = [*shlex.split(self.config.peer_launcher), self.config.peer_script]
        fields = {}
        try:
            limit_s = deadline - time.time()
            result = peer_runs.measure(one, self.listed, command, limit_s=limit_s)
            event, fields = RunEvent.DONE, {"result": result}
        except TimeoutError:
            event = RunEvent.CUT_OFF
        except (RuntimeError, OSError) as error:
            event, fields = RunEvent.FAILED, {"error": str(error)}
        seconds = round(time.monotonic() - start, 1)
        self.writer.write(one, event, seconds=seconds, **fields)

    def tell(self) -> None:
        """Prints what was recorded since the last time."""
        records = run_records.events(self.output, self.listed.digest)
        for record in records[self.told :]:
            print(comparison_tables.line(record), flush=True)
        self.told = len(records)


def _tail(log: pathlib.Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:].strip()
