"""The order of the data: batches for training, without end, and for evaluation."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from mtuner_jax.data import batches, errors, fingerprints, packing
from mtuner_jax.data.samples import Samples
from mtuner_jax.numbers import documents
from mtuner_jax.numbers.documents import RowDocuments
from mtuner_jax.protocols.states import Batch

STATE_VERSION = 1

_IN_THIS_THREAD = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class TrainData:
    """An endless iterator over the batches of optimizer steps.

    Rows are shuffled anew for each epoch (by seed and epoch), and every sample is
    seen exactly once per epoch: the last batch of an epoch is filled up with rows of
    weight 0. A position is a number of steps, so resuming replays nothing. Every
    process sees the same global batches, whatever their number, and takes its part.

    Attributes:
      steps_per_epoch: Optimizer steps in which every sample is seen once.
      samples: The tokenized samples, of which `rows` may use a part.
      rows: Which samples share a row.
      global_batch_size: Rows of a batch.
      max_length: Tokens of a row.
    """

    def __init__(
        self,
        samples: Samples,
        rows: packing.PackedRows,
        *,
        global_batch_size: int,
        max_length: int,
        seed: int,
        fingerprint: fingerprints.Fingerprint,
    ):
        self.samples = samples
        self.rows = rows
        self.global_batch_size = global_batch_size
        self.max_length = max_length
        self._fingerprint = fingerprint
        self._samples_seen = 0
        epochs = grain.MapDataset.range(len(rows)).shuffle(
            seed=named_seed(seed, "order")
        )
        steps = epochs.batch(global_batch_size, drop_remainder=False, batch_fn=list)
        self.steps_per_epoch = len(steps)
        self._iterator = iter(steps.repeat().to_iter_dataset(_IN_THIS_THREAD))

    @property
    def documents(self) -> RowDocuments:
        """What the rows hold."""
        return _count(self.samples, self.rows, self.max_length)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return batches.assemble(
            self.samples,
            self.take(),
            num_rows=self.global_batch_size,
            max_length=self.max_length,
        )

    def take(self) -> list[np.ndarray]:
        """The samples of the next batch, by row."""
        members = [self.rows[row] for row in next(self._iterator)]
        self._samples_seen += sum(map(len, members))
        return members

    def coming(self, number: int) -> list[np.ndarray]:
        """Lengths of the samples of the next batches, which are not taken."""
        state, seen = self._iterator.get_state(), self._samples_seen
        taken = [np.concatenate(self.take()) for _ in range(number)]
        self._iterator.set_state(state)
        self._samples_seen = seen
        return [self.samples.lengths[indices] for indices in taken]

    @property
    def steps(self) -> int:
        """Batches taken so far, those before a resume included."""
        return int(self._iterator.get_state()["next_index"])

    @property
    def samples_seen(self) -> int:
        """Samples taken so far, those before a resume included."""
        return self._samples_seen

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.steps / self.steps_per_epoch

    def fingerprint(self) -> fingerprints.Fingerprint:
        """What the meaning of a position depends on, as JSON values."""
        return dict(self._fingerprint)

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch taken, as JSON values."""
        return {
            "version": STATE_VERSION,
            "iterator": self._iterator.get_state(),
            "samples_seen": self._samples_seen,
            "fingerprint": self.fingerprint(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned, in whichever process.

        Raises:
          DataError: The position is one in other data, tokens, rows or order.
        """
        if state.get("version") != STATE_VERSION:
            raise errors.DataError(
                f"the checkpoint's data position has version {state.get('version')}, "
                f"this program reads {STATE_VERSION}"
            )
        fingerprints.check(state["fingerprint"], self._fingerprint)
        self._iterator.set_state(state["iterator"])
        self._samples_seen = state["samples_seen"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalData:
    """Batches in a fixed order, all samples, each time it is iterated over.

    The last batch is filled up with rows of weight 0, so all have one shape.

    Attributes:
      samples: The tokenized samples, of which `rows` may use a part.
      rows: Which samples share a row.
      batch_size: Rows of a batch.
      max_length: Tokens of a row.
    """

    samples: Samples
    rows: packing.PackedRows
    batch_size: int
    max_length: int

    @property
    def documents(self) -> RowDocuments:
        """What the rows hold."""
        return _count(self.samples, self.rows, self.max_length)

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.rows), self.batch_size):
            stop = min(start + self.batch_size, len(self.rows))
            yield batches.assemble(
                self.samples,
                [self.rows[row] for row in range(start, stop)],
                num_rows=self.batch_size,
                max_length=self.max_length,
            )


def split(
    num_samples: int, *, val_size: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the held-out samples by seed.

    Args:
      val_size: Share of the samples (below 1, rounded, at least one sample) or their
        number; 0 for none.

    Returns:
      Indices [kept] and [held out] int32, both in ascending order.
    """
    if val_size >= 1 and val_size != int(val_size):
        raise errors.DataError(f"val_size={val_size}: a whole number, or below 1")
    if not val_size:
        return np.arange(num_samples, dtype=np.int32), np.zeros(0, np.int32)
    share = max(1, round(num_samples * val_size))
    num_held_out = int(val_size) if val_size >= 1 else share
    if num_held_out >= num_samples:
        raise errors.DataError(
            f"val_size={val_size:g} holds out {num_held_out} of {num_samples} samples "
            "and leaves none to train on; lower it"
        )
    order = grain.MapDataset.range(num_samples).shuffle(seed=named_seed(seed, "val"))
    chosen = [order[place] for place in range(num_held_out)]
    held_out = np.isin(np.arange(num_samples), np.asarray(chosen, np.int32))
    kept = np.flatnonzero(~held_out).astype(np.int32)
    return kept, np.flatnonzero(held_out).astype(np.int32)


def named_seed(seed: int, name: str) -> int:
    """Derives a 32-bit seed for one purpose, the same on every platform."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _count(samples: Samples, rows: packing.PackedRows, max_length: int) -> RowDocuments:
    lengths, starts = samples.lengths[rows.samples].tolist(), rows.starts.tolist()
    held = (lengths[start:end] for start, end in itertools.pairwise(starts))
    return documents.count(held, max_length=max_length)
