"""Tokenized samples, end to end in flat arrays: 5 bytes a token, no Python objects."""

import array
import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """The usable samples of a dataset, cut to `max_length`.

    Attributes:
      ids: [tokens] int32.
      trained: [tokens] bool, whether a token carries loss.
      starts: [samples + 1] int64, where each sample begins.
      sample_ids: [samples] int32, its index among the rows of the dataset; the turns
        of a conversation that was split have the same.
    """

    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    sample_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64 tokens."""
        return np.diff(self.starts)

    @property
    def num_trained(self) -> np.ndarray:
        """[samples] int64 tokens that carry loss."""
        sums = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns one sample's ids [tokens] int32 and mask [tokens] bool, as views."""
        part = slice(self.starts[index], self.starts[index + 1])
        return self.ids[part], self.trained[part]

    def digest(self) -> str:
        """SHA-256 of everything a step can see of the samples."""
        digest = hashlib.sha256()
        for part in (self.ids, self.trained, self.starts, self.sample_ids):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class SamplesBuilder:
    """Collects samples one by one."""

    def __init__(self):
        self._ids = array.array("i")
        self._trained = bytearray()
        self._starts = array.array("q", [0])
        self._sample_ids = array.array("i")

    def __len__(self) -> int:
        return len(self._sample_ids)

    def add(self, sample_id: int, ids: np.ndarray, trained: np.ndarray) -> None:
        """Appends a sample of [tokens] int32 ids and bool mask."""
        self._ids.frombytes(np.ascontiguousarray(ids, np.int32).tobytes())
        self._trained.extend(np.ascontiguousarray(trained, bool).tobytes())
        self._starts.append(len(self._ids))
        self._sample_ids.append(sample_id)

    def build(self) -> Samples:
        """Returns the samples; the builder must not be used again."""
        return Samples(
            ids=np.frombuffer(self._ids, np.int32),
            trained=np.frombuffer(self._trained, bool),
            starts=np.frombuffer(self._starts, np.int64),
            sample_ids=np.frombuffer(self._sample_ids, np.int32),
        )
