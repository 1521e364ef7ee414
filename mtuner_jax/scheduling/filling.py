"""Steps of many adapters: rows filled with samples of whatever batches are due.

All devices run one program of R rows of T tokens a step. An adapter is updated when its
global batch is complete, so a step holds samples of at most one batch of each adapter,
and the next batch begins in a later step. Which adapters share a step is free, and so a
step is filled although each batch is small. This is the Bubble Lemma of LoRAFusion
(EuroSys'26) for one stage, whose steps are its microbatches.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A sample in a row.

    Attributes:
      adapter: Whose sample it is.
      sample: Its place in that adapter's present batch.
      length: Its tokens.
    """

    adapter: str
    sample: int
    length: int


class FilledStep(NamedTuple):
    """What a step runs.

    Attributes:
      rows: Pieces by row, those of an adapter side by side.
      ends: Adapters whose batch is complete with this step.
    """

    rows: tuple[tuple[Piece, ...], ...]
    ends: frozenset[str]


@dataclasses.dataclass
class _Pending:
    """What is left of an adapter's present batch, and of its run.

    Attributes:
      samples: (place in the batch, tokens) of samples that have not run, longest first.
      begun: Whether some have.
      later_tokens: About what its batches after this one hold.
    """

    samples: list[tuple[int, int]]
    begun: bool
    later_tokens: int

    @property
    def tokens(self) -> int:
        """What its run still has to do."""
        return sum(length for _, length in self.samples) + self.later_tokens


class StepFiller:
    """Fills steps with the batches it is fed; the same for the same input.

    Batches that have begun come first, so that their adapters can go on; then adapters
    with the most left to do, so that at the end nobody is left alone with rows that
    others could have filled.
    """

    def __init__(self, *, rows: int, capacity: int, multiple: int = 1):
        """Nothing is pending.

        Args:
          rows: Rows of a step (R).
          capacity: Tokens of a row (T).
          multiple: Tokens to which each adapter's part of a row is padded.
        """
        self.rows, self.capacity, self.multiple = rows, capacity, multiple
        self._pending: dict[str, _Pending] = {}

    def feed(self, adapter: str, lengths: Sequence[int], *, later_batches: int) -> None:
        """Gives an adapter its next batch.

        Args:
          adapter: One with nothing pending.
          lengths: Tokens of each sample, each padded at most `capacity`.
          later_batches: Batches of the adapter after this one.
        """
        assert adapter not in self._pending and len(lengths)
        samples = sorted(enumerate(lengths), key=lambda one: (-one[1], one[0]))
        self._pending[adapter] = _Pending(samples, False, later_batches * sum(lengths))

    def remove(self, adapter: str) -> None:
        """Forgets what is left of an adapter's batch."""
        self._pending.pop(adapter, None)

    def waits_for(self, adapter: str) -> bool:
        """Whether an adapter has nothing pending and can be fed."""
        return adapter not in self._pending

    def next_step(self) -> FilledStep | None:
        """Takes a step's samples; None if nothing is pending."""
        if not self._pending:
            return None
        rows = [_Row(self.capacity, self.multiple) for _ in range(self.rows)]
        ends = set()
        for adapter in sorted(self._pending, key=self._urgency):
            pending = self._pending[adapter]
            left = [one for one in pending.samples if not _place(rows, adapter, *one)]
            pending.begun |= len(left) < len(pending.samples)
            pending.samples = left
            if not left:
                ends.add(adapter)
        for adapter in ends:
            del self._pending[adapter]
        return FilledStep(tuple(row.pieces for row in rows), frozenset(ends))

    def get_state(self) -> dict[str, Any]:
        """What is pending, as JSON values."""
        return {name: dataclasses.asdict(one) for name, one in self._pending.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `get_state` returned."""
        self._pending = {
            name: _Pending(**one | {"samples": [tuple(two) for two in one["samples"]]})
            for name, one in state.items()
        }

    def _urgency(self, adapter: str) -> tuple[bool, int, str]:
        pending = self._pending[adapter]
        return not pending.begun, -pending.tokens, adapter


class _Row:
    """A row that is being filled: pieces by adapter."""

    def __init__(self, capacity: int, multiple: int):
        self._room, self._multiple = capacity, multiple
        self._parts: dict[str, list[Piece]] = {}
        self._tokens: dict[str, int] = {}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """An adapter after the other."""
        return tuple(piece for part in self._parts.values() for piece in part)

    def cost(self, adapter: str, length: int) -> tuple[int, int] | None:
        """(more padded tokens, room after it); None if it does not fit."""
        held = self._tokens.get(adapter, 0)
        more = self._padded(held + length) - self._padded(held)
        return (more, self._room - more) if more <= self._room else None

    def put(self, piece: Piece) -> None:
        """Adds a piece that fits."""
        cost = self.cost(piece.adapter, piece.length)
        assert cost is not None
        self._room = cost[1]
        self._parts.setdefault(piece.adapter, []).append(piece)
        self._tokens[piece.adapter] = self._tokens.get(piece.adapter, 0) + piece.length

    def _padded(self, tokens: int) -> int:
        return -(-tokens // self._multiple) * self._multiple


def _place(rows: Sequence[_Row], adapter: str, sample: int, length: int) -> bool:
    """Puts a sample where it costs least and leaves least room, if it fits."""
    fits = [
        (*cost, number)
        for number, row in enumerate(rows)
        if (cost := row.cost(adapter, length)) is not None
    ]
    if fits:
        rows[min(fits)[-1]].put(Piece(adapter, sample, length))
    return bool(fits)


def simulate(
    batches: Mapping[str, Sequence[Sequence[int]]], filler: StepFiller
) -> list[FilledStep]:
    """All steps of runs whose batches are known, lengths by sample."""
    steps, done = [], dict.fromkeys(batches, 0)
    while True:
        for adapter, own in batches.items():
            if filler.waits_for(adapter) and done[adapter] < len(own):
                done[adapter] += 1
                later = len(own) - done[adapter]
                filler.feed(adapter, own[done[adapter] - 1], later_batches=later)
        step = filler.next_step()
        if step is None:
            return steps
        steps.append(step)


def filled_share(steps: Sequence[FilledStep], *, rows: int, capacity: int) -> float:
    """Tokens that are not padding, of all that steps run."""
    tokens = sum(piece.length for step in steps for row in step.rows for piece in row)
    return tokens / max(1, len(steps) * rows * capacity)


def rows_per_step(
    batches: Mapping[str, Sequence[Sequence[int]]],
    *,
    capacity: int,
    multiple: int,
    choices: Sequence[int],
    enough: float = 0.95,
) -> int:
    """The most rows with which steps are still filled, else those that fill best.

    Args:
      batches: Some batches of each adapter, lengths by sample.
      capacity: Tokens of a row.
      multiple: As in `StepFiller`.
      choices: Numbers of rows, each a multiple of what the devices run at once.
      enough: Share of tokens that are not padding with which more rows win.
    """
    shares = {}
    for rows in choices:
        filler = StepFiller(rows=rows, capacity=capacity, multiple=multiple)
        steps = simulate(batches, filler)
        shares[rows] = filled_share(steps, rows=rows, capacity=capacity)
    filled = [rows for rows, share in shares.items() if share >= enough]
    return max(filled) if filled else max(choices, key=lambda rows: shares[rows])
