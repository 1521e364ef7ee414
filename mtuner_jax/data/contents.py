"""Where the texts of messages stand in a rendered conversation.

A chat template may drop what a message says: reasoning, tool calls, a system text that
it has no place for. Whatever a message carries must be found in what was rendered, in
order, or the sample is refused: a model must not be trained on half of it in silence.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtuner_jax.data import errors

Span = tuple[int, int]
REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = "content <think>"
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
    carried = {
        key: value
        for key, value in message.items()
        if key not in ("role", "name", "tool_call_id", "id", "type", *REASONING)
    }
    # Servers give the same reasoning under several names.
    thoughts = {message[key]: key for key in REASONING[::-1] if message.get(key)}
    carried |= {key: thought for thought, key in thoughts.items()}
    inline = _inline(message)
    if inline:
        carried |= {_THOUGHT: inline[1], "content": inline[2]}
    return [
        Piece(name, forms)
        for key, value in carried.items()
        for name, leaf in _leaves(key, value)
        if (forms := _forms(leaf))
    ]


def reasoning(message: Mapping[str, Any]) -> str:
    """What the assistant thought: a field of its own, or in front of its answer."""
    for key in REASONING:
        if message.get(key):
            return message[key]
    inline = _inline(message)
    return inline[1].strip() if inline else ""


def answer(message: Mapping[str, Any]) -> str:
    """What a message says beside its reasoning."""
    inline = _inline(message)
    return (inline[2] if inline else message.get("content") or "").strip()


def _inline(message: Mapping[str, Any]) -> re.Match[str] | None:
    """An assistant's content that begins with its reasoning."""
    said = message.get("content") if message["role"] == "assistant" else None
    return _INLINE.match(said) if isinstance(said, str) else None


def without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what the assistant thought, wherever it stands."""
    rest = {key: message[key] for key in message if key not in REASONING}
    if _inline(message):
        rest["content"] = answer(message)
    return rest


def check(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    turns: Sequence[int],
    last: Callable[[int], str],
) -> None:
    """Finds the texts of messages in what was rendered, in the order of the messages.

    What an assistant's turn without loss says may be hidden there, as templates do
    with earlier reasoning, if it is shown while the turn is the last one.

    Args:
      text: The conversation, rendered.
      messages: All of it.
      turns: Assistant messages that carry loss. None of them means all.
      last: Renders the conversation up to a message, that included.

    Raises:
      SampleError: One is missing; the text says which.
    """
    cursor = 0
    for index, message in enumerate(messages):
        anywhere = message["role"] in _PLACED_ANYWHERE
        pieces = of(message)
        places, lost = _find(text, pieces, 0 if anywhere else cursor)
        if lost and turns and message["role"] == "assistant" and index not in turns:
            _, lost = _find(last(index), pieces, cursor=0)
        if lost:
            raise errors.SampleError(
                "lost by the chat template", _lost(f"messages[{index}]", lost[0])
            )
        if not anywhere:
            cursor = max([cursor, *(place[1] for place in places)])


def _find(
    text: str, pieces: Sequence[Piece], cursor: int
) -> tuple[list[Span], list[Piece]]:
    """Places of a message's texts, none within another one, and those without."""
    places: list[Span] = []
    lost = []
    for piece in sorted(pieces, key=lambda piece: -len(piece.forms[0])):
        place = piece.find(text, cursor)
        while place and any(
            place[0] < end and start < place[1] for start, end in places
        ):
            place = piece.find(text, place[0] + 1)
        if place:
            places.append(place)
        else:
            lost.append(piece)
    return places, sorted(lost, key=pieces.index)


def end(text: str, message: Mapping[str, Any], start: int) -> int:
    """Behind the last text of a message that was rendered from `start` on."""
    places = [piece.find(text, start) for piece in of(message)]
    return max([start, *(place[1] for place in places if place)])


def _lost(message: str, piece: Piece) -> str:
    if piece.name in (*REASONING, _THOUGHT):
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
