"""A Hugging Face checkpoint, tensor by tensor, into a tree that is born sharded.

A tensor is read from its file (of a process' shards only their bounding box), put to
the devices in the file's dtype, and transposed, cast and written into the stacked
array there, by a small jitted update that donates the array. So host memory holds one
tensor at a time, whatever the size of the model.
"""

import hashlib
import json
import logging
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import jax

from mtuner_jax.checkpoints import json_files, matching, safetensors_files
from mtuner_jax.configs import UserError
from mtuner_jax.weights import loading, sources

Params = dict[str, Any]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
_OTHER_COPIES = ("*/*", "consolidated*")  # the same weights in other layouts
_VOLATILE_CONFIG = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
_SAMPLE_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class ModelNotFoundError(UserError):
    """No folder, GGUF file or hub model under the name asked for."""


def load(
    source: sources.TensorSource,
    names: Sequence[sources.HfName],
    abstract_params: Params,
) -> Params:
    """Reads a checkpoint into arrays placed as asked.

    Args:
      source: The checkpoint.
      names: Every tensor of the model, and where it goes.
      abstract_params: Tree of jax.ShapeDtypeStruct with shardings: linear kernels
        [L, in, out], biases and scales [L, size], tables [V or more, D]. Arrays in
        host memory pass through device memory once.

    Returns:
      The same tree, of jax.Array.

    Raises:
      matching.ImportMismatchError: Lists what is missing, unexpected or misshapen;
        nothing was put on a device then.
    """
    matching.check_tree(names, abstract_params)
    matching.check(source, names)
    by_path: dict[tuple[str, ...], list[sources.HfName]] = {}
    for name in names:
        by_path.setdefault(name.path, []).append(name)

    def leaf(path: tuple[jax.tree_util.DictKey, ...], target: jax.ShapeDtypeStruct):
        group = by_path[tuple(key.key for key in path)]
        return loading.load_leaf(source, group, target)

    return jax.tree.map_with_path(leaf, abstract_params)


def locate(model: str, *, revision: str | None = None) -> pathlib.Path:
    """Finds a model: local folder first, then GGUF file, then Hugging Face hub id.

    Args:
      model: `./folder`, `model.gguf` or `owner/name`.
      revision: Branch, tag or commit on the hub.

    Returns:
      A folder with `config.json`, or the GGUF file.
    """
    path = pathlib.Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise ModelNotFoundError(_unusable(path))
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model) or model[0] in ".~":
        raise ModelNotFoundError(
            f"model {model!r}: there is no such folder or file (seen from "
            f"{pathlib.Path.cwd()}), and it is no hub id (owner/name); check the path"
        )
    return _download(model, revision)


def base_identity(path: pathlib.Path) -> dict[str, Any]:
    """Fingerprints a model cheaply, for a checkpoint to recognise its base again.

    Reads three samples of 1 MiB per file (start with header, middle, end), so 140 GB
    take as little time as 1 GB.

    Returns:
      JSON-able: `config` (sha256 of config.json, without the fields that tools
      rewrite) and `files` ({name: {"bytes": size, "sha256": of the samples}}).
    """
    if path.is_file():
        return {"config": "", "files": {path.name: _fingerprint(path)}}
    config = json_files.read(path / "config.json")
    kept = {key: config[key] for key in config if key not in _VOLATILE_CONFIG}
    text = json.dumps(kept, sort_keys=True)
    files = safetensors_files.files(path)
    return {
        "config": hashlib.sha256(text.encode()).hexdigest(),
        "files": {file.name: _fingerprint(file) for file in files},
    }


def _unusable(path: pathlib.Path) -> str:
    if path.is_file():
        return f"{path} is neither a folder nor a .gguf file"
    inside = sorted(entry.name for entry in path.iterdir())
    text = (
        f"{path} has no config.json (it holds {matching.listing(inside) or 'nothing'})"
    )
    if "adapter_config.json" in inside:
        return f"{text}: it is an adapter; point at its base model"
    gguf = [name for name in inside if name.endswith(".gguf")]
    if gguf:
        return f"{text}; name the GGUF file itself: {path / gguf[0]}"
    return f"{text}; point at a folder with a Hugging Face checkpoint"


def _download(model: str, revision: str | None) -> pathlib.Path:
    logger.info("model %s is not a local path, asking the Hugging Face hub", model)
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_OTHER_COPIES),
        )
    except (
        huggingface_hub.errors.HfHubHTTPError,
        huggingface_hub.errors.HFValidationError,
        OSError,
    ) as error:
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise ModelNotFoundError(
            f"model {model!r}: no local folder of that name in {pathlib.Path.cwd()}, "
            f"and the Hugging Face hub has none ({type(error).__name__}: {reason}); "
            f"check the name, the network and, for gated models, `hf auth login`, or "
            f"download it elsewhere and give the folder"
        ) from error
    path = pathlib.Path(folder)
    if not (path / "config.json").is_file():
        raise ModelNotFoundError(_unusable(path))
    return path


def _fingerprint(path: pathlib.Path) -> dict[str, Any]:
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return {"bytes": size, "sha256": digest.hexdigest()}
