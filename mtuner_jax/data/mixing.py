"""The data of many adapters: each one's batches as in a run of its own, in shared rows.

An adapter's global batch holds the samples that its own run would have in it, in the
same order; only the rows that they lie in are others.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mtuner_jax.data import batches, pipelines
from mtuner_jax.data.batches import Placed
from mtuner_jax.protocols.states import Batch
from mtuner_jax.scheduling.filling import Piece, StepFiller


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """An adapter's data.

    Attributes:
      name: The adapter's.
      train: Its batches.
      eval: What it is evaluated on, or None.
      total_steps: Batches that it trains.
    """

    name: str
    train: pipelines.TrainData
    eval: pipelines.EvalData | None
    total_steps: int


class MixedStep(NamedTuple):
    """An engine step's rows.

    Attributes:
      batch: [R, T], with `adapter_ids`.
      ends: Whose global batch ends with it, bool [A].
      tokens: Tokens of each adapter in it, int [A].
    """

    batch: Batch
    ends: np.ndarray
    tokens: np.ndarray


class MixedData:
    """Engine steps until every adapter has done its own; an iterator.

    Attributes:
      streams: The adapters' data; tokens name adapters by their place here.
      filler: What is pending.
    """

    def __init__(self, streams: Sequence[Stream], filler: StepFiller):
        self.streams, self.filler = streams, filler
        self._numbers = {one.name: number for number, one in enumerate(streams)}
        self._present: dict[str, np.ndarray] = {}  # sample indices by place
        self._stopped: set[str] = set()

    def __iter__(self) -> Iterator[MixedStep]:
        return self

    def __next__(self) -> MixedStep:
        for stream in self.streams:
            self._feed(stream)
        step = self.filler.next_step()
        if step is None:
            raise StopIteration
        num = len(self.streams)
        ends, tokens = np.zeros(num, bool), np.zeros(num, np.int64)
        ends[[self._numbers[name] for name in step.ends]] = True
        for row in step.rows:
            for piece in row:
                tokens[self._numbers[piece.adapter]] += piece.length
        return MixedStep(self._lay(step.rows), ends, tokens)

    def stop(self, name: str) -> None:
        """An adapter gets no more batches, and none of the one that it has begun."""
        self._stopped.add(name)
        self.filler.remove(name)

    def get_state(self) -> dict[str, Any]:
        """The position of each adapter and what is pending, as JSON values."""
        pending = self.filler.get_state()
        return {
            stream.name: {
                "train": stream.train.get_state(),
                "present": self._present.get(stream.name, np.zeros(0, int)).tolist(),
                "pending": pending.get(stream.name),
                "stopped": stream.name in self._stopped,
            }
            for stream in self.streams
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to what `get_state` returned; adapters it does not know begin anew."""
        known = {one.name: state[one.name] for one in self.streams if one.name in state}
        for stream in self.streams:
            if stream.name in known:
                stream.train.set_state(known[stream.name]["train"])
        self._present = {n: np.asarray(one["present"]) for n, one in known.items()}
        self._stopped = {n for n, one in known.items() if one["stopped"]}
        self.filler.set_state(
            {n: one["pending"] for n, one in known.items() if one["pending"]}
        )

    def _feed(self, stream: Stream) -> None:
        done = stream.train.steps
        if done >= stream.total_steps or stream.name in self._stopped:
            return
        if not self.filler.waits_for(stream.name):
            return
        present = np.concatenate(stream.train.take())
        self._present[stream.name] = present
        self.filler.feed(
            stream.name,
            stream.train.samples.lengths[present].tolist(),
            later_batches=stream.total_steps - done - 1,
        )

    def _lay(self, rows: Sequence[Sequence[Piece]]) -> Batch:
        placed = []
        for row in rows:
            members, start, before = [], 0, ""
            for piece in row:
                if piece.adapter != before:
                    start = -(-start // self.filler.multiple) * self.filler.multiple
                number = self._numbers[piece.adapter]
                index = int(self._present[piece.adapter][piece.sample])
                samples = self.streams[number].train.samples
                members.append(Placed(samples, index, number, start))
                start, before = start + piece.length, piece.adapter
            placed.append(members)
        return batches.lay(
            placed,
            num_rows=self.filler.rows,
            max_length=self.filler.capacity,
            several=True,
        )


def evaluation(
    streams: Sequence[Stream], due: Sequence[str], *, num_rows: int, max_length: int
) -> Iterator[Batch]:
    """Held-out rows of the adapters that are due, as many batches as it takes."""
    rows = []
    for number, stream in enumerate(streams):
        if stream.name not in due or stream.eval is None:
            continue
        samples = stream.eval.samples
        for row in range(len(stream.eval.rows)):
            members = stream.eval.rows[row]
            ends = np.cumsum(samples.lengths[members]).tolist()
            rows.append(
                [
                    Placed(samples, index, number, start)
                    for index, start in zip(
                        members.tolist(), [0, *ends[:-1]], strict=True
                    )
                ]
            )
    for start in range(0, len(rows), num_rows):
        yield batches.lay(
            rows[start : start + num_rows],
            num_rows=num_rows,
            max_length=max_length,
            several=True,
        )
