"""The files of a dataset: which ones are meant, of what kind they are, and their rows.

Rows of all kinds of files become lines of JSON (`jsonl.Line`), so that what follows is
one path: a row of a CSV, parquet or hub dataset is written as the JSON it stands for.
Kinds are told by content, since names lie; only CSV has no sign but its name.
"""

import bz2
import csv
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NoReturn

from mtuner_jax.data import errors, jsonl

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:-]+)?")
_EXTRA = "pip install 'mtuner-jax[data]'"
_UNPACKERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda file: _pyarrow("zst").input_stream(
        file, compression="zstd"
    ),
}
# What a damaged compressed file raises.
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, OSError)


def expand(asked: str) -> list[str]:
    """The files that a path, a folder, a pattern or a hub id stands for, in order.

    Args:
      asked: `~` is the home folder; a folder means all data files in it; `*`, `?` and
        `**` are patterns; `owner/name` or `owner/name:split` is a dataset of the
        Hugging Face hub.

    Raises:
      DataError: There is nothing there.
    """
    path = os.path.expanduser(asked)
    if os.path.isdir(path):
        found = [str(file) for file in sorted(pathlib.Path(path).iterdir())]
        found = [file for file in found if _is_data(file)]
        if not found:
            raise errors.DataError(
                f"{asked}: a folder without data files; {', '.join(_SUFFIXES)} are read"
            )
        return found
    if os.path.exists(path):
        return [path]
    if _HUB_ID.fullmatch(asked) and not _is_data(asked):
        return [asked]
    if glob.has_magic(path):
        found = sorted(glob.glob(path, recursive=True))
        if not found:
            raise errors.DataError(f"{asked}: no file matches this pattern")
        return found
    raise errors.DataError(f"{asked}: no such file or folder")


def read(path: str) -> Iterator[jsonl.Line]:
    """The rows of a file or hub dataset, as lines of JSON.

    Raises:
      DataError: It can't be read, or is of a kind that holds no rows.
    """
    if not os.path.exists(path) and _HUB_ID.fullmatch(path):
        yield from _hub_rows(path)
        return
    try:
        file = open(path, "rb")
    except OSError as error:
        raise errors.DataError(f"{path}: {error.strerror}") from None
    with file:
        try:
            yield from _rows(path, file)
        except _DAMAGED as error:
            raise errors.DataError(f"{path}: {error or 'the file is cut'}") from None


def _rows(path: str, file: Any) -> Iterator[jsonl.Line]:
    head = _peek(file)
    for magic, unpack in _UNPACKERS.items():
        if head.startswith(magic):
            unpacked = io.BufferedReader(unpack(file))
            yield from _rows(path, unpacked)
            return
    jsonl.refuse_other_encodings(path, head)
    if head.startswith(b"PAR1"):
        yield from _parquet_rows(path)
    elif _plain_name(path).endswith((".csv", ".tsv")):
        yield from _csv_rows(path, file)
    elif head.removeprefix(jsonl.BOM).lstrip().startswith(b"["):
        yield from _array_rows(path, file.read())
    else:
        yield from jsonl.lines(path, file)


def _peek(file: Any) -> bytes:
    """The first bytes of a file, which are read again."""
    return file.peek(64)[:64]


def _plain_name(path: str) -> str:
    for packed in _PACKED:
        path = path.removesuffix(packed)
    return path.lower()


def _is_data(path: str) -> bool:
    return os.path.basename(path)[:1] != "." and _plain_name(path).endswith(_SUFFIXES)


def _line(path: str, number: int, row: Any) -> jsonl.Line:
    raw = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8")
    return jsonl.Line(path=path, number=number, raw=raw, ended=True)


def _csv_rows(path: str, file: Any) -> Iterator[jsonl.Line]:
    """Rows of a CSV file (RFC 4180; tabs in a .tsv) by the names in its first line."""
    csv.field_size_limit(jsonl.MAX_LINE_BYTES)
    tabs = _plain_name(path).endswith(".tsv")
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, delimiter="\t" if tabs else ",", strict=True)
        yield from _checked_cells(path, reader)


