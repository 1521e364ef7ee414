"""Where the texts of messages stand in a rendered conversation.

A chat template may drop what a message says: reasoning, tool calls, a system text that
it has no place for. Whatever a message carries must be found in what was rendered, in
order, or the sample is refused: a model must not be trained on half of it in silence.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtuner_jax.data import errors

Span = tuple[int, int]
REASONING = ("reasoning_content", "reasoning", "thinking")
_INLINE = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
# Some templates move these to another turn.
_PLACED_ANYWHERE = ("system", "developer")


class Piece(NamedTuple):
    """A text of a message.

    Attributes:
      name: Such as `content` or `tool_calls[0].function.name`.
      forms: How a template may write it.
    """

    name: str
    forms: tuple[str, ...]

    def find(self, text: str, start: int) -> Span | None:
        """Its first place in `text` from `start` on."""
        found = [
            (place, place + len(form))
            for form in self.forms
            if (place := text.find(form, start)) >= 0
        ]
        return min(found, default=None)


def of(message: Mapping[str, Any]) -> list[Piece]:
    """The texts that a message carries; empty ones are left out."""
    return [
        Piece(name, forms)
        for key, value in message.items()
        if key not in ("role", "name", "tool_call_id", "id", "type")
        for name, leaf in _leaves(key, value)
        if (forms := _forms(leaf))
    ]


def reasoning(message: Mapping[str, Any]) -> str:
    """What the assistant thought: a field of its own, or in front of its answer."""
    for key in REASONING:
        if message.get(key):
            return message[key]
    inline = _INLINE.match(message.get("content") or "")
    return inline[1].strip() if inline else ""


def answer(message: Mapping[str, Any]) -> str:
    """What a message says beside its reasoning."""
    said = message.get("content") or ""
    inline = _INLINE.match(said)
    return (inline[2] if inline else said).strip()


def check(
    text: str, messages: Sequence[Mapping[str, Any]], *, turns: Sequence[int] = ()
) -> None:
    """Finds the texts of messages in what was rendered, in the order of the messages.

    Args:
      text: The conversation, rendered.
      messages: All of it.
      turns: Assistant messages that carry loss; what the others say may be shortened,
        as templates that hide earlier reasoning do. None of them means all.

    Raises:
      SampleError: One is missing; the text says which.
    """
    cursor = 0
    for index, message in enumerate(messages):
        if turns and message["role"] == "assistant" and index not in turns:
            continue
        anywhere = message["role"] in _PLACED_ANYWHERE
        ends = [cursor]
        for piece in of(message):
            place = piece.find(text, 0 if anywhere else cursor)
            if place is None:
                raise errors.SampleError(
                    "lost by the chat template", _lost(f"messages[{index}]", piece)
                )
            ends.append(place[1])
        cursor = cursor if anywhere else max(ends)


def end(text: str, message: Mapping[str, Any], start: int) -> int:
    """Behind the last text of a message that was rendered from `start` on."""
    places = [piece.find(text, start) for piece in of(message)]
    return max([start, *(place[1] for place in places if place)])


def _lost(message: str, piece: Piece) -> str:
    if piece.name.split(".")[0].split("[")[0] in REASONING:
        remedy = "dataset.reasoning: drop trains without it"
    else:
        remedy = "leave it out"
    said = piece.forms[0]
    shown = said if len(said) <= 40 else f"{said[:37]}..."
    return (
        f"{message}.{piece.name} ({shown!r}) is not in the rendered text, or not in "
        f"its place; {remedy}, or give a dataset.chat_template that shows it"
    )


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key not in ("id", "type", "index"):
                yield from _leaves(f"{name}.{key}", entry)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _leaves(f"{name}[{index}]", entry)
    elif isinstance(value, str):
        yield from _text_leaves(name, value)
    elif value is not None:
        yield name, value


def _text_leaves(name: str, value: str) -> Iterator[tuple[str, Any]]:
    """A text, or the parts that templates write apart from each other."""
    if name == "content" and (inline := _INLINE.match(value)):
        yield from ((name, part) for part in inline.groups())
        return
    if name.endswith(".arguments"):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            yield from _leaves(name, parsed)
            return
    yield name, value


def _forms(leaf: Any) -> tuple[str, ...]:
    """A leaf as it stands (templates may trim it), or as JSON."""
    if not isinstance(leaf, str):
        return tuple(dict.fromkeys((json.dumps(leaf), str(leaf))))
    text = leaf.strip()
    quoted = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    return tuple(dict.fromkeys((text, *quoted))) if text else ()
