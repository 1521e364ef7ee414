"""Examples to token ids and the mask of tokens that carry loss."""

import dataclasses
import datetime
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import transformers

from mtuner_jax import configs
from mtuner_jax.data import contents, encoding, errors, formats, templates

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
        dataset: configs.DatasetConfig,
        *,
        max_length: int,
        num_rows: int = 0,
    ):
        """Makes the renderer of a run.

        Args:
          tokenizer: A fast tokenizer.
          dataset: The run's data settings.
          max_length: Tokens of a row.
          num_rows: Rows of the model's embedding table; 0 does not check ids.

        Raises:
          DataError: The tokenizer or the chat template cannot be used.
        """
        self.encoder = encoding.Encoder(tokenizer)
        self.train_on = dataset.train_on
        self.max_length = max_length
        self._dataset = dataset
        self._num_rows = num_rows
        source = templates.load_source(tokenizer, dataset.chat_template)
        self.template: templates.ChatTemplate | None = None
        if source:
            self.template = templates.ChatTemplate(
                source,
                special_tokens=_named_tokens(tokenizer),
                end_texts=self.encoder.end_texts,
                date=datetime.date.fromisoformat(dataset.template_date),
            )
        if self.encoder.eos_id is None:
            logger.warning(
                "the tokenizer has no EOS token: completions without a chat template "
                "end without one, so the model won't learn to stop"
            )

    def render(self, example: formats.Example) -> RenderedTokens:
        """Tokenizes an example and marks the tokens that carry loss.

        Raises:
          SampleError: Nothing in it carries loss, the template refuses it or loses a
            part of it, or a token has no row in the model's embedding table.
        """
        if isinstance(example, formats.Plain):
            tokens = self._plain(example)
        else:
            tokens = self._chat(example)
        if self.train_on is TrainOn.ALL:
            tokens.trained[:] = True
        tokens.trained[:1] = False
        self._check_ids(tokens.ids)
        return tokens

    def render_all(self, example: formats.Example) -> list[RenderedTokens]:
        """As `render`, with a sample a turn where the template rewrites earlier ones.

        Such a template shows an answer in one way when it is given and in another once
        more follows (without its reasoning, say). Each answer then stands in a sample
        of its own, behind what the model is prompted with there.

        Raises:
          SampleError: As `render`, for the whole conversation.
        """
        if isinstance(example, formats.Plain):
            return [self.render(example)]
        try:
            return [self.render(example)]
        except errors.SampleError:
            turns = self._trained_turns(example)
            if len(turns) < 2:
                raise
        return [self.render(_up_to(example, turn)) for turn in turns]

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
        turns = self._trained_turns(example)
        messages, tools = self._shown(example)
        rendered = template.render_turns(messages, turns, tools=tools)
        if not rendered.spans and turns:
            raise errors.SampleError(
                "no trained token", "the chat template shows no assistant text"
            )
        ids, places = self.encoder.encode(
            rendered.text,
            max_length=self.max_length,
            shielded=not self._dataset.special_tokens_in_content,
        )
        bos_id = self.encoder.bos_id
        if bos_id is not None and ids[:2] == [bos_id, bos_id]:
            raise errors.SampleError(
                "two BOS tokens", "the template writes one and the first message too"
            )
        return RenderedTokens(
            np.asarray(ids, np.int32), _overlaps(places, rendered.spans)
        )

    def _shown(
        self, example: formats.Chat
    ) -> tuple[Sequence[formats.Message], Sequence[Any] | None]:
        """Messages and tools as they are rendered."""
        messages, tools = example.messages, example.tools
        if self._dataset.reasoning is configs.Reasoning.DROP:
            messages = [contents.without_reasoning(message) for message in messages]
        if self._dataset.special_tokens_in_content:
            return messages, tools
        special = self.encoder.special
        return [special.shield(message) for message in messages], special.shield(tools)

    def _trained_turns(self, example: formats.Chat) -> list[int]:
        """Assistant messages that carry loss; none where the whole text does."""
        roles = [message["role"] for message in example.messages]
        flags = example.trained or (None,) * len(roles)
        if self.train_on is TrainOn.ALL:
            if False in flags:
                raise errors.SampleError(
                    "no part can be left out",
                    f"messages[{flags.index(False)}] is not to be trained on, and "
                    "train_on: all trains on everything",
                )
            return []
        train_on = example.auto if self.train_on is TrainOn.AUTO else self.train_on
        first = example.num_prompt if train_on is TrainOn.COMPLETION else 0
        turns = []
        for index, (role, flag) in enumerate(zip(roles, flags, strict=True)):
            if flag and role != "assistant":
                raise errors.SampleError(
                    "not an assistant's turn",
                    f"messages[{index}] of role {role!r} can't be trained on",
                )
            default = role == "assistant" and index >= first
            if default if flag is None else flag:
                turns.append(index)
        if not turns:
            raise errors.SampleError(
                "no trained token",
                f"train_on={train_on} finds no assistant message in roles "
                f"{roles[first:]}"
                + (" that is to be trained on" if False in flags else ""),
            )
        return turns

    def _check_ids(self, ids: np.ndarray) -> None:
        if not self._num_rows or not len(ids) or int(ids.max()) < self._num_rows:
            return
        token = int(ids.max())
        raise errors.SampleError(
            "token without a row",
            f"token {token} ({self.encoder.decode([token])!r}) is beyond the "
            f"{self._num_rows:,} rows of the model's embedding table; use the "
            "tokenizer that came with the model, or a model whose table was resized",
        )

    def _needed_template(self) -> templates.ChatTemplate:
        if self.template is None:
            raise errors.DataError(
                "these samples are chats and the tokenizer has no chat template; "
                "set dataset.chat_template to a Jinja file"
            )
        return self.template


def _up_to(example: formats.Chat, turn: int) -> formats.Chat:
    """The conversation up to a turn, the only one with loss."""
    return dataclasses.replace(
        example,
        messages=example.messages[: turn + 1],
        num_prompt=turn,
        trained=(*[False] * turn, True),
    )


def _overlaps(places: np.ndarray, spans: tuple[templates.Span, ...]) -> np.ndarray:
    first, stop = places[:, 0], places[:, 1]
    trained = np.zeros(len(places), bool)
    for start, end in spans:
        trained |= (first < end) & (stop > start)
    return trained


def _named_tokens(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, str]:
    named = tokenizer.special_tokens_map
    return {name: token for name, token in named.items() if isinstance(token, str)}
