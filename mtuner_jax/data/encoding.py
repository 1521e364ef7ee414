"""Text to token ids and back to characters, without a tokenizer's habits.

The tokenizer inside a transformers tokenizer pads, truncates and adds special tokens
by settings that any call may change. Here a copy of it does none of that, and keeps
for each token the exact characters it came from (a post-processor trims them).
"""

import hashlib
import json

import numpy as np
import tokenizers
import transformers

from mtuner_jax.data import errors, special_tokens

# Longer texts are cut before tokenizing, far behind what max_length can reach.
LONG_TEXT_CHARS = 2**20

# What ends a turn in templates whose end-of-turn token is not the EOS token.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
)


class Encoder:
    """Tokenizes text as it stands: nothing is added, nothing left out.

    Attributes:
      bos_id: None if the tokenizer has no BOS token.
      eos_id: None if the tokenizer has no EOS token.
      adds_bos: Whether the tokenizer by itself puts BOS before a text.
      end_texts: Special tokens that end a turn.
      end_ids: Their ids.
      special: The special tokens, and text that only looks like them.
      digest: SHA-256 of the tokenizer, without its padding and truncation settings.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise errors.DataError(
                f"tokenizer {type(tokenizer).__name__} has no tokenizer.json; "
                "convert it to a fast tokenizer"
            )
        self._backend, self.digest = _plain_copy(backend)
        self.special = special_tokens.SpecialTokens(self._backend)
        self._longest_token_chars = max(map(len, self._backend.get_vocab()), default=1)
        self.bos_id = self._id(tokenizer.bos_token)
        self.eos_id = self._id(tokenizer.eos_token)
        first = tokenizer.encode("a", add_special_tokens=True)[:1]
        self.adds_bos = self.bos_id is not None and first == [self.bos_id]
        ends = (tokenizer.eos_token, *END_OF_TURN)
        self.end_texts = tuple(
            text for text in ends if text and self._id(text) is not None
        )
        self.end_ids = frozenset(map(self._id, self.end_texts))

    def encode(
        self, text: str, *, max_length: int, shielded: bool = False
    ) -> tuple[list[int], np.ndarray]:
        """Tokenizes, with each token's place in the text.

        Args:
          max_length: Tokens that will be used; a very long text may be cut, but
            never before more than `max_length` tokens of it.
          shielded: Whether what `special.shield` replaced may be in it; it is text
            again then, no special token.

        Returns:
          Ids, and [tokens, 2] first and last-plus-one characters.
        """
        if len(text) > LONG_TEXT_CHARS:
            reach = 2 * (max_length + 1) * self._longest_token_chars
            text = text[: max(LONG_TEXT_CHARS, reach)]
        if shielded and special_tokens.shielded(text):
            return self.special.encode(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, np.asarray(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: list[int]) -> str:
        """Turns ids back to text, special tokens included."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


def _plain_copy(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, str]:
    spec = json.loads(backend.to_str())
    spec |= {"truncation": None, "padding": None}
    text = json.dumps(spec, sort_keys=True)
    spec["post_processor"] = None
    copy = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return copy, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
