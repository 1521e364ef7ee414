"""Special tokens in what people wrote: there, they are text like any other.

A chat template writes special tokens between messages. The same characters within a
message (a user who quotes `<|im_end|>`, or tries to end the turn) must not become
tokens. So they are *shielded* before rendering: each is replaced by one character of
a private plane. Afterwards the text is put together again and tokenized by a copy of
the tokenizer that knows the special tokens under other names, which only those of the
template get.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

_FIRST = 0x100000  # of plane 16, private use
_SHIELDS = re.compile("[\U00100000-\U0010fffd]")
_OPEN, _CLOSE = "\U000ff000", "\U000ff001"  # of plane 15, likewise


class SpecialTokens:
    """The special tokens of a tokenizer, and text that only looks like them.

    Attributes:
      texts: The special tokens, longest first.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        added = json.loads(backend.to_str())["added_tokens"]
        texts: list[str] = [token["content"] for token in added if token["special"]]
        self.texts = sorted(texts, key=lambda text: -len(text))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._to_shield = re.compile(f"{self._pattern.pattern}|{_SHIELDS.pattern}")
        # What each shield stands for: special tokens, and characters of the plane
        # that shields are from.
        self._shielded = list(self.texts)
        self._numbers = {text: number for number, text in enumerate(self.texts)}
        self._renamed: tokenizers.Tokenizer | None = None

    def shield(self, value: Any) -> Any:
        """A message's value with all special tokens in its texts replaced."""
        if isinstance(value, str):
            return self._to_shield.sub(lambda found: self._shield(found.group()), value)
        if isinstance(value, Mapping):
            return {key: self.shield(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.shield(entry) for entry in value]
        return value

    def _shield(self, text: str) -> str:
        number = self._numbers.setdefault(text, len(self._shielded))
        if number == len(self._shielded):
            self._shielded.append(text)
        return chr(_FIRST + number)

    def encode(self, text: str) -> tuple[list[int], np.ndarray]:
        """Tokenizes a rendered text in which shielded tokens are text.

        Returns:
          Ids, and [tokens, 2] first and last-plus-one characters in `text`, in which a
          shielded token is one character.
        """
        pieces, origins = [], []  # characters, and for each the one it came from
        position = 0
        for found in self._to_shield.finditer(text):
            pieces.append(text[position : found.start()])
            origins.append(np.arange(position, found.start()))
            if _SHIELDS.match(found.group()):
                new = self._shielded[ord(found.group()) - _FIRST]
                origin = np.full(len(new), found.start())
            else:
                new = f"{_OPEN}{found.group()}{_CLOSE}"
                inner = np.arange(found.start(), found.end())
                origin = np.concatenate([inner[:1], inner, inner[-1:]])
            pieces.append(new)
            origins.append(origin)
            position = found.end()
        pieces.append(text[position:])
        origins.append(np.arange(position, len(text)))
        return self._encode_renamed("".join(pieces), np.concatenate(origins))

    def _encode_renamed(
        self, text: str, origin: np.ndarray
    ) -> tuple[list[int], np.ndarray]:
        if self._renamed is None:
            self._renamed, self._true_ids = _renamed(self._backend, self.texts)
        encoding = self._renamed.encode(text, add_special_tokens=False)
        places = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        ends = np.append(origin + 1, 0)  # an empty token's end comes from place -1
        first = np.append(origin, len(origin))[places[:, 0]]
        last = np.where(places[:, 1] > places[:, 0], ends[places[:, 1] - 1], first)
        ids = [self._true_ids.get(id, id) for id in encoding.ids]
        return ids, np.stack([first, last], axis=1).astype(np.int64)


def shielded(text: str) -> bool:
    """Whether a rendered text holds shielded tokens."""
    return _SHIELDS.search(text) is not None


def _renamed(
    backend: tokenizers.Tokenizer, texts: Sequence[str]
) -> tuple[tokenizers.Tokenizer, dict[Any, Any]]:
    """A copy with special tokens under other names, and {its ids: the true ids}."""
    spec = json.loads(backend.to_str())
    for token in spec["added_tokens"]:
        if token["special"]:
            token["content"] = f"{_OPEN}{token['content']}{_CLOSE}"
    copy = tokenizers.Tokenizer.from_str(json.dumps(spec))
    true_ids = {
        copy.token_to_id(f"{_OPEN}{text}{_CLOSE}"): backend.token_to_id(text)
        for text in texts
    }
    return copy, true_ids
