"""Where things lie in the arena: the memory that layer inputs and kept copies share.

Rows 0.. hold layer inputs, layer after layer; from row `shift` on lie the copies that
wait for the next forward pass. Both overlap as far as their lifetimes allow: in the
forward loop, input i is written after copy i + 1 was read, in the backward loop, copy
i - 1 is written after input i was read.
"""

import dataclasses
import itertools
from collections.abc import Sequence

WIDTH = 65536
_SMALL_WIDTH = 64


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
    largest = max([*input_sizes, *copy_sizes, 1])
    width = WIDTH if largest >= 2**20 else _SMALL_WIDTH
    input_rows = tuple(-(-size // width) for size in input_sizes)
    copy_rows = tuple(-(-size // width) for size in copy_sizes)
    inputs = _sums(input_rows)
    copies = _sums(copy_rows)
    shift = max(
        [inputs[i + 1] - copies[i] for i, size in enumerate(copy_rows) if size],
        default=0,
    )
    shift = max(shift, 0)
    return ArenaLayout(
        width=width,
        rows=max(shift + copies[-1] if copies[-1] else 0, inputs[-1], 1),
        input_rows=input_rows,
        copy_rows=copy_rows,
        input_starts=tuple(inputs[:-1]),
        copy_starts=tuple(shift + start for start in copies[:-1]),
    )


def _sums(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)]
