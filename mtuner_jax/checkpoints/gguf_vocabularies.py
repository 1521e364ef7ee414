"""A tokenizer as the metadata of a GGUF file: the inverse of `gguf_tokenizers`.

A GGUF file names how text is split before merging instead of describing it. So the
name is found by trying: the tokenizer that `gguf_tokenizers` builds of the metadata
must cut a text of many kinds as the given one does, or there is no such file.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import transformers

from mtuner_jax.checkpoints import gguf_import, gguf_tokenizers
from mtuner_jax.checkpoints.model_export import ExportError

_SPECIAL = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
}
# Numbers, contractions, code, white space, scripts: where ways of splitting differ.
_TEXTS = (
    "Hello, world! It's 12345678 o'clock, we'LL see; don't.",
    "Two  spaces\n\n\tand tabs\r\n   \n",
    "def f(x):\n    return x ** 2  # 3.14e-10 != 0xFF && a_b-c/d\n\n\n\n",
    "\u00e9\u00e8\u00fc \u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e \u0440\u0443\u0441"
    " \u0627\u0644\u0639 \U0001f600\U0001f680 \u00bd \u00b2 3\u4e2d4 a1b2",
    " leading and trailing ",
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's metadata, by key."""

    metadata: Mapping[str, Any]

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Adds all of it to a file."""
        for key, value in self.metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, list(value))


def of_file(file: gguf_import.GgufFile) -> Vocabulary:
    """The metadata that a GGUF file already has."""
    return Vocabulary(file.all_metadata("tokenizer."))


def of_tokenizer(
    tokenizer: transformers.PreTrainedTokenizerBase, *, num_rows: int
) -> Vocabulary:
    """The metadata of a tokenizer.

    Args:
      tokenizer: A fast one.
      num_rows: Rows of the embedding table; tokens without a name are filled up.

    Raises:
      ExportError: It is of a kind that GGUF cannot say.
    """
    spec = json.loads(tokenizer.backend_tokenizer.to_str())  # pyrefly: ignore
    if spec["model"]["type"] != "BPE":
        raise ExportError(
            f"a tokenizer of type {spec['model']['type']} has no form in GGUF here; "
            "use --format merged"
        )
    common = _common(tokenizer, spec, num_rows=num_rows)
    tried = []
    for candidate in _candidates(spec, common):
        built = gguf_tokenizers.build(candidate.get)
        if all(built.encode(text) == tokenizer.encode(text) for text in _TEXTS):
            return Vocabulary(candidate)
        tried.append(candidate.get("tokenizer.ggml.pre", "sentencepiece"))
    raise ExportError(
        "no tokenizer that GGUF can name cuts text as this one does (tried "
        f"{', '.join(tried)}); use --format merged"
    )


def _common(
    tokenizer: transformers.PreTrainedTokenizerBase,
    spec: Mapping[str, Any],
    *,
    num_rows: int,
) -> dict[str, Any]:
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    size = max(num_rows, max(by_id) + 1)
    kinds = [gguf.TokenType.NORMAL] * size
    for token_id in range(size):
        if token_id not in by_id:
            kinds[token_id] = gguf.TokenType.UNUSED
    for added in spec["added_tokens"]:
        special = gguf.TokenType.CONTROL if added["special"] else None
        kinds[added["id"]] = special or gguf.TokenType.USER_DEFINED
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    first = tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    last = tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.add_bos_token": bool(first),
        "tokenizer.ggml.add_eos_token": bool(last),
    }
    for key, name in _SPECIAL.items():
        token = getattr(tokenizer, name)
        if token is not None:
            token_id = tokenizer.convert_tokens_to_ids(token)
            metadata[f"tokenizer.ggml.{key}"] = token_id
    if isinstance(tokenizer.chat_template, str):
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _candidates(
    spec: Mapping[str, Any], common: dict[str, Any]
) -> Sequence[dict[str, Any]]:
    """Metadata to try: byte-level by name of splitting, else sentencepiece."""
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in spec["model"]["merges"]
    ]
    if not spec["model"].get("byte_fallback"):
        return [
            common
            | {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.merges": merges,
            }
            for pre in gguf_tokenizers.PRE_NAMES
        ]
    return [
        common
        | {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": _scores(merges, common["tokenizer.ggml.tokens"]),
            "tokenizer.ggml.add_space_prefix": prefix,
        }
        for prefix in (True, False)
    ]


def _scores(merges: Sequence[str], tokens: Sequence[str]) -> list[float]:
    """The higher the earlier two tokens are merged to it; 0 for single characters."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks.get(token, -1) + 1) for token in tokens]
