"""Chat templates: messages to text, and which characters of it carry loss.

A template with `{% generation %}` marks them itself. For the others they are derived:
the text of the messages before an assistant's turn, with the generation prompt, must
be a prefix of the text that includes the turn, and that a prefix of the whole; what
lies between is the turn. A template for which this does not hold (one that rewrites
earlier turns, for example) is refused rather than trained on the wrong tokens.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import transformers
from transformers.utils import chat_template_utils

from mtuner_jax.data import errors, formats

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Templates of Llama 3.x print today's date unless they are given one. A fixed one (the
# templates' own fallback) keeps the tokens of a run the same on the next day.
DATE_STRING = "26 Jul 2024"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: All of it.
      spans: First and last-plus-one characters that carry loss, in order.
    """

    text: str
    spans: tuple[Span, ...]


def load_source(
    tokenizer: transformers.PreTrainedTokenizerBase, path: str
) -> str | None:
    """Returns the template of the file, or else the tokenizer's own, if it has one."""
    if path:
        try:
            return pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise errors.DataError(f"dataset.chat_template={path!r}: {error}") from None
    if tokenizer.chat_template is None:
        return None
    return tokenizer.get_chat_template()


class ChatTemplate:
    """Renders conversations; `end_texts` are the tokens that can end a turn."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        end_texts: Sequence[str],
    ):
        self.source = source
        self.marks_generation = bool(_GENERATION.search(source))
        self._variables: dict[str, Any] = {
            "date_string": DATE_STRING,
            **special_tokens,
        }
        self._end_texts = tuple(end_texts)
        self._check_syntax()

    def render(
        self,
        messages: Sequence[formats.Message],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders messages to text, special tokens written out.

        Raises:
          SampleError: The template refuses these messages.
        """
        text, _ = self._render(messages, add_generation_prompt, mark=False)
        return text

    def render_turns(
        self, messages: Sequence[formats.Message], turns: Sequence[int]
    ) -> Rendered:
        """Renders messages and finds the text of the turns that carry loss.

        Args:
          turns: Indices of assistant messages.

        Raises:
          SampleError: The template refuses the messages, or can't tell the turns.
        """
        if self.marks_generation:
            text, spans = self._marked(messages, turns)
        else:
            text, spans = self._derived(messages, turns)
        spans = tuple(self._to_end_of_turn(text, span) for span in spans)
        return Rendered(text=text, spans=tuple(s for s in spans if s[0] < s[1]))

    def _marked(
        self, messages: Sequence[formats.Message], turns: Sequence[int]
    ) -> tuple[str, list[Span]]:
        text, spans = self._render(messages, False, mark=True)
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if list(turns) == assistants:
            return text, spans
        if len(spans) != len(assistants):
            raise errors.SampleError(
                "chat template",
                f"it marks {len(spans)} generations for {len(assistants)} assistant "
                "messages; only train_on: assistant is possible with it",
            )
        return text, [spans[assistants.index(turn)] for turn in turns]

    def _derived(
        self, messages: Sequence[formats.Message], turns: Sequence[int]
    ) -> tuple[str, list[Span]]:
        text = self.render(messages)
        spans = []
        for turn in turns:
            if turn == 0:
                raise errors.SampleError(
                    "chat template", "the assistant's message has none before it"
                )
            head = self.render(messages[:turn], add_generation_prompt=True)
            is_last = turn + 1 == len(messages)
            whole = text if is_last else self.render(messages[: turn + 1])
            if not (whole.startswith(head) and text.startswith(whole)):
                raise errors.SampleError(
                    "chat template",
                    f"the text up to message {turn} changes with what follows, so its "
                    "tokens can't be told; give a dataset.chat_template with "
                    "{% generation %}, or train_on: completion or all",
                )
            spans.append((len(head), len(whole)))
        return text, spans

    def _to_end_of_turn(self, text: str, span: Span) -> Span:
        # A turn ends with its end-of-turn token, not before and not behind.
        start, end = span
        turn = text[start:end].rstrip()
        if turn.endswith(self._end_texts):
            return start, start + len(turn)
        for end_text in self._end_texts:
            if text.startswith(end_text, end):
                return start, end + len(end_text)
        return span

    def _render(
        self,
        messages: Sequence[formats.Message],
        add_generation_prompt: bool,  # noqa: FBT001
        *,
        mark: bool,
    ) -> tuple[str, list[Span]]:
        try:
            texts, spans = chat_template_utils.render_jinja_template(
                conversations=[[_without_nulls(message) for message in messages]],
                chat_template=self.source,
                return_assistant_tokens_mask=mark,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise errors.SampleError("chat template", str(error)) from None
        marked = [(int(start), int(end)) for start, end in spans[0]] if mark else []
        return texts[0], marked

    def _check_syntax(self) -> None:
        # Compiling shows syntax errors; that these messages may be refused is fine.
        try:
            self._render([{"role": "user", "content": "a"}], False, mark=False)
        except errors.SampleError as error:
            if isinstance(error.__context__, jinja2.TemplateSyntaxError):
                line = error.__context__.lineno
                raise errors.DataError(f"{error} in its line {line}") from None


def _without_nulls(message: formats.Message) -> formats.Message:
    # Templates ask whether a key is there, as in `message.tool_calls is defined`.
    return {key: value for key, value in message.items() if value is not None}
