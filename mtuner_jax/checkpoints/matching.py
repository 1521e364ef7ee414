"""Whether a checkpoint holds the tensors that a model wants, and what it lacks."""

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mtuner_jax.checkpoints import safetensors_files
from mtuner_jax.configs import UserError
from mtuner_jax.weights import loading, sources

# Tensors of older files that are computed, not learned.
_COMPUTED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# A second copy of a tied table is fine as long as it is one.
_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
_ROWS_AT_A_TIME = 4096
Params = dict[str, Any]


class ImportMismatchError(UserError):
    """Tensors missing, unexpected or of another shape than the model wants."""


def check(source: sources.TensorSource, names: Sequence[sources.HfName]) -> None:
    """Compares names, shapes and dtypes, all from headers.

    Raises:
      ImportMismatchError: Everything missing, unexpected or misshapen, by count and
        first few names.
    """
    infos = source.infos()
    wanted = {name.name: name for name in names}
    extra = {name for name in infos if name not in wanted and not _COMPUTED.match(name)}
    copies = {
        name
        for name in extra
        if _COPIES.get(name) in wanted and _equal(source, name, _COPIES[name])
    }
    problems = compare(
        {name.name: name.shape for name in names},
        {name: info.shape for name, info in infos.items()},
    )
    problems["unexpected"] = sorted(extra - copies)
    problems["of an unsupported dtype"] = [
        f"{name} {infos[name].dtype}"
        for name in wanted
        if name in infos and infos[name].dtype not in safetensors_files.FLOAT_DTYPES
    ]
    if any(problems.values()):
        raise ImportMismatchError(
            f"the checkpoint does not fit the model of its config: of {len(wanted)} "
            f"tensors wanted and {len(infos)} found, {told(problems)}"
            + _advice(problems, wanted)
        )


def compare(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> dict[str, list[str]]:
    """Tensors by what is wrong with them, given the shape of each."""
    return {
        "missing": [name for name in wanted if name not in found],
        "unexpected": sorted(found.keys() - wanted.keys()),
        "misshapen": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name] != shape
        ],
    }


def told(problems: Mapping[str, Sequence[str]]) -> str:
    """The problems there are, by count and first few tensors."""
    return "; ".join(
        f"{len(items)} {kind} ({listing(items)})"
        for kind, items in problems.items()
        if items
    )


def _advice(problems: Mapping[str, Sequence[str]], wanted: Mapping[str, Any]) -> str:
    unexpected = problems["unexpected"]
    prefix = _prefix(unexpected, wanted)
    if problems["missing"] == ["lm_head.weight"]:
        return ". Without an output head, config.json needs tie_word_embeddings=true"
    if unexpected == ["lm_head.weight"]:
        return (
            ". lm_head.weight differs from the embedding although config.json says "
            "tie_word_embeddings=true; set it to false"
        )
    if any("lora_" in name for name in unexpected):
        return ". These look like adapters; point at the base model instead"
    if prefix:
        return (
            f". The names begin with {prefix!r}, as of a wrapped model; save the model "
            "inside it"
        )
    if problems["missing"] and not problems["misshapen"] and not unexpected:
        return ". The checkpoint is incomplete; copy or download it again"
    return ". Check that config.json and the weights are of the same model"


def _prefix(unexpected: Iterable[str], wanted: Mapping[str, Any]) -> str:
    """What most unexpected names have before a name that is wanted, if anything."""
    prefixes = collections.Counter(
        name[: dot.end()]
        for name in unexpected
        for dot in re.finditer(r"\.", name)
        if name[dot.end() :] in wanted
    )
    prefix, count = (prefixes.most_common(1) or [("", 0)])[0]
    return prefix if 2 * count > len(wanted) else ""


def check_tree(names: Iterable[sources.HfName], abstract_params: Params) -> None:
    """Our own invariant: the name table and the tree speak of the same arrays."""
    paths = {name.path for name in names}
    leaves, _ = jax.tree.flatten_with_path(abstract_params)
    ours = {tuple(key.key for key in path): leaf for path, leaf in leaves}
    assert paths == ours.keys(), sorted(paths ^ ours.keys())
    for name in names:
        shape, _ = loading.hf_placement(name, ours[name.path])
        # Our rows, which may be padded, are their columns where we transpose.
        want = list(name.shape)
        if name.padded or name.transposed:
            rows = 1 if name.transposed else 0
            want[rows] = max(want[rows], shape[rows])
        fits = shape == tuple(want)
        assert fits, (name, ours[name.path])


def _equal(source: sources.TensorSource, name: str, other: str) -> bool:
    shape = source.infos()[name].shape
    if other not in source.infos() or source.infos()[other].shape != shape:
        return False
    for start in range(0, shape[0], _ROWS_AT_A_TIME):
        rows = slice(start, min(start + _ROWS_AT_A_TIME, shape[0]))
        box = (rows, *(slice(0, size) for size in shape[1:]))
        if not np.array_equal(source.read(name, box), source.read(other, box)):
            return False
    return True


def listing(items: Sequence[str], count: int = 5) -> str:
    """Joins the first few items, with dots where more follow."""
    more = ", ..." if len(items) > count else ""
    return ", ".join(items[:count]) + more
