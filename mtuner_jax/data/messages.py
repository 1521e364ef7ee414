"""Messages of a conversation, in the spellings that people have them in.

{role, content} as of OpenAI and Hugging Face, {from, value} as of ShareGPT; contents as
text or as text parts; tool calls in a list, in the older `function_call`, or as a turn
of their own. All become what chat templates expect.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mtuner_jax.data import errors, jsonl

Message = dict[str, Any]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")  # roles of turns that are nothing but a call


class Messages(NamedTuple):
    """Messages, and which of them carry loss.

    Attributes:
      messages: Objects with `role` and `content` and whatever else a template may show.
      trained: What each message's `train` or `weight` says; None where neither is.
    """

    messages: list[Message]
    trained: tuple[bool | None, ...]


def parse(value: object, key: str) -> Messages:
    """Checks a list of messages, which may be JSON in a text.

    Args:
      value: As found in a row.
      key: Where, for error texts.

    Raises:
      SampleError: A message is of the wrong kind, or says nothing.
    """
    messages = unpacked(value, key)
    if not isinstance(messages, list):
        raise wrong_type(key, "an array of messages", messages)
    if not messages:
        raise errors.SampleError("empty", f"{key!r} has no messages")
    parsed = [
        _message(message, f"{key}[{index}]") for index, message in enumerate(messages)
    ]
    return Messages([one for one, _ in parsed], tuple(flag for _, flag in parsed))


def tools(value: object, key: str) -> list[Any] | None:
    """What an assistant may call: a list of JSON schemas, or that as JSON in a text.

    Raises:
      SampleError: Something else.
    """
    schemas = unpacked(value, key) if value != "" else None
    if schemas is None:
        return None
    if not isinstance(schemas, list):
        raise wrong_type(key, "an array of tools", schemas)
    for index, schema in enumerate(schemas):
        if not isinstance(schema, dict):
            raise wrong_type(f"{key}[{index}]", "an object", schema)
    if key == "functions":
        schemas = [{"type": "function", "function": schema} for schema in schemas]
    return schemas or None


def unpacked(value: object, key: str) -> Any:
    """A value that may be JSON in a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        if value.lstrip()[:1] not in ("[", "{"):
            return value
        raise errors.SampleError(
            "invalid JSON", f"the text of {key!r}: {error}"
        ) from None


def present(row: Mapping[str, Any], key: str, *, place: str = "the row") -> Any:
    """A field that must be there and not null."""
    if row.get(key) is None:
        found = "is null" if key in row else f"is missing; there are {sorted(row)}"
        raise errors.SampleError("missing field", f"{key!r} of {place} {found}")
    return row[key]


def wrong_type(place: str, expected: str, value: object) -> errors.SampleError:
    """What to raise for a value of another type."""
    return errors.SampleError(
        "wrong type", f"{place!r} must be {expected}, found {jsonl.json_type(value)}"
    )


def _message(given: object, place: str) -> tuple[Message, bool | None]:
    if not isinstance(given, dict):
        raise wrong_type(place, "an object", given)
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
        message["content"] = present(given, "value", place=place)
        message.pop("value", None)
    role = present(message, "role", place=place)
    if not isinstance(role, str):
        raise wrong_type(f"{place}.role", "a string", role)
    trained = _flag(message, place)
    if role in _CALLS:
        return _call_turn(message, place), trained
    message["role"] = _ROLES.get(role, role)
    if "function_call" in message:
        call = message.pop("function_call")
        message["tool_calls"] = [_checked_call(call, f"{place}.function_call")]
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise wrong_type(f"{place}.tool_calls", "an array", calls)
    if not calls:
        message.pop("tool_calls", None)
    # Templates of tool calls ask whether there is a text beside them.
    if calls and message.get("content") is None:
        message["content"] = None
        return message, trained
    content = present(given | message, "content", place=place)
    message["content"] = _text(content, f"{place}.content")
    says_nothing = not message["content"].strip()
    if message["role"] == "assistant" and says_nothing and not calls:
        raise errors.SampleError("empty", f"{place}: the assistant says nothing")
    return message, trained


def _flag(message: Message, place: str) -> bool | None:
    """Takes `train` and `weight` out of a message."""
    weight, train = message.pop("weight", 1), message.pop("train", None)
    for key, value in (("weight", weight), ("train", train)):
        if value not in (0, 1, None):
            raise errors.SampleError(
                "wrong weight",
                f"{place}.{key}={json.dumps(value)}: 0 (without loss) or 1 (with "
                "loss); other weights are not supported",
            )
    if train and not weight:
        raise errors.SampleError(
            "wrong weight", f"{place}: train and weight contradict each other"
        )
    # A weight of 1 is OpenAI's default, of users' messages too: `train_on` decides.
    return False if not weight else train if train is None else bool(train)


def _text(content: object, place: str) -> str:
    """A content, whose text parts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(place, "a string", content)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise errors.SampleError(
                "no text",
                f"{place}[{index}] is a part of type {kind!r}; only text is trained on",
            )
        texts.append(part["text"])
    return "".join(texts)


def _call_turn(message: Message, place: str) -> Message:
    """ShareGPT's turn that is a call: {"from": "function_call", "value": "{...}"}."""
    call = unpacked(present(message, "content", place=place), f"{place}.value")
    calls = call if isinstance(call, list) else [call]
    checked = [_checked_call(one, place) for one in calls]
    return {"role": "assistant", "content": None, "tool_calls": checked}


def _checked_call(call: object, place: str) -> Message:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise errors.SampleError(
            "wrong type", f"{place} must be an object with the 'name' of a function"
        )
    return {"type": "function", "function": call}


def first_texts(pairs: object, key: str) -> Sequence[tuple[str, str]]:
    """Earlier turns as LLaMA-Factory's `history` has them: [[asked, answered], ...]."""
    turns = unpacked(pairs, key)
    if not isinstance(turns, list):
        raise wrong_type(key, "an array of [prompt, answer] pairs", turns)
    for index, pair in enumerate(turns):
        texts = isinstance(pair, list) and [isinstance(text, str) for text in pair]
        if texts != [True, True]:
            raise wrong_type(f"{key}[{index}]", "a pair of strings", pair)
    return [(asked, answered) for asked, answered in turns]
