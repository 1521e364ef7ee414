"""Where things lie in the arena: the memory that layer inputs and kept copies share.

Rows 0.. hold layer inputs, layer after layer; from row `shift` on lie the copies that
wait for the next forward pass. Both overlap as far as their lifetimes allow: in the
forward loop, input i is written after copy i + 1 was read, in the backward loop, copy
i - 1 is written after input i was read.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH = 65536
EMPTY_ELEMENTS = 64  # of an arena that has nothing in it, and of its small rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaLayout:
    """Rows of the arena.

    Attributes:
      width: Elements of a row; two dims keep indices within 32 bits.
      rows: Rows of the whole arena.
      input_rows: Rows of each layer's input; 0 where it is kept elsewhere.
      copy_rows: Rows of each layer's copy; 0 where none is kept.
      input_starts: First row of each input.
      copy_starts: First row of each copy.
    """

    width: int
    rows: int
    input_rows: tuple[int, ...]
    copy_rows: tuple[int, ...]
    input_starts: tuple[int, ...]
    copy_starts: tuple[int, ...]

    @property
    def has_copies(self) -> bool:
        """Whether anything in it has to survive the step."""
        return any(self.copy_rows)


def layout(input_sizes: Sequence[int], copy_sizes: Sequence[int]) -> ArenaLayout:
    """Places inputs and copies so that no live row is overwritten.

    Before backward step i, the inputs 0..i-1 are live and copy i - 1 is written, so it
    must begin behind them: `shift + copies before it >= inputs before i`. The forward
    loop asks for less.

    Args:
      input_sizes: Elements of each layer's input, 0 for none.
      copy_sizes: Elements of each layer's copy, 0 for none.
    """
    width = row_width(max([*input_sizes, *copy_sizes, 1]))
    input_rows = tuple(-(-size // width) for size in input_sizes)
    copy_rows = tuple(-(-size // width) for size in copy_sizes)
    needed = rows_needed(
        [SegmentRows(*rows, 1) for rows in zip(input_rows, copy_rows, strict=True)]
    )
    copies = _sums(copy_rows)
    shift = int(max(needed[1:], default=0)) - copies[-1] if copies[-1] else 0
    return ArenaLayout(
        width=width,
        rows=int(max(1, *needed)),
        input_rows=input_rows,
        copy_rows=copy_rows,
        input_starts=tuple(_sums(input_rows)[:-1]),
        copy_starts=tuple(shift + start for start in copies[:-1]),
    )


def row_width(largest: int) -> int:
    """Elements of a row in an arena whose largest input or copy has so many."""
    return WIDTH if largest >= 2**20 else EMPTY_ELEMENTS


class SegmentRows(NamedTuple):
    """Equal layers in a row, in an arena: numbers, or arrays that broadcast.

    Attributes:
      input_rows: Rows of a layer's input; 0 for none.
      copy_rows: Rows of a layer's copy; 0 for none.
      count: How many layers.
    """

    input_rows: Any
    copy_rows: Any
    count: Any


def num_elements(segments: Sequence[SegmentRows]) -> int:
    """Elements of the arena that `layout` makes for such layers.

    Args:
      segments: Elements instead of rows, plain numbers.
    """
    width = row_width(
        max([1, *(max(one.input_rows, one.copy_rows) for one in segments)])
    )
    rows = [
        SegmentRows(-(-one.input_rows // width), -(-one.copy_rows // width), one.count)
        for one in segments
    ]
    return width * int(max(1, *rows_needed(rows)))


def rows_needed(segments: Sequence[SegmentRows]) -> list[Any]:
    """Rows that an arena must have at least, for several reasons; the most counts.

    Inputs must fit. And before a layer's backward step its own input and all inputs
    before it are live while its copy is written, with those behind it: this grows or
    shrinks steadily over equal layers, so it is asked of the first and of the last
    layer of each segment. All of them are linear in the counts.

    Returns:
      The rows of all inputs; then, of each segment, those up to its first and up to
      its last layer's copy, 0 where it has no copies.
    """
    inputs = sum(one.input_rows * one.count for one in segments)
    left = sum(one.copy_rows * one.count for one in segments)
    needed, before = [inputs], 0
    for one in segments:
        at_first = before + one.input_rows + left
        before = before + one.input_rows * one.count
        left = left - one.copy_rows * one.count
        at_last = before + one.copy_rows + left
        has_copy = np.asarray(one.copy_rows) > 0
        needed += [np.where(has_copy, rows, 0) for rows in (at_first, at_last)]
    return needed


def _sums(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]
