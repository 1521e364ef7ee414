"""The paper's server: plans, runs and tables of a whole comparison, in short calls.

python scripts/benchmarks/server_runs.py plan --folder runs/server --devices 8
python scripts/benchmarks/server_runs.py run --folder runs/server --seconds_left 540
python scripts/benchmarks/server_runs.py table --folder runs/server --output x.md

`plan` needs no GPU. `run` does what is worth most first and stops in time; called
again, it goes on. docs/server-runs.md says more.
"""

import argparse
import itertools
import math
import os
import pathlib
import shlex
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mtuner_jax.configs import ConfigError, Platform
from mtuner_jax.devices import detection, platforms
from scripts.benchmarks import (
    comparison_tables,
    peer_runs,
    run_lists,
    run_records,
    server_plan,
)
from scripts.benchmarks.run_lists import Kind, Run, RunList
from scripts.benchmarks.run_records import Event, Progress, Record, State

BAD_INPUT = 2
_START_S = 45.0  # imports, CUDA, the first collective
_END_S = 12.0  # kept back to end processes
_POLL_S = 0.5
_TAIL_CHARS = 800
_CHILD = pathlib.Path(__file__).with_name("server_measure.py")


def main(argv: list[str]) -> int:
    """Plans, runs or draws up; returns the exit code."""
    args = parse(argv)
    try:
        {"plan": plan, "run": run, "table": table}[args.step](args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags of the three steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("plan", "run", "table"):
        step = steps.add_parser(name)
        step.add_argument("--folder", type=pathlib.Path, default="runs/server")
        {"plan": _plan_flags, "run": _run_flags, "table": _table_flags}[name](step)
    return parser.parse_args(argv)


def _plan_flags(step: argparse.ArgumentParser) -> None:
    models = [f"llama2-{size}" for size in ("7b", "13b", "30b", "70b")]
    step.add_argument("--devices", type=int, default=8, help="2, 4, 8, ...")
    step.add_argument("--platform", default="gpu", choices=("gpu", "cpu"))
    step.add_argument("--settings", nargs="+", default=["slow", "fast"])
    step.add_argument("--models", nargs="+", default=models, help="largest last")
    for name, values in (
        ("max_lengths", [1024, 2048, 4096, 8192]),
        ("global_batch_sizes", [8, 32, 128]),
        ("tail_rows", [14, 16]),
    ):
        step.add_argument(f"--{name}", type=int, nargs="*", default=values)
    step.add_argument("--slow_cap", type=float, default=40.0, help="GiB, 0 for none")
    step.add_argument("--fast_cap", type=float, default=0.0, help="GiB, 0 for none")
    step.add_argument("--uncapped_fraction", type=float, default=0.92, help="of a card")
    step.add_argument("--slow_hardware", default="auto", help="preset, name or file")
    step.add_argument("--fast_hardware", default="auto", help="preset, name or file")
    step.add_argument("--seconds", type=float, default=3.0, help="of timed steps")
    step.add_argument("--layers", type=int, default=0, help="fewer, for rehearsals")


def _run_flags(step: argparse.ArgumentParser) -> None:
    step.add_argument("--seconds_left", type=float, required=True)
    step.add_argument("--results", type=pathlib.Path, help="folder for new results")
    step.add_argument("--peer_script", type=pathlib.Path, help="PyTorch's, see docs")
    step.add_argument("--peer_launcher", default="torchrun")
    step.add_argument("--match", nargs="*", default=[""], help="only such names")


def _table_flags(step: argparse.ArgumentParser) -> None:
    step.add_argument("--results", type=pathlib.Path, nargs="*", default=[])
    step.add_argument("--output", type=pathlib.Path, help="Markdown; default: printed")


def plan(args: argparse.Namespace) -> None:
    """Makes the list of runs.

    Raises:
      ConfigError: Settings, sizes or caps that cannot be.
    """
    unknown = set(args.settings) - {server_plan.SLOW, server_plan.FAST}
    if unknown or args.devices < 2:
        raise ConfigError(
            f"settings={args.settings}, devices={args.devices}: slow, fast or both, on "
            "2 devices or more"
        )
    listed = server_plan.make(args, args.folder)
    hours = sum(run.expected_s for run in listed.runs) / 3600
    print(
        f"{len(listed.runs)} runs, about {hours:.1f} h, {len(listed.unplanned)} cases "
        f"that fit nowhere: {args.folder / run_lists.FILE} ({listed.digest})"
    )


def run(args: argparse.Namespace) -> None:
    """Makes runs until the time is over or none is left.

    Raises:
      ConfigError: Too few devices, a peer script that is missing, results of another
        list, or processes that do not start.
    """
    deadline = time.time() + args.seconds_left - _END_S
    listed = run_lists.read(args.folder)
    _check(args, listed)
    results = args.results or args.folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    folders = (args.folder / "results", results)
    stamp = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}"
    caller = _Caller(args, listed, folders, results / f"{stamp}{run_records.ENDING}")
    while caller.one_more(deadline):
        pass
    progress = run_records.read(listed, folders)
    states = [progress.state(one) for one in listed.runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in State)
    print(f"{counts} of {len(states)} runs; results in {results}")