def _checked_cells(path: str, reader: "csv.DictReader[str]") -> Iterator[jsonl.Line]:
    try:
        for row in reader:
            if None in row or None in row.values():
                raise errors.DataError(
                    f"{path}:{reader.line_num}: another number of cells than the "
                    f"{len(reader.fieldnames or ())} columns of the first line"
                )
            yield _line(path, reader.line_num, row)
    except csv.Error as error:
        place = f"{path}:{reader.line_num + 1}"
        raise errors.DataError(f"{place}: {error}") from None
    except UnicodeDecodeError as error:
        raise errors.DataError(
            f"{path}: byte 0x{error.object[error.start]:02x} behind line "
            f"{reader.line_num} is no UTF-8; save the file as UTF-8"
        ) from None


def _array_rows(path: str, content: bytes) -> Iterator[jsonl.Line]:
    """The entries of one JSON array, each with the line on which it begins."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise errors.DataError(f"{path}:{line}: invalid UTF-8") from None
    decoder, space = json.JSONDecoder(), re.compile(r"\s*")
    place, line, counted = text.index("[") + 1, 1, 0
    for first in itertools.chain([True], itertools.repeat(False)):
        place = space.match(text, place).end()  # pyrefly: ignore
        if text[place : place + 1] == "]":
            break
        if not first:
            if text[place : place + 1] != ",":
                _refuse_array(path, text, place)
            place = space.match(text, place + 1).end()  # pyrefly: ignore
        try:
            _, end = decoder.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError):
            _refuse_array(path, text, place)
        line, counted = line + text.count("\n", counted, place), place
        yield jsonl.Line(
            path=path, number=line, raw=text[place:end].encode(), ended=True
        )
        place = end
    if text[place + 1 :].strip():
        _refuse_array(path, text, place + 1)


def _refuse_array(path: str, text: str, place: int) -> NoReturn:
    line = text.count("\n", 0, place) + 1
    raise errors.DataError(
        f"{path}:{line}: the JSON array is broken here; write one object a line to "
        "have single entries skipped"
    )


def _parquet_rows(path: str) -> Iterator[jsonl.Line]:
    """Rows of a parquet file, numbered from 1."""
    pyarrow = _pyarrow("parquet")
    import pyarrow.parquet as parquet  # the extra `data`

    number = itertools.count(1)
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    yield _line(path, next(number), row)
    except pyarrow.ArrowInvalid as error:
        raise errors.DataError(f"{path}: {error}") from None


def _pyarrow(kind: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise errors.DataError(
            f"reading {kind} files needs pyarrow: {_EXTRA}"
        ) from None
    return pyarrow


def _hub_rows(name: str) -> Iterator[jsonl.Line]:
    """Rows of a split of a hub dataset (`train` if none is named), numbered from 1."""
    try:
        import datasets
    except ImportError:
        raise errors.DataError(
            f"{name}: no such file; reading datasets of the hub needs the package "
            f"datasets: {_EXTRA}"
        ) from None
    identity, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(identity, split=split or "train")
    except (OSError, ValueError) as error:  # not found, offline, no such split
        reason = " ".join(str(error).split())
        raise errors.DataError(f"dataset {name}: {reason}") from None
    for number, row in enumerate(rows, start=1):
        yield _line(name, number, row)


def expand_all(asked: Sequence[str]) -> list[list[str]]:
    """`expand` of each entry.

    Raises:
      DataError: One stands for nothing, or a file is named twice.
    """
    expanded = [expand(one) for one in asked]
    flat = list(itertools.chain.from_iterable(expanded))
    twice = sorted({path for path in flat if flat.count(path) > 1})
    if twice:
        raise errors.DataError(
            f"dataset.path names {', '.join(twice)} more than once; dataset.weights "
            "repeats a file"
        )
    return expanded
