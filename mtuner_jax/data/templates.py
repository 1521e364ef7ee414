"""Chat templates: messages to text, and which characters of it carry loss.

A template with `{% generation %}` marks them itself. For the others they are derived:
a turn begins behind what the model is prompted with at that point (the messages before
it, with the generation prompt), which must be how the whole conversation begins, and
ends with the first end-of-turn token behind the message's own text. So a model is
trained on exactly what it has to answer, where it has to. A template for which this
does not hold (one that rewrites what came before) is refused rather than trained on
the wrong tokens. Whatever a message says must be in the text (`contents`).
"""

import dataclasses
import datetime
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import transformers
from transformers.utils import chat_template_utils

from mtuner_jax.data import contents, errors, formats, template_inputs

Span = contents.Span

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKS = "give a dataset.chat_template with {% generation %}"
# Written in front of an answer that has no reasoning; nothing to be learnt.
_EMPTY_REASONING = re.compile(r"\s*(<think>\s*)?</think>\s*")
_PROMPTED_REASONING = re.compile(r"<think>\s*(</think>\s*)?$")


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
    tokenizer: transformers.PreTrainedTokenizerBase, asked: str
) -> str | None:
    """The template of that name or in that file, or else the tokenizer's own, if any.

    Raises:
      DataError: No such name or file, or several templates and none is the default.
    """
    own: Any = tokenizer.chat_template
    named = own if isinstance(own, dict) else {}
    if asked and asked not in named:
        try:
            return pathlib.Path(asked).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            names = f"; the tokenizer's own are {sorted(named)}" if named else ""
            raise errors.DataError(
                f"dataset.chat_template={asked!r}: {error}{names}"
            ) from None
    if named and (asked or "default") not in named:
        raise errors.DataError(
            f"the tokenizer has several chat templates and none is the default; choose "
            f"one of them with dataset.chat_template: {sorted(named)}"
        )
    return named[asked or "default"] if named else own


