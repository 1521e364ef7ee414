"""Whether a checkpoint belongs to the run that asks for it."""

import dataclasses
import json
import pathlib
from typing import Any

import jax

from mtuner_jax import configs

Json = Any
# Fields of which a digest is kept, and what to say where it differs.
_CONTENTS = {
    "data.dataset": "the dataset is another one",
    "data.tokenizer": "the tokenizer is another one",
    "data.chat_template": "the chat template is another one",
}


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


def check_same_run(
    path: pathlib.Path, saved: Json, meta: RunMeta, *, rows: str = ""
) -> None:
    """Compares who asks for a checkpoint with the run that saved it.

    Args:
      path: The checkpoint.
      saved: Its run, as JSON.
      meta: The run that asks.
      rows: How the dataset's rows differ, if somebody knows.

    Raises:
      CheckpointMismatch: Says in words what differs, and what to do.
    """
    # What was saved went through JSON (tuples became lists), so this has to as well.
    asked = json.loads(json.dumps(dataclasses.asdict(meta)))
    found = _differences(saved, asked, "")
    if not found:
        return
    texts = [_base_words(saved["base_model"], asked["base_model"])]
    texts += [_words(name, *values, rows=rows) for name, values in found.items()]
    told = [text for text in texts if text]
    if not told:
        told = [
            "the samples became other tokens, though dataset, tokenizer and chat "
            "template are the same (another setting of how they are rendered, such as "
            "dataset.template_date, or another version of the tokenizers library)"
        ]
    raise CheckpointMismatch(
        f"{path} is not a checkpoint of this run: {'; '.join(told)}. "
        f"{_remedies(path, found)}"
    )


def _differences(saved: Json, asked: Json, name: str) -> dict[str, tuple[Json, Json]]:
    """Saved and asked value of each field that differs, by its dotted name."""
    if isinstance(saved, dict) and isinstance(asked, dict):
        return {
            field: values
            for key in sorted(saved.keys() | asked.keys())
            for field, values in _differences(
                saved.get(key), asked.get(key), f"{name}.{key}" if name else key
            ).items()
        }
    return {} if saved == asked else {name: (saved, asked)}


def _words(name: str, saved: Json, asked: Json, *, rows: str) -> str:
    """A field's difference; empty where another field tells it."""
    if name.startswith("base_model") or name == "data.tokens":
        return ""
    if name in _CONTENTS:
        text = _CONTENTS[name]
        return rows or text if name == "data.dataset" else text
    values = f"{json.dumps(saved)}, now {json.dumps(asked)} is asked for"
    return f"{_setting(name)} was {values}"


def _base_words(saved: Json, asked: Json) -> str:
    """What is different about the base model; empty if nothing is."""
    if saved == asked:
        return ""
    if not (isinstance(saved, dict) and isinstance(asked, dict)):
        return f"the base model was {saved}, now it is {asked}"
    if "random_init" in saved or "random_init" in asked:
        return f"the base model was {_weights(saved)}, now it is {_weights(asked)}"
    parts = ["its config.json"] * (saved.get("config") != asked.get("config"))
    before, now = saved.get("files") or {}, asked.get("files") or {}
    for name in sorted(before.keys() | now.keys()):
        was, is_now = _size(before.get(name)), _size(now.get(name))
        if was != is_now:
            parts.append(f"{name} ({was} then, {is_now} now)")
        elif before[name] != now[name]:
            parts.append(f"the content of {name}")
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f"the base model is another one: {', '.join(parts[:3])}{more} changed"


def _size(file: Json) -> str:
    return f"{file['bytes']:,} bytes" if file else "missing"


def _weights(identity: dict[str, Json]) -> str:
    if "random_init" in identity:
        return f"random (seed {identity['random_init']})"
    return f"read from {', '.join(list(identity.get('files') or {})[:3])}"


def _setting(name: str) -> str:
    """The flag of a field: those of the data stand at the top."""
    return name.removeprefix("data.")


def _remedies(path: pathlib.Path, found: dict[str, tuple[Json, Json]]) -> str:
    """What the user can do about it."""
    flags = [
        f"--{_setting(name)} {saved}"
        for name, (saved, _) in found.items()
        if name not in _CONTENTS
        and isinstance(saved, (int, float, str))
        and not name.startswith(("base_model", "rng", "data.tokens"))
    ]
    back = (
        f"Ask for the saved values ({' '.join(flags)})"
        if flags
        else ("Give back what was there")
    )
    text = f"{back}, or start anew in another --output_dir"
    if any(name.startswith(("base_model", "lora.")) for name in found):
        return text
    in_run = path.parent.name == "checkpoints"
    source = path.parent.parent if in_run else path
    return f"{text}, from this adapter if you like: --init_adapter {source}"


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
