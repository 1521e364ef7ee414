"""Safetensors files: the one writer of the project, and a reader over a folder.

safetensors 0.8.0 writes arrays that are not C-contiguous as garbage, silently
(safetensors issue 825), so everything goes through `write`, which makes arrays
contiguous and reads the file back before it gets its name.
"""

import os
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from mtuner_jax.checkpoints import folders, json_files
from mtuner_jax.configs import UserError
from mtuner_jax.weights import sources

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = ("F16", "BF16", "F32")


class SafetensorsError(UserError):
    """A file or folder that cannot be read as safetensors, or a write that failed."""


def write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes one safetensors file; `path` appears only when its content is proven.

    The file is written under a temporary name beside `path`, read back, compared byte
    for byte and then renamed. Metadata is `{"format": "pt"}`, as transformers wants.

    Args:
      path: Where to write; an existing file is replaced.
      tensors: Arrays of any memory order; float32, float16, bfloat16 or integers.
    """
    contiguous = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        safetensors.numpy.save_file(contiguous, temporary, metadata={"format": "pt"})
        _compare(temporary, contiguous)
        folders.flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_header(path: pathlib.Path) -> dict[str, sources.TensorInfo]:
    """Reads names, shapes and dtypes of one file, without its data."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: sources.TensorInfo(
                    shape=tuple(s.get_shape()), dtype=s.get_dtype()
                )
                for name, s in slices.items()
            }
    except OSError as error:
        raise SafetensorsError(f"{path} cannot be read: {error}") from error
    except safetensors.SafetensorError as error:
        raise SafetensorsError(
            f"{path} is damaged or incomplete ({error}); copy or download it again"
        ) from error


def read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all tensors of one file."""
    read_header(path)
    return safetensors.numpy.load_file(path)


class Folder:
    """The tensors of a Hugging Face folder: one file, or shards with an index.

    Files are opened for each read and closed again, so neither address space nor
    resident memory grows with the size of the checkpoint.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._file_of: dict[str, pathlib.Path] = {}
        self._infos: dict[str, sources.TensorInfo] = {}
        promised = _weight_map(path)
        for file in files(path):
            for name, info in read_header(file).items():
                self._file_of[name] = file
                self._infos[name] = info
        _check_promises(path / INDEX, promised, self._file_of)

    def infos(self) -> Mapping[str, sources.TensorInfo]:
        """Shape and dtype of every tensor, from the files' headers."""
        return self._infos

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Reads the part `box` (one slice per dim) of a tensor, in the file's dtype."""
        with safetensors.safe_open(self._file_of[name], framework="numpy") as file:
            whole = box == tuple(slice(0, size) for size in self._infos[name].shape)
            return file.get_tensor(name) if whole else file.get_slice(name)[box]


def files(folder: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Lists the safetensors files that hold a folder's weights.

    Raises:
      SafetensorsError: None there, an index without its shards, shards without index.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise SafetensorsError(
                f"{folder / INDEX} names {len(names)} files, of which {len(absent)} "
                f"are not there: {', '.join(absent[:3])}; complete the download"
            )
        return tuple(folder / name for name in names)
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    raise SafetensorsError(_nothing_to_read(folder))


def _weight_map(folder: pathlib.Path) -> dict[str, str]:
    index = folder / INDEX
    if not index.is_file():
        return {}
    weight_map = json_files.read(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise SafetensorsError(
            f"{index} is not an index of safetensors shards: no weight_map; "
            "copy or download it again"
        )
    return weight_map


def _nothing_to_read(folder: pathlib.Path) -> str:
    wanted = f"{folder} has neither {SINGLE} nor {INDEX}"
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return f"{wanted}, but {', '.join(shards[:3])}; add the index that names them"
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        return (
            f"{wanted}, only PyTorch pickles ({', '.join(pickled[:3])}), which can run "
            f"code when read and are not supported; convert them with transformers: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
            f".save_pretrained(new_folder)"
        )
    return f"{wanted}; point at a folder with a Hugging Face checkpoint"


def _check_promises(
    index: pathlib.Path, promised: Mapping[str, str], found: Mapping[str, pathlib.Path]
) -> None:
    broken = [
        name
        for name, file in promised.items()
        if name not in found or found[name].name != file
    ]
    if broken:
        name = broken[0]
        raise SafetensorsError(
            f"{index} names {len(broken)} tensors that their file lacks, such as "
            f"{name} in {promised[name]}; index and shards are from different "
            f"checkpoints, download them again"
        )


def _compare(path: pathlib.Path, wanted: Mapping[str, np.ndarray]) -> None:
    with safetensors.safe_open(path, framework="numpy") as file:
        for name, array in wanted.items():
            got = file.get_tensor(name)
            same = got.shape == array.shape and got.dtype == array.dtype
            if not same or got.tobytes() != array.tobytes():
                raise SafetensorsError(
                    f"{path}: {name} reads back different from what was written; "
                    f"nothing was replaced (safetensors {safetensors.__version__}, "
                    f"or a failing disk)"
                )
