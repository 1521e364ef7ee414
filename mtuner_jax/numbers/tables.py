"""Tables as text."""

from collections.abc import Iterable, Sequence
from typing import Any


def markdown(head: str, body: Iterable[Sequence[Any]]) -> str:
    """A Markdown table.

    Args:
      head: The columns' names, `model | tokens:`; those that end in `:` are set to
        the right.
      body: The cells of each row.
    """
    names = [name.strip() for name in head.split("|")]
    rule = ["--:" if name.endswith(":") else "---" for name in names]
    rows = [[name.removesuffix(":") for name in names], *body]
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(cells)} |\n" for cells in escaped]
    return "".join([lines[0], f"|{'|'.join(rule)}|\n", *lines[1:]])
