"""The paper's server: plans, runs and tables of a whole comparison, in short calls.

python scripts/benchmarks/server_runs.py plan --folder runs/server --devices 8
python scripts/benchmarks/server_runs.py run --folder runs/server --seconds_left 540
python scripts/benchmarks/server_runs.py table --folder runs/server --output x.md

`plan` needs no GPU. `run` does what is worth most first and stops in time; called
again, it goes on. docs/server-runs.md says more.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from mtuner_jax.settings import programs
from scripts.benchmarks import (
    comparison_tables,
    run_lists,
    run_records,
    server_calls,
    server_plan,
)
from scripts.benchmarks.run_records import State
from scripts.benchmarks.server_calls import CallConfig
from scripts.benchmarks.server_machines import ListConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Which results are drawn up.

    Attributes:
      folder: That `plan` wrote; its results are always read.
      results: Further folders with results.
      output: Markdown; empty to print it.
    """

    folder: str = "runs/server"
    results: tuple[str, ...] = ()
    output: str = ""


def main(argv: list[str]) -> int:
    """Plans, runs or draws up; returns the exit code."""
    match argv:
        case ["plan", *flags]:
            return programs.run(flags, ListConfig, plan, description=__doc__)
        case ["run", *flags]:
            return programs.run(flags, CallConfig, run, description=__doc__)
        case ["table", *flags]:
            return programs.run(flags, TableConfig, table, description=__doc__)
    print(f"{__doc__}\nerror: begin with plan, run or table", file=sys.stderr)
    return programs.BAD_INPUT


def plan(config: ListConfig) -> None:
    """Makes the list of runs.

    Raises:
      ConfigError: Settings, sizes or caps that cannot be.
    """
    listed = server_plan.make(config)
    hours = sum(run.expected_s for run in listed.runs) / 3600
    print(
        f"{len(listed.runs)} runs, about {hours:.1f} h, {len(listed.unplanned)} cases "
        f"that fit nowhere: {config.folder}/{run_lists.FILE} ({listed.digest})"
    )


def run(config: CallConfig) -> None:
    """Makes runs until the time is over or none is left.

    Raises:
      ConfigError: Too few devices, a peer script that is missing, results of another
        list, or processes that do not start.
    """
    progress = server_calls.run(config)
    states = [progress.state(one) for one in progress.listed.runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in State)
    print(f"{counts} of {len(states)} runs; results in {config.results_folder}")


def table(config: TableConfig) -> None:
    """Writes the table of all results."""
    folder = pathlib.Path(config.folder)
    folders = (folder / "results", *map(pathlib.Path, config.results))
    progress = run_records.read(run_lists.read(folder), folders)
    text = comparison_tables.markdown(progress)
    if not config.output:
        print(text)
        return
    pathlib.Path(config.output).write_text(text, encoding="utf-8")
    print(f"wrote {config.output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
