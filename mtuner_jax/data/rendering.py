"""Examples to token ids and the mask of tokens that carry loss."""

import logging
from typing import NamedTuple

import numpy as np
import transformers

from mtuner_jax import configs
from mtuner_jax.data import encoding, errors, formats, templates

logger = logging.getLogger(__name__)

TrainOn = configs.TrainOn


class RenderedTokens(NamedTuple):
    """One sample, not yet cut to `max_length`.

    Attributes:
      ids: [tokens] int32.
      trained: [tokens] bool; the first is never one, since nothing predicts it.
    """

    ids: np.ndarray
    trained: np.ndarray


class Renderer:
    """Renders the samples of a run, and the prompts of its generations.

    Attributes:
      template: None if there is no chat template.
      encoder: Text to ids.
      train_on: The run's `dataset.train_on`.
      max_length: Tokens of a row; a longer sample may lose some of what is behind.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        train_on: TrainOn = TrainOn.AUTO,
        chat_template: str = "",
        max_length: int,
    ):
        self.encoder = encoding.Encoder(tokenizer)
        self.train_on = train_on
        self.max_length = max_length
        source = templates.load_source(tokenizer, chat_template)
        self.template: templates.ChatTemplate | None = None
        if source:
            self.template = templates.ChatTemplate(
                source,
                special_tokens=_named_tokens(tokenizer),
                end_texts=self.encoder.end_texts,
            )
        if self.encoder.eos_id is None:
            logger.warning(
                "the tokenizer has no EOS token: completions without a chat template "
                "end without one, so the model won't learn to stop"
            )

    def render(self, example: formats.Example) -> RenderedTokens:
        """Tokenizes an example and marks the tokens that carry loss.

        Raises:
          SampleError: Nothing in it carries loss, or the template refuses it.
        """
        if isinstance(example, formats.Plain):
            tokens = self._plain(example)
        else:
            tokens = self._chat(example)
        if self.train_on is TrainOn.ALL:
            tokens.trained[:] = True
        tokens.trained[:1] = False
        return tokens

    def prompt_ids(self, messages: list[formats.Message]) -> list[int]:
        """Tokenizes a conversation up to where the assistant's answer begins."""
        text = self._needed_template().render(messages, add_generation_prompt=True)
        return self.encoder.encode(text, max_length=self.max_length)[0]

    def ends_turn(self, tokens: RenderedTokens) -> bool:
        """Whether the last token with loss is one that ends a turn or text."""
        last = np.flatnonzero(tokens.trained)[-1:]
        return bool(last.size) and int(tokens.ids[last[0]]) in self.encoder.end_ids

    def _plain(self, example: formats.Plain) -> RenderedTokens:
        prompt, _ = self.encoder.encode(example.prompt, max_length=self.max_length)
        completion, _ = self.encoder.encode(
            example.completion, max_length=self.max_length
        )
        bos_id, eos_id = self.encoder.bos_id, self.encoder.eos_id
        if self.encoder.adds_bos and (prompt or completion)[:1] != [bos_id]:
            prompt = [bos_id, *prompt]
        if eos_id is not None and completion[-1:] != [eos_id]:
            completion = [*completion, eos_id]
        trained = np.arange(len(prompt) + len(completion)) >= len(prompt)
        return RenderedTokens(np.asarray([*prompt, *completion], np.int32), trained)

    def _chat(self, example: formats.Chat) -> RenderedTokens:
        template = self._needed_template()
        if self.train_on is TrainOn.ALL:
            rendered = templates.Rendered(
                text=template.render(example.messages), spans=()
            )
        else:
            turns = self._trained_turns(example)
            rendered = template.render_turns(example.messages, turns)
            if not rendered.spans:
                raise errors.SampleError(
                    "no trained token", "the chat template shows no assistant text"
                )
        ids, places = self.encoder.encode(rendered.text, max_length=self.max_length)
        bos_id = self.encoder.bos_id
        if bos_id is not None and ids[:2] == [bos_id, bos_id]:
            raise errors.SampleError(
                "two BOS tokens", "the template writes one and the first message too"
            )
        return RenderedTokens(
            np.asarray(ids, np.int32), _overlaps(places, rendered.spans)
        )

    def _trained_turns(self, example: formats.Chat) -> list[int]:
        train_on = example.auto if self.train_on is TrainOn.AUTO else self.train_on
        first = example.num_prompt if train_on is TrainOn.COMPLETION else 0
        roles = [message["role"] for message in example.messages]
        turns = [i for i in range(first, len(roles)) if roles[i] == "assistant"]
        if not turns:
            raise errors.SampleError(
                "no trained token",
                f"train_on={train_on} finds no assistant message in roles "
                f"{roles[first:]}",
            )
        return turns

    def _needed_template(self) -> templates.ChatTemplate:
        if self.template is None:
            raise errors.DataError(
                "these samples are chats and the tokenizer has no chat template; "
                "set dataset.chat_template to a Jinja file"
            )
        return self.template


def _overlaps(places: np.ndarray, spans: tuple[templates.Span, ...]) -> np.ndarray:
    first, stop = places[:, 0], places[:, 1]
    trained = np.zeros(len(places), bool)
    for start, end in spans:
        trained |= (first < end) & (stop > start)
    return trained


def _named_tokens(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, str]:
    named = tokenizer.special_tokens_map
    return {name: token for name, token in named.items() if isinstance(token, str)}
