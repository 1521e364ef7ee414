import json
import tracemalloc

import pytest

from mtuner_jax.data import errors, jsonl

GOOD = b'{"a": 1}'


def write(tmp_path, data):
    path = tmp_path / "data.jsonl"
    path.write_bytes(data)
    return str(path)


def read(tmp_path, data, **kwargs):
    path = write(tmp_path, data)
    with open(path, "rb") as file:
        return list(jsonl.lines(path, file, **kwargs))


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (GOOD + b"\n" + GOOD + b"\n", [1, 2]),
        (GOOD + b"\n" + GOOD, [1, 2]),
        (b"\n\n" + GOOD + b"\n  \t\n" + GOOD + b"\n\n", [3, 5]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", [1, 2]),
        (b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD, [1, 2]),
        (GOOD + b"\n\xef\xbb\xbf" + GOOD, [1, 2]),  # two files with BOM, joined
        (b'{"a": "\xe2\x80\xa8"}\n' + GOOD, [1, 2]),  # U+2028 ends no line
        (b"", []),
        (b"\n \n", []),
        (b"\xef\xbb\xbf", []),
    ],
)
def test_lines_are_numbered_and_blank_ones_skipped(tmp_path, data, numbers):
    lines = read(tmp_path, data)
    assert [line.number for line in lines] == numbers
    for line in lines:
        jsonl.parse_row(line)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b'{"a": 1,}\n', "invalid JSON: trailing comma"),
        (b'{"a": [1, 2,]}\n', "invalid JSON: trailing comma"),
        (b'{"a": "b', "invalid JSON: the last line is cut after column 8"),
        (b'{"a": 1, "b": tru', "invalid JSON: the last line is cut"),
        (b'{"a": "b\n', "invalid JSON: .* at column 7"),
        (b'{"a": 1} {"a": 2}\n', "invalid JSON: Extra data at column 10"),
        (b'{"a": "\xff"}\n', "invalid UTF-8: byte 0xff at byte 8"),
        (b'{"a": "\xed\xa0\x80"}\n', "invalid UTF-8: byte 0xed"),
        (b'{"a": "\\ud800"}\n', r"lone surrogate: \\ud800"),
        (b'{"\\uDC00": 1}\n', r"lone surrogate: \\udc00"),
        (b'{"a": 1, "a": 1}\n', "duplicate key: 'a' occurs more than once"),
        (b'{"a": {"b": 1, "b": 2}}\n', "duplicate key: 'b'"),
        (b'{"a": NaN}\n', "invalid JSON: NaN is no JSON value"),
        (b'{"a": -Infinity}\n', "invalid JSON: -Infinity is no JSON value"),
        (b'[{"a": 1}]\n', "not an object: .* found an array; one object a line"),
        (b"null\n", "not an object: .* found null"),
        (b'"a"\n', "not an object: .* found a string"),
        (b"[" * 100_000 + b"\n", "invalid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}\n", "invalid JSON: Exceeds the limit"),
    ],
)
def test_a_bad_line_says_what_is_wrong(tmp_path, data, text):
    with pytest.raises(errors.SampleError, match=text):
        jsonl.parse_row(read(tmp_path, data)[0])


def test_a_surrogate_pair_is_one_character(tmp_path):
    (line,) = read(tmp_path, b'{"a": "\\ud83d\\ude00"}')
    assert jsonl.parse_row(line) == {"a": "\U0001f600"}


def test_a_line_over_the_limit_is_refused_and_the_next_one_read(tmp_path):
    long = json.dumps({"a": "x" * 5000}).encode()
    lines = read(tmp_path, long + b"\n" + GOOD + b"\n" + long, limit_bytes=1000)
    assert [line.number for line in lines] == [1, 2, 3]
    with pytest.raises(errors.SampleError, match="line too long: more than 1,000 b"):
        jsonl.parse_row(lines[0])
    assert jsonl.parse_row(lines[1]) == {"a": 1}
    assert lines[2].too_long


def test_memory_is_bounded_by_the_limit_not_by_the_line(tmp_path):
    path = write(tmp_path, b'{"a": "' + b"x" * 30_000_000 + b'"}\n' + GOOD)
    tracemalloc.start()
    with open(path, "rb") as file:
        lines = list(jsonl.lines(path, file, limit_bytes=100_000))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lines) == 2
    assert peak_bytes < 4 * 2**20


def test_a_line_of_30_mb_is_read(tmp_path):
    (line,) = read(tmp_path, b'{"a": "' + b"x" * 30_000_000 + b'"}')
    assert len(jsonl.parse_row(line)["a"]) == 30_000_000