def table(args: argparse.Namespace) -> None:
    """Writes the table of all results."""
    listed = run_lists.read(args.folder)
    folders = (args.folder / "results", *args.results)
    text = comparison_tables.markdown(run_records.read(listed, folders))
    if args.output is None:
        print(text)
        return
    args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}")


def _check(args, listed: RunList) -> None:
    if not math.isfinite(args.seconds_left) or args.seconds_left <= _END_S:
        raise ConfigError(
            f"seconds_left={args.seconds_left}: more than {_END_S:.0f}, which are kept "
            "back to end processes"
        )
    platforms.decide(
        Platform(listed.platform),
        listed.num_devices,
        found=detection.look(),
        mesh=listed.mesh,
    )
    if args.peer_script is not None:
        peer_runs.check(args.peer_script, args.peer_launcher)


class _Caller:
    """Starts processes for runs and watches them."""

    def __init__(
        self,
        args: argparse.Namespace,
        listed: RunList,
        folders: tuple[pathlib.Path, ...],
        output: pathlib.Path,
    ):
        self.args = args
        self.listed = listed
        self.folders = folders
        self.output = output
        self.writer = run_records.Writer(output, listed)
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
        return run_records.read(self.listed, self.folders)

    def next_runs(self, progress: Progress, left_s: float) -> list[Run]:
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

    def wanted(self, one: Run) -> bool:
        """Whether this call makes a run."""
        has_script = one.kind is not Kind.PEER or self.args.peer_script is not None
        return has_script and any(part in one.name for part in self.args.match)

    def start_s(self, one: Run) -> float:
        """What a process takes before its first run; in a peer's expectation."""
        return 0.0 if one.kind is Kind.PEER else _START_S

    def ours(self, runs: list[Run], deadline: float) -> None:
        """A process of ours; one that ends badly costs the run it was at.

        Raises:
          ConfigError: It ended before any run.
        """
        setting = self.listed.setting(runs[0].setting)
        log = self.output.with_suffix(f".{setting.name}.log")
        command = [sys.executable, str(_CHILD), "--folder", str(self.args.folder)]
        command += ["--output", str(self.output), "--until", str(deadline)]
        command += ["--results", *map(str, self.folders)]
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
        if last is not None and last.event is Event.STARTED:
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
            self.writer.write(one, Event.FAILED, error=error, seconds=seconds)
        else:
            self.writer.write(one, Event.CUT_OFF, seconds=seconds)

    def peer(self, one: Run, deadline: float) -> None:
        """A run of the peer's script."""
        self.writer.write(one, Event.STARTED)
        start = time.monotonic()
        command = [*shlex.split(self.args.peer_launcher), str(self.args.peer_script)]
        fields = {}
        try:
            limit_s = deadline - time.time()
            result = peer_runs.measure(one, self.listed, command, limit_s=limit_s)
            event, fields = Event.DONE, {"result": result}
        except TimeoutError:
            event = Event.CUT_OFF
        except (RuntimeError, OSError) as error:
            event, fields = Event.FAILED, {"error": str(error)}
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
