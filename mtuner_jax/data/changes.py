"""Tells which row of a dataset is another one than when a run began."""

import dataclasses
import itertools
import pathlib
import zipfile
import zlib

import numpy as np

from mtuner_jax.data import errors, files, ingestion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What is remembered of a dataset's rows: 8 bytes of each usable one.

    Attributes:
      read: Rows read, the unusable ones included.
      numbers: [samples] int32, from 1, which row each sample was.
      digests: [samples] uint32, of its tokens and mask.
    """

    read: int
    numbers: np.ndarray
    digests: np.ndarray


def rows_of(dataset: ingestion.Dataset) -> Rows:
    """Remembers a dataset."""
    samples = dataset.samples
    digests = np.empty(len(samples), np.uint32)
    for index in range(len(samples)):
        ids, trained = samples.tokens(index)
        digests[index] = zlib.crc32(trained.tobytes(), zlib.crc32(ids.tobytes()))
    return Rows(
        read=dataset.counts.read, numbers=samples.sample_ids + 1, digests=digests
    )


def write(path: pathlib.Path, rows: Rows) -> None:
    """Writes what `read` reads."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        np.savez(file, read=rows.read, numbers=rows.numbers, digests=rows.digests)
    new.replace(path)


def read(path: pathlib.Path) -> Rows | None:
    """The rows of an earlier start; None if there is no such file, or a broken one."""
    try:
        with np.load(path, allow_pickle=False) as found:
            return Rows(
                read=int(found["read"]),
                numbers=found["numbers"],
                digests=found["digests"],
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def told(saved: Rows | None, dataset: ingestion.Dataset) -> str:
    """Says how a dataset differs from what it was, such as:

    `the dataset has 13 rows, was 12; first different row: 13 (data.jsonl:13)`.

    Args:
      saved: Of the run's beginning; None if that is not known.
      dataset: Of now.
    """
    now = rows_of(dataset)
    if saved is None:
        return f"the rows of the dataset ({now.read:,}) are not those of before"
    count = f"the dataset has {now.read:,} rows"
    if now.read != saved.read:
        count += f", was {saved.read:,}"
    both = min(len(now.numbers), len(saved.numbers))
    unlike = (now.numbers[:both] != saved.numbers[:both]) | (
        now.digests[:both] != saved.digests[:both]
    )
    first = int(unlike.argmax()) if unlike.any() else both
    if first < len(now.numbers):
        row = int(now.numbers[first])
        return f"{count}; first different row: {row:,}{_place(dataset.paths, row)}"
    if first < len(saved.numbers):
        return f"{count}; row {int(saved.numbers[first]):,} is missing"
    return f"{count}; the rows differ only in what no token comes from"


def _place(paths: tuple[str, ...], row: int) -> str:
    """` (file:line)` of a row, counted from 1 over all files; empty if not found."""
    lines = itertools.chain.from_iterable(map(files.read, paths))
    try:
        line = next(itertools.islice(lines, row - 1, None), None)
    except errors.DataError:
        return ""
    return f" ({line.path}:{line.number})" if line else ""
