"""Tokenizers from GGUF metadata, built with `tokenizers` and without torch.

Two kinds cover the models here: byte-level BPE (`gpt2`: Llama 3, SmolLM2, Qwen2.5,
Mistral Nemo), where `tokenizer.ggml.pre` names how text is split before merging, and
sentencepiece BPE (`llama`: Llama 2, Mistral), where scores give the order of merges.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mtuner_jax.configs import UserError

Metadata = Callable[..., Any]

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_GPT2 = ("gpt-2", "gpt2")
_DIGIT_BY_DIGIT = ("smollm",)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS_FIRST = (*_LLAMA3, "tekken")
_SPACE = "\u2581"
# Of the ways to split text before merging: one name of each, as llama.cpp writes it.
PRE_NAMES = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken")
_TOKENS = "tokenizer.ggml.tokens"
# What each kind of tokenizer is made of.
_NEEDED = {
    "gpt2": (_TOKENS, "tokenizer.ggml.merges"),
    "llama": (_TOKENS, "tokenizer.ggml.scores"),
}


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type` that change how text is cut."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


class GgufTokenizerError(UserError):
    """Metadata from which no faithful tokenizer can be built."""


def build(metadata: Metadata) -> transformers.PreTrainedTokenizerFast:
    """Builds the tokenizer that GGUF metadata describes.

    Args:
      metadata: Gives the value of a key, or the default passed with it.

    Raises:
      GgufTokenizerError: A kind of tokenizer or splitting that is not known here; the
        wrong one would cut text differently from what the model was trained on.
    """
    kind = metadata("tokenizer.ggml.model")
    if kind not in _NEEDED:
        raise GgufTokenizerError(
            f"tokenizer.ggml.model={kind!r} is not supported; supported: 'gpt2' "
            f"(byte-level BPE), 'llama' (sentencepiece)"
        )
    for key in _NEEDED[kind]:
        if metadata(key) is None:
            raise GgufTokenizerError(
                f"the GGUF file lacks {key}: it holds no whole tokenizer; convert the "
                "model again, or use a folder with tokenizer.json"
            )
    make = _byte_level if kind == "gpt2" else _sentencepiece
    backend = make(metadata)
    tokens = metadata("tokenizer.ggml.tokens")
    _add_whole_tokens(backend, tokens, metadata("tokenizer.ggml.token_type", []))
    _add_bos_and_eos(backend, metadata, tokens)
    special = {
        name: tokens[token_id]
        for name, token_id in _special_ids(metadata).items()
        if token_id is not None
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = metadata("tokenizer.chat_template")
    return tokenizer


def _byte_level(metadata: Metadata) -> tokenizers.Tokenizer:
    pre = metadata("tokenizer.ggml.pre", "default")
    tokens = metadata("tokenizer.ggml.tokens")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in metadata("tokenizer.ggml.merges")],
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    if _SPLITS.get(pre) is _QWEN2_SPLIT:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _splitter(pre)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return plain
    if pre in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, plain])
    if pre in _SPLITS:
        split = pre_tokenizers.Split(tokenizers.Regex(_SPLITS[pre]), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, to_bytes])
    known = (*_GPT2, *_DIGIT_BY_DIGIT, *_SPLITS)
    raise GgufTokenizerError(
        f"tokenizer.ggml.pre={pre!r} is not known, so text would be cut wrongly; "
        f"known: {', '.join(known)}. Use a folder with tokenizer.json instead"
    )


def _sentencepiece(metadata: Metadata) -> tokenizers.Tokenizer:
    tokens = metadata("tokenizer.ggml.tokens")
    unknown_id = metadata("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_by_score(tokens, metadata("tokenizer.ggml.scores")),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata("tokenizer.ggml.add_space_prefix", True)
    to_spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), to_spaces])
        if prefix
        else to_spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([*steps, *strip])
    return backend


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score first."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[token], ids[left], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_whole_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Marks tokens that text must not be cut through: control and user-defined ones."""
    special = [TokenType.CONTROL, TokenType.UNKNOWN]
    for token, kind in zip(tokens, types, strict=False):
        whole = tokenizers.AddedToken(token, normalized=False, special=kind in special)
        if kind in special:
            backend.add_special_tokens([whole])
        elif kind == TokenType.USER_DEFINED:
            backend.add_tokens([whole])


def _add_bos_and_eos(
    backend: tokenizers.Tokenizer, metadata: Metadata, tokens: Sequence[str]
) -> None:
    ids = {name: i for name, i in _special_ids(metadata).items() if i is not None}
    pre = metadata("tokenizer.ggml.pre", "default")
    default_bos = metadata("tokenizer.ggml.model") == "llama" or pre in _LLAMA3
    wanted = {
        "bos_token": metadata("tokenizer.ggml.add_bos_token", default_bos),
        "eos_token": metadata("tokenizer.ggml.add_eos_token", False),
    }
    used = {
        name: (tokens[ids[name]], ids[name])
        for name, add in wanted.items()
        if add and name in ids
    }
    if not used:
        return
    bos = [used["bos_token"][0]] if "bos_token" in used else []
    eos = [used["eos_token"][0]] if "eos_token" in used else []
    second = [f"{token}:1" for token in bos], [f"{token}:1" for token in eos]
    template = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *second[0], "$B:1", *second[1]],
        special_tokens=list(used.values()),
    )
    before = backend.post_processor
    backend.post_processor = (
        processors.Sequence([before, template]) if before else template
    )


def _special_ids(metadata: Metadata) -> dict[str, int | None]:
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    return {name: metadata(f"tokenizer.ggml.{key}") for name, key in keys.items()}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
