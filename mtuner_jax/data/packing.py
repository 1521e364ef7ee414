"""Which samples share a row.

Rows are packed once, over the whole dataset, and the epochs shuffle rows. Packing a
shuffled stream instead (as grain's `BestFitPackIterDataset` does) fits worse, since it
sees only a few open rows; its number of rows changes with the order, so no epoch would
have a known number of steps; and its position is the content of the open rows, where
here it is one integer. What is given up is that samples of one row stay together;
they don't see each other, and the loss weighs tokens, not rows.
"""

import bisect
import collections
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Samples by row.

    Attributes:
      samples: [samples] int32, indices into the samples.
      starts: [rows + 1] int64, where each row begins in `samples`.
    """

    samples: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.samples[self.starts[row] : self.starts[row + 1]]


def one_per_row(indices: np.ndarray) -> PackedRows:
    """Gives each of the samples `indices` [samples] a row of its own."""
    return PackedRows(
        samples=np.asarray(indices, np.int32),
        starts=np.arange(len(indices) + 1, dtype=np.int64),
    )


def best_fit(
    indices: np.ndarray, lengths: np.ndarray, *, max_length: int
) -> PackedRows:
    """Packs samples, longest first, each into the fullest row that still takes it.

    Deterministic: samples of equal length go by index, rows by age.

    Args:
      indices: [samples], which samples to pack.
      lengths: [all samples] tokens, each from 1 to `max_length`.

    Returns:
      Rows of at most `max_length` tokens, in the order they were opened.
    """
    rows: list[list[int]] = []
    rows_by_room: dict[int, collections.deque[int]] = {}
    rooms: list[int] = []  # keys of rows_by_room, sorted
    by_length = np.asarray(indices)[np.argsort(-lengths[indices], kind="stable")]
    for sample in by_length.tolist():
        length = int(lengths[sample])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), max_length
            rows.append([])
        else:
            room = rooms[place]
            row = rows_by_room[room].popleft()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[place]
        rows[row].append(sample)
        if room > length:
            if room - length not in rows_by_room:
                rows_by_room[room - length] = collections.deque()
                bisect.insort(rooms, room - length)
            rows_by_room[room - length].append(row)
    sizes = [len(row) for row in rows]
    flat = [sample for row in rows for sample in row]
    return PackedRows(
        samples=np.asarray(flat, np.int32),
        starts=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
    )
