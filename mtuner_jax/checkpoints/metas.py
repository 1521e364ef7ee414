"""Whether a checkpoint belongs to the run that asks for it."""

import dataclasses
import json
import pathlib
from typing import Any

import jax

from mtuner_jax import configs

Json = Any


class CheckpointMismatch(configs.ConfigError):
    """A checkpoint that belongs to another run than the one that asks for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunMeta:
    """What has to be the same for a run to continue from a checkpoint.

    Every field but `seed` is JSON: text, numbers, lists or nested dicts.

    Attributes:
      base_model: Identity of the frozen weights, for example hashes.
      data: Fingerprint of samples, order and batch size.
      lora: The adapters' settings.
      seed: The run's seed.
      rng: How random bits are made from it.
    """

    base_model: Json
    data: Json
    lora: Json
    seed: int
    rng: Json


def array_types(tree: Any) -> dict[str, str]:
    """dtype and shape of each leaf by its path.

    `{".adapters['q']['lora_a']": "float32[2,8,4]"}` for a tree of one array.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    }


def check_same_run(path: pathlib.Path, saved: Json, meta: RunMeta) -> None:
    """Raises CheckpointMismatch with every field of `meta` that was another one."""
    # What was saved went through JSON (tuples became lists), so this has to as well.
    asked = json.loads(json.dumps(dataclasses.asdict(meta)))
    differences = _differences(saved, asked, "")
    if differences:
        raise CheckpointMismatch(
            f"{path} is not a checkpoint of this run: {'; '.join(differences)}. Ask "
            "for the saved values, or start anew in another --output_dir"
        )


def _differences(saved: Json, asked: Json, name: str) -> list[str]:
    if isinstance(saved, dict) and isinstance(asked, dict):
        return [
            difference
            for key in sorted(saved.keys() | asked.keys())
            for difference in _differences(
                saved.get(key), asked.get(key), f"{name}.{key}" if name else key
            )
        ]
    if saved == asked:
        return []
    return [f"{name} was {json.dumps(saved)}, now {json.dumps(asked)} is asked for"]


def check_same_arrays(path: pathlib.Path, saved: dict[str, str], tree: Any) -> None:
    """Raises CheckpointMismatch if `tree` asks for other names, shapes or dtypes."""
    asked = array_types(tree)
    unlike = [
        f"{name}: saved {saved.get(name, 'nothing')}, "
        f"asked {asked.get(name, 'nothing')}"
        for name in sorted(saved.keys() | asked.keys())
        if saved.get(name) != asked.get(name)
    ]
    if unlike:
        more = f" and {len(unlike) - 5} more" if len(unlike) > 5 else ""
        raise CheckpointMismatch(
            f"{path} holds other arrays: {'; '.join(unlike[:5])}{more}"
        )
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert leaf.sharding is not None, f"{jax.tree_util.keystr(leaf_path)}: sharding"
