"""JSONL by bytes, line by line, without guessing a schema.

Every line stands for itself: what is wrong with one is said with its number and
never changes how the next is read.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from mtuner_jax.data import errors

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line that is not blank.

    Attributes:
      path: The file, as the user wrote it.
      number: From 1, blank lines counted.
      raw: Its bytes without BOM and surrounding white space.
      ended: Whether a newline followed; only a file's last line may lack it.
      too_long: Whether `raw` was cut at the limit.
    """

    path: str
    number: int
    raw: bytes
    ended: bool
    too_long: bool = False


def lines(
    path: str, file: BinaryIO, *, limit_bytes: int = MAX_LINE_BYTES
) -> Iterator[Line]:
    """Yields the lines of an open file that are not blank.

    Memory is bounded by the longest line, and that by `limit_bytes`.
    """
    number = 0
    while raw := file.readline(limit_bytes + 1):
        number += 1
        ended = raw.endswith(b"\n")
        too_long = not ended and len(raw) > limit_bytes
        if too_long:
            ended = _skip_line(file)
        raw = raw.removeprefix(BOM).strip()
        if raw:
            yield Line(
                path=path, number=number, raw=raw, ended=ended, too_long=too_long
            )


def parse_row(line: Line) -> dict[str, Any]:
    """Parses a line as one JSON object, strictly.

    Raises:
      SampleError: Not UTF-8, not JSON, not an object, a key that occurs twice, NaN
        or infinity, or half of a surrogate pair (which no tokenizer can encode).
    """
    if line.too_long:
        raise errors.SampleError(
            "line too long", f"more than {len(line.raw) - 1:,} bytes; split the sample"
        )
    try:
        text = line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = line.raw[error.start]
        raise errors.SampleError(
            "invalid UTF-8", f"byte 0x{byte:02x} at byte {error.start + 1} of the line"
        ) from None
    row = _parse_json(text, line)
    if not isinstance(row, dict):
        hint = "; one object a line, not an array of them" if line.number == 1 else ""
        raise errors.SampleError(
            "not an object", f"expected {{...}}, found {json_type(row)}{hint}"
        )
    if "\\ud" in text.lower():
        _refuse_lone_surrogates(row)
    return row


def json_type(value: object) -> str:
    """Names a value's JSON type for an error text, with the value if it is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {json.dumps(value)}"
    if isinstance(value, int | float):
        return f"the number {json.dumps(value)}"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _parse_json(text: str, line: Line) -> object:
    try:
        return json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise errors.SampleError("invalid JSON", _explain(error, line)) from None
    except RecursionError:
        raise errors.SampleError("invalid JSON", "nested too deep") from None
    except ValueError as error:
        if isinstance(error, errors.SampleError):
            raise
        # Python refuses to read integers of more than 4,300 digits.
        raise errors.SampleError("invalid JSON", str(error)) from None


def _explain(error: json.JSONDecodeError, line: Line) -> str:
    text, column = error.doc, error.pos + 1
    if re.search(r",\s*$", text[: error.pos]) and text[error.pos : error.pos + 1] in (
        *"}]",
    ):
        return f"trailing comma before column {column}"
    if re.match(r",\s*[}\]]", text[error.pos :]):
        return f"trailing comma at column {column}"
    if not line.ended and not text.endswith(("}", "]")):
        return f"the last line is cut after column {len(text)}; was the file complete?"
    return f"{error.msg} at column {column}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise errors.SampleError("duplicate key", f"{twice!r} occurs more than once")
    return row


def _refuse_constant(name: str) -> NoReturn:
    raise errors.SampleError("invalid JSON", f"{name} is no JSON value")


def _refuse_lone_surrogates(row: dict[str, Any]) -> None:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise errors.SampleError(
            "lone surrogate",
            f"\\u{ord(text[error.start]):04x} without its other half; it has no UTF-8",
        ) from None


def refuse_other_encodings(path: str, head: bytes) -> None:
    """Names a file that is no UTF-8 text by its first bytes.

    Raises:
      DataError: It is UTF-16, or an archive.
    """
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in head[:4]:
        raise errors.DataError(f"{path}: looks like UTF-16, save it as UTF-8")
    if head.startswith(b"PK\x03\x04"):
        raise errors.DataError(f"{path}: is a zip file; unpack it")


def _skip_line(file: BinaryIO) -> bool:
    while chunk := file.readline(2**20):
        if chunk.endswith(b"\n"):
            return True
    return False
