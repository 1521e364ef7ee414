"""What an import reads from, and the table that says where each tensor goes."""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """What a file's header says of one tensor; `dtype` in safetensors' spelling."""

    shape: tuple[int, ...]
    dtype: str


class HfName(Protocol):
    """One tensor of the checkpoint and its place in the tree (read only).

    `models.llama_hf_names.HfTensor` documents the fields.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def path(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def layer(self) -> int | None: ...  # noqa: D102
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def transposed(self) -> bool: ...  # noqa: D102
    @property
    def padded(self) -> bool: ...  # noqa: D102


class TensorSource(Protocol):
    """Where tensors come from: a safetensors folder, a GGUF file, a test."""

    def infos(self) -> Mapping[str, TensorInfo]:
        """Shape (Hugging Face layout) and dtype of every tensor."""
        ...

    def read(self, name: str, box: Box) -> np.ndarray:
        """Reads one part of one tensor; `box` has a slice for each dim."""
        ...
