import bz2
import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from mtuner_jax.data import errors, files, jsonl

ROWS = [
    {"prompt": "q", "completion": 'a "b", c\nd é'},
    {"prompt": "r", "completion": "s"},
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = (
    b"\n[\n  " + b",\n\n".join(json.dumps(r, indent=1).encode() for r in ROWS) + b"]"
)
CSV = 'prompt,completion\nq,"a ""b"", c\nd é"\nr,s\n'.encode()


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return str(path)


def rows(path):
    return [jsonl.parse_row(line) for line in files.read(path)]


@pytest.mark.parametrize(
    ("name", "content", "numbers"),
    [
        ("a.jsonl", JSONL, [1, 2]),
        ("a.json", ARRAY, [3, 8]),
        ("a.json", b"\xef\xbb\xbf" + ARRAY, [3, 8]),
        ("a.csv", CSV, [3, 4]),
        ("a.tsv", CSV.replace(b"prompt,", b"prompt\t").replace(b"q,", b"q\t")
         .replace(b"r,", b"r\t"), [3, 4]),
        ("a.jsonl.gz", gzip.compress(JSONL), [1, 2]),
        ("wrong.jsonl", gzip.compress(ARRAY), [3, 8]),
        ("a.csv.bz2", bz2.compress(CSV), [3, 4]),
        ("a.jsonl.xz", lzma.compress(JSONL), [1, 2]),
        ("a.jsonl.zst", bytes(pyarrow.compress(JSONL, "zstd", asbytes=True)), [1, 2]),
    ],
)  # fmt: skip
def test_all_kinds_of_files_give_the_same_rows(tmp_path, name, content, numbers):
    path = write(tmp_path, name, content)
    assert rows(path) == ROWS
    assert [line.number for line in files.read(path)] == numbers


def test_parquet_rows_keep_their_nested_columns(tmp_path):
    nested = [{"messages": [{"role": "user", "content": "é"}], "n": i} for i in (1, 2)]
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(nested), path)
    assert rows(path) == nested
    assert [line.number for line in files.read(path)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", '{"a": "b"}\n'.encode("utf-16"), "looks like UTF-16"),
        ("a.jsonl", '{"a": "b"}\n'.encode("utf-32"), "looks like UTF-16"),
        ("a.zip", b"PK\x03\x04...", "is a zip file; unpack it"),
        ("a.jsonl.gz", gzip.compress(JSONL)[:-9], "end-of-stream marker"),
        ("a.parquet", b"PAR1 no more", "Parquet"),
        ("a.json", b'[{"a": 1}\n {"a": 2}]', ":2: the JSON array is broken here"),
        ("a.json", b'[{"a": 1},\n {"a": 2', ":2: the JSON array is broken here"),
        ("a.json", b'[{"a": 1}]\nmore', ":1: the JSON array is broken here"),
        ("a.json", b'[\n{"a": "\xff"}]', ":2: invalid UTF-8"),
        ("a.csv", b"a,b\n1,2\n1\n", ":3: another number of cells than the 2 columns"),
        ("a.csv", b"a,b\n1,2,3\n", ":2: another number of cells"),
        ("a.csv", b'a,b\n1,"2\n', ":2: unexpected end of data"),
        ("a.csv", b"a,b\n1,\xff\n", "byte 0xff behind line .* is no UTF-8"),
    ],
)
def test_a_file_that_holds_no_rows_says_why(tmp_path, name, content, text):
    path = write(tmp_path, name, content)
    with pytest.raises(errors.DataError, match=text):
        list(files.read(path))


def test_rows_of_an_array_are_as_strict_as_lines(tmp_path):
    path = write(tmp_path, "a.json", b'[{"a": 1, "a": 2}, {"b": NaN}]')
    for line, text in zip(files.read(path), ("duplicate key", "NaN"), strict=True):
        with pytest.raises(errors.SampleError, match=text):
            jsonl.parse_row(line)


def test_paths_are_files_folders_patterns_or_hub_ids(tmp_path, monkeypatch):
    one, two = (write(tmp_path, name, JSONL) for name in ("a.jsonl", "b.csv.gz"))
    write(tmp_path, "notes.md", b"")
    write(tmp_path, ".a.jsonl", b"")
    assert files.expand(str(tmp_path)) == [one, two]
    assert files.expand(f"{tmp_path}/*.jsonl") == [one]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expand("~/a.jsonl") == [one]
    assert files.expand("owner/name:train[:10%]") == ["owner/name:train[:10%]"]
    for asked, text in (
        (f"{tmp_path}/*.parquet", "no file matches"),
        ("none.jsonl", "none.jsonl: no such file or folder"),
        ("some/none.jsonl", "no such file or folder"),
    ):
        with pytest.raises(errors.DataError, match=text):
            files.expand(asked)
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.DataError, match="a folder without data files"):
        files.expand(str(tmp_path / "empty"))
    with pytest.raises(errors.DataError, match=r"a\.jsonl more than once"):
        files.expand_all([one, str(tmp_path)])


def test_hub_datasets_are_read_split_by_split(tmp_path, monkeypatch):
    # `datasets` takes a local folder of this shape like the id of a hub dataset.
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "train.jsonl").write_bytes(JSONL)
    (tmp_path / "owner" / "name" / "test.jsonl").write_bytes(JSONL)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    lines = list(files._hub_rows("owner/name"))
    assert [jsonl.parse_row(line) for line in lines] == ROWS
    assert [line.number for line in lines] == [1, 2]
    with pytest.raises(errors.DataError, match=r"dataset owner/name:dev: .*dev"):
        list(files._hub_rows("owner/name:dev"))
