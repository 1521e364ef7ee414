"""What came of runs: JSON lines that survive a machine which is taken away.

Each line is written through to the disk. A run is tried again only if it was cut off;
one that failed, or was cut off twice, stays as it is.
"""

import calendar
import dataclasses
import enum
import logging
import os
import pathlib
import statistics
import time
from collections.abc import Collection, Iterable
from typing import Any

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers import records
from scripts.benchmarks.run_lists import Kind, ListedRun, RunList

_logger = logging.getLogger(__name__)
ENDING = ".jsonl"
FORMAT = records.Format(what="event", version=1, again="measure again")
MOST_STARTS = 2
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LEAST_SCALE, _MOST_SCALE = 0.5, 3.0
_LONGER = 1.3  # than the time after which it was cut off


class RunEvent(enum.StrEnum):
    """What happened to a run; CUT_OFF is by the time limit."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    CUT_OFF = "cut off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One event.

    Attributes:
      digest: Of the list that the run belongs to.
      run: Its name.
      event: What happened.
      result: What was measured.
      error: Why it failed.
      seconds: From the start of the run.
      time: As ISO 8601, UTC.
    """

    digest: str
    run: str
    event: RunEvent
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    time: str = ""

    @property
    def unix_s(self) -> float:
        """When it was written."""
        return calendar.timegm(time.strptime(self.time, _TIME))


class State(enum.StrEnum):
    """Where a run stands."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CUT_OFF = "cut off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where all runs of a list stand.

    Attributes:
      listed: The list.
      records: Events, oldest first.
    """

    listed: RunList
    records: tuple[Record, ...]

    def of(self, run: ListedRun) -> list[Record]:
        """A run's events."""
        return [record for record in self.records if record.run == run.name]

    def state(self, run: ListedRun) -> State:
        """Where a run stands."""
        events = [record.event for record in self.of(run)]
        for event in (RunEvent.DONE, RunEvent.FAILED):
            if event in events:
                return State(event)
        cut_off = events.count(RunEvent.STARTED) >= MOST_STARTS
        return State.CUT_OFF if cut_off else State.OPEN

    def result(self, run: ListedRun) -> dict[str, Any]:
        """What was measured; empty if nothing was."""
        return next((r.result for r in self.of(run)[::-1] if r.result), {})

    def error(self, run: ListedRun) -> str:
        """Why a run failed; empty if it did not."""
        return next((r.error for r in self.of(run)[::-1] if r.error), "")

    def last(self, names: Collection[str]) -> Record | None:
        """The last event of any of these runs."""
        own = [record for record in self.records if record.run in names]
        return own[-1] if own else None

    def left(self) -> list[ListedRun]:
        """Runs that are still to be made, most deciding first."""
        return [run for run in self.listed.runs if self.state(run) is State.OPEN]

    def expected_s(self, run: ListedRun) -> float:
        """How long a run will take, by the list and by runs of its kind so far."""
        cut_off = [r.seconds for r in self.of(run) if r.event is RunEvent.CUT_OFF]
        scaled_s = run.expected_s * self._scale(run.kind)
        return max(scaled_s, _LONGER * max(cut_off, default=0.0))

    def _scale(self, kind: Kind) -> float:
        expected = {run.name: run for run in self.listed.runs if run.kind is kind}
        ratios = [
            record.seconds / expected[record.run].expected_s
            for record in self.records
            if record.event is RunEvent.DONE and record.run in expected
        ]
        middle = statistics.median(ratios) if ratios else 1.0
        return min(max(middle, _LEAST_SCALE), _MOST_SCALE)


class Writer:
    """Appends events of runs to a file of its own."""

    def __init__(self, path: pathlib.Path, listed: RunList):
        self.path = path
        self._digest = listed.digest

    def write(self, run: ListedRun, event: RunEvent, **fields: Any) -> None:
        """Appends an event, on the disk before this returns."""
        now = time.strftime(_TIME, time.gmtime())
        record = Record(
            digest=self._digest, run=run.name, event=event, time=now, **fields
        )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(FORMAT.to_json(record, indent=None))
            file.flush()
            os.fsync(file.fileno())


def read(listed: RunList, folders: Iterable[pathlib.Path]) -> Progress:
    """Reads the events in all files of the folders; a folder may be missing.

    A file that lies in two of them, copied, counts once.

    Raises:
      ConfigError: Events of another list.
    """
    largest: dict[str, pathlib.Path] = {}
    for path in (path for folder in folders for path in folder.glob(f"*{ENDING}")):
        known = largest.setdefault(path.name, path)
        if path.stat().st_size > known.stat().st_size:
            largest[path.name] = path
    files = [path for _, path in sorted(largest.items())]
    found = (record for path in files for record in events(path, listed.digest))
    return Progress(listed=listed, records=tuple(found))


def events(path: pathlib.Path, digest: str) -> list[Record]:
    """Reads a file of events; one that is not there has none.

    Raises:
      ConfigError: Events of another list.
    """
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = FORMAT.from_json(line, Record)
        except ConfigError as error:
            _logger.warning("%s, line %d is left out: %s", path, number, error)
            continue  # written while the machine was taken away
        if record.digest != digest:
            raise ConfigError(
                f"{path}: results of list {record.digest}, this one is {digest}; give "
                "the folder of that list, or move the file away"
            )
        found.append(record)
    return found
