"""The tokenizer of a Hugging Face folder."""

import pathlib
from typing import Any

import transformers

from mtuner_jax.checkpoints import json_files
from mtuner_jax.configs import UserError

# One of these holds the vocabulary.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class TokenizerError(UserError):
    """A folder without a tokenizer, or with one that cannot be read."""


def load(folder: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer that transformers makes of a local folder.

    Raises:
      TokenizerError: No tokenizer, or one that transformers refuses.
      JsonFileError: One of its files is no JSON.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise TokenizerError(
            f"{folder} has no tokenizer ({', '.join(_VOCABULARIES)}); copy the "
            "tokenizer's files of the same model into it"
        )
    for name in ("tokenizer.json", *_SETTINGS):
        if (folder / name).is_file():
            json_files.read(folder / name)
    auto_tokenizer: Any = transformers.AutoTokenizer
    try:
        return auto_tokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{folder}: transformers cannot make a tokenizer of its files "
            f"({type(error).__name__}: {reason}); copy them again from the same model"
        ) from error