class ChatTemplate:
    """Renders conversations; `end_texts` are the tokens that can end a turn.

    Attributes:
      source: The Jinja text.
      marks_generation: Whether it marks what carries loss.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        end_texts: Sequence[str],
        date: datetime.date,
    ):
        self.source = source
        self.marks_generation = bool(_GENERATION.search(source))
        self._dated_source = template_inputs.with_date(source, date)
        self._variables: dict[str, Any] = {
            "date_string": date.strftime("%d %b %Y"),
            **special_tokens,
        }
        self._end_texts = tuple(end_texts)
        self._check_syntax()

    def render(
        self,
        messages: Sequence[formats.Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders messages to text, special tokens written out.

        Raises:
          SampleError: The template refuses these messages.
        """
        return self._render(messages, tools, add_generation_prompt, mark=False)[0]

    def render_turns(
        self,
        messages: Sequence[formats.Message],
        turns: Sequence[int],
        *,
        tools: Sequence[Any] | None = None,
    ) -> Rendered:
        """Renders messages and finds the text of the turns that carry loss.

        Args:
          messages: The conversation.
          turns: Indices of assistant messages; none if only the text is wanted.
          tools: What the assistant may call, as JSON schemas.

        Raises:
          SampleError: The template refuses the messages, loses some of what they say,
            or can't tell the turns.
        """
        if self.marks_generation and turns:
            text, spans = self._marked(messages, turns, tools)
        else:
            text, spans = self._derived(messages, turns, tools)
        contents.check(
            text,
            messages,
            turns=turns,
            last=lambda index: self._as_last(messages[: index + 1], tools),
        )
        if tools and text == self.render(messages):
            raise errors.SampleError(
                "lost by the chat template",
                "it shows no tools; leave them out, or give a dataset.chat_template "
                "that shows them",
            )
        return Rendered(text=text, spans=tuple(s for s in spans if s[0] < s[1]))

    def _marked(
        self,
        messages: Sequence[formats.Message],
        turns: Sequence[int],
        tools: Sequence[Any] | None,
    ) -> tuple[str, list[Span]]:
        text, marks = self._render(messages, tools, False, mark=True)
        spans = [self._with_end(text, mark) for mark in marks]
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

    def _with_end(self, text: str, mark: Span) -> Span:
        """What is marked, up to its end-of-turn token, which may stand behind it."""
        start, end = mark
        turn = text[start:end].rstrip()
        if turn.endswith(self._end_texts):
            return start, start + len(turn)
        for end_text in self._end_texts:
            if text.startswith(end_text, end):
                return start, end + len(end_text)
        return mark

    def _derived(
        self,
        messages: Sequence[formats.Message],
        turns: Sequence[int],
        tools: Sequence[Any] | None,
    ) -> tuple[str, list[Span]]:
        if 0 in turns:
            raise errors.SampleError(
                "chat template", "the assistant's message has none before it"
            )
        heads = [self._prompt(messages[:turn], tools) for turn in turns]
        text = self.render(messages, tools=tools)
        if turns and turns[-1] + 1 == len(messages):
            text = _behind_prompt(messages, heads[-1], text)
        spans = []
        for turn, head in zip(turns, heads, strict=True):
            if not text.startswith(head):
                raise _unlike(messages, turn, head=head, text=text)
            start = len(head)
            if not contents.reasoning(messages[turn]):
                start = _behind_empty(text, start)
            end = self._end(messages, turn, tools=tools, text=text, start=start)
            spans.append((start, end))
        return text, spans

    def _prompt(
        self, messages: Sequence[formats.Message], tools: Sequence[Any] | None
    ) -> str:
        return self.render(messages, tools=tools, add_generation_prompt=True)

    def _as_last(
        self, messages: Sequence[formats.Message], tools: Sequence[Any] | None
    ) -> str:
        """A conversation up to an answer, which is put behind its prompt."""
        text = self.render(messages, tools=tools)
        if len(messages) < 2:
            return text
        return _behind_prompt(messages, self._prompt(messages[:-1], tools), text)

    def _end(
        self,
        messages: Sequence[formats.Message],
        turn: int,
        *,
        tools: Sequence[Any] | None,
        text: str,
        start: int,
    ) -> int:
        """Where a turn that begins at `start` ends."""
        said = contents.end(text, messages[turn], start)
        place, end = self._first_end(text, said)
        is_last = turn + 1 == len(messages)
        if place >= 0 and not is_last:
            # Another message's end, unless nothing of the next message is before it.
            after = contents.of(messages[turn + 1])
            if not after or any(piece.find(text[said:place], 0) for piece in after):
                place = -1
        if place >= 0:
            return end
        whole = text if is_last else self.render(messages[: turn + 1], tools=tools)
        if not text.startswith(whole):
            raise errors.SampleError(
                "chat template",
                f"the end of message {turn} can't be told, since the template writes "
                f"no end-of-turn token; {_MARKS}",
            )
        return len(whole)

    def _first_end(self, text: str, start: int) -> Span:
        """The first end-of-turn token from `start` on; -1 as its place if none."""
        ends = [
            (place, place + len(end_text))
            for end_text in self._end_texts
            if (place := text.find(end_text, start)) >= 0
        ]
        return min(ends, default=(-1, -1))

    def _render(
        self,
        messages: Sequence[formats.Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,  # noqa: FBT001
        *,
        mark: bool,
    ) -> tuple[str, list[Span]]:
        def render(arguments: type) -> Any:
            shown = [template_inputs.message(m, arguments) for m in messages]
            return chat_template_utils.render_jinja_template(
                conversations=[shown],
                tools=list(tools) if tools else None,
                chat_template=self._dated_source,
                return_assistant_tokens_mask=mark,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )

        try:
            try:
                texts, spans = render(dict)
            except (jinja2.TemplateError, TypeError):
                if not any(message.get("tool_calls") for message in messages):
                    raise
                # Some families' templates (DeepSeek's) want arguments as JSON text.
                texts, spans = render(str)
        except (jinja2.TemplateError, TypeError) as error:
            raise errors.SampleError("chat template", str(error)) from None
        marked = [(int(start), int(end)) for start, end in spans[0]] if mark else []
        return texts[0], marked

    def _check_syntax(self) -> None:
        # Compiling shows syntax errors; that these messages may be refused is fine.
        try:
            self.render([{"role": "user", "content": "a"}])
        except errors.SampleError as error:
            if isinstance(error.__context__, jinja2.TemplateSyntaxError):
                line = error.__context__.lineno
                raise errors.DataError(f"{error} in its line {line}") from None


def _behind_prompt(messages: Sequence[formats.Message], head: str, text: str) -> str:
    """A conversation whose last answer stands behind the prompt it is given for.

    Some templates write the messages before the last answer in one way for the prompt
    and in another for the whole conversation: Mistral's show the system text only in
    the prompt, DeepSeek R1's prompt opens a `<think>` that conversations leave out.

    Args:
      messages: The conversation; the last message is the assistant's.
      head: The prompt for the last message.
      text: The conversation as the template writes it.

    Returns:
      `text` where it begins with the prompt, or where it is not known to be one of
      these; else the prompt and the answer, with its reasoning.
    """
    if text.startswith(head):
        return text
    prompted = _PROMPTED_REASONING.search(head)
    if prompted and text.startswith(head[: prompted.start()]):
        return (
            _behind_reasoning(
                head,
                text[prompted.start() :].lstrip(),
                reasoning=contents.reasoning(messages[-1]).strip(),
                closed=bool(prompted[1]),
            )
            or text
        )
    asked = contents.answer(messages[-2])
    said = text.rfind(contents.answer(messages[-1]))
    end = head[head.rfind(asked) :] if asked else ""
    place = text.rfind(end, 0, said) if end else -1
    return text if place < 0 else head + text[place + len(end) :]


def _behind_reasoning(
    head: str, answer: str, *, reasoning: str, closed: bool
) -> str | None:
    """The prompt and an answer, where the prompt begins the reasoning.

    Args:
      head: The prompt, with `<think>` at its end.
      answer: As the template writes it, maybe with reasoning.
      reasoning: Of the message.
      closed: Whether the prompt has `</think>`, too; there can be no reasoning then.
    """
    if closed:
        return None if reasoning else head + answer[_behind_empty(answer, 0) :]
    if answer.startswith("<think>"):
        return head + answer.removeprefix("<think>").lstrip()
    return f"{head}{reasoning}\n</think>\n\n{answer}"


def _unlike(
    messages: Sequence[formats.Message],
    turn: int,
    *,
    head: str,
    text: str,
) -> errors.SampleError:
    """Says where the prompt for a turn and the conversation part."""
    same = _num_same(head, text)
    remedies = [_MARKS]
    if contents.reasoning(messages[turn]):
        remedies.append("dataset.reasoning: drop")
    return errors.SampleError(
        "chat template",
        f"the answer messages[{turn}] does not stand behind its prompt, which goes "
        f"on with {head[same : same + 40]!r} where the conversation has "
        f"{text[same : same + 40]!r}; {', or '.join(remedies)}",
    )


def _behind_empty(text: str, start: int) -> int:
    """Behind an empty block of reasoning at `start`, if there is one."""
    empty = _EMPTY_REASONING.match(text, start)
    return empty.end() if empty else start


def _num_same(one: str, other: str) -> int:
    """Characters at the beginning that two texts share."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
