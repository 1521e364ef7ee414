"""Which row of a dataset is another one than before."""

import re
import types

import numpy as np
import pytest

from mtuner_jax.data import changes, samples


def dataset(path, lines, *, unusable=()):
    """A dataset of one file whose samples are the bytes of its lines."""
    path.write_text("\n\n".join(lines) + "\n")
    builder = samples.SamplesBuilder()
    for number, line in enumerate(lines):
        if number not in unusable:
            ids = np.frombuffer(line.encode(), np.uint8).astype(np.int32)
            builder.add(number, ids, ids > 98)
    return types.SimpleNamespace(
        paths=(str(path),),
        samples=builder.build(),
        counts=types.SimpleNamespace(read=len(lines)),
    )


BEFORE = ["abc", "bcd", "cde", "def"]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([*BEFORE, "x"], r"has 5 rows, was 4; first different row: 5 \(.*d.jsonl:9\)$"),
        (["abc", "xyz", *BEFORE[2:]], r"4 rows; first different row: 2 \(.*jsonl:3\)$"),
        (BEFORE[1:], r"3 rows, was 4; first different row: 1 \(.*d.jsonl:1\)$"),
        (BEFORE[:3], r"3 rows, was 4; row 4 is missing$"),
        (BEFORE, "the rows differ only in what no token comes from"),
    ],
)
def test_the_first_different_row_is_named_with_file_and_line(tmp_path, lines, text):
    rows = changes.rows_of(dataset(tmp_path / "d.jsonl", BEFORE))
    changes.write(tmp_path / "rows.npz", rows)
    now = dataset(tmp_path / "d.jsonl", lines)
    told = changes.told(changes.read(tmp_path / "rows.npz"), now)
    assert re.search(text, told), told


def test_rows_that_give_no_sample_count(tmp_path):
    rows = changes.rows_of(dataset(tmp_path / "d.jsonl", BEFORE, unusable=[1]))
    now = dataset(tmp_path / "d.jsonl", [*BEFORE[:2], "xyz", "def"], unusable=[1])
    assert "first different row: 3 (" in changes.told(rows, now)


def test_without_a_record_of_before_the_rows_are_said_to_differ(tmp_path):
    (tmp_path / "rows.npz").write_bytes(b"PK half a file")
    assert changes.read(tmp_path / "rows.npz") is None
    now = dataset(tmp_path / "d.jsonl", BEFORE)
    assert changes.told(None, now) == (
        "the rows of the dataset (4) are not those of before"
    )
