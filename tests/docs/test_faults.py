"""docs/faults.md names tests that there are."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
NAMED = sorted(
    set(re.findall(r"`(tests/[^`]+)`", PAGE)) - {"tests/docs/test_faults.py"}
)
SEEN = [f"G{number}" for number in range(1, 30)] + ["G2b", "G6b", "G23b"]
SEEN += [f"N{number}" for number in range(1, 20)]


def test_every_row_names_a_test():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [GN]\d", line)]
    assert len(rows) > 45
    assert [row for row in rows if not re.search(r"\| `tests/.*` \|$", row)] == []


@pytest.mark.parametrize("fault", SEEN)
def test_every_fault_has_a_row_or_is_said_to_be_open(fault):
    assert re.search(rf"^(\||-) ([GN]\w+, )*{fault}\b", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name):
    path, _, function = name.partition("::")
    assert f"\ndef {function}(" in (ROOT / path).read_text()
