"""What a row means: chat messages, a prompt with its completion, or alpaca fields.

The format is found by column names, in the order of `RowFormat`, once per file; each
row is then checked by that format's own rules. Columns that a format does not know
are ignored.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from mtuner_jax import configs
from mtuner_jax.data import errors, jsonl

Row = Mapping[str, Any]
Message = dict[str, Any]


class RowFormat(enum.StrEnum):
    """The kinds of rows, in the order in which they are looked for."""

    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    ALPACA = "alpaca"


COLUMNS = {
    RowFormat.MESSAGES: ("messages",),
    RowFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    RowFormat.ALPACA: ("instruction", "output"),
}

# The texts of github.com/tatsu-lab/stanford_alpaca (Apache-2.0).
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that "
    "provides further context. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
ALPACA_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that "
    "appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Response:\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """Messages to be rendered by a chat template.

    Attributes:
      messages: Objects with at least `role` and `content`, both strings.
      num_prompt: Leading messages that belong to the prompt; the rest is completion.
      auto: What `train_on: auto` means for it.
      tools: What the assistant may call, as JSON schemas.
      trained: Whether each message carries loss; None leaves it to `train_on`.
    """

    messages: Sequence[Message]
    num_prompt: int
    auto: configs.TrainOn
    tools: Sequence[Any] | None = None
    trained: tuple[bool | None, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A prompt and its completion, tokenized as they are."""

    prompt: str
    completion: str


Example = Chat | Plain


def choose(name: str) -> RowFormat | None:
    """Reads the setting `dataset.format`; None is `auto`."""
    if name == "auto":
        return None
    if name not in list(RowFormat):
        allowed = ("auto", *(str(format) for format in RowFormat))
        raise errors.DataError(f"dataset.format={name!r}: one of {allowed}")
    return RowFormat(name)


def detect(row: Row) -> RowFormat:
    """Finds a row's format by the columns it has."""
    present = {key for key, value in row.items() if value is not None}
    for format, columns in COLUMNS.items():
        if present.issuperset(columns):
            return format
    wanted = " | ".join(" + ".join(columns) for columns in COLUMNS.values())
    raise errors.SampleError(
        "unknown format", f"columns {sorted(row)}; expected one of: {wanted}"
    )


def parse(row: Row, format: RowFormat, *, has_template: bool) -> Example:
    """Checks a row and turns it into an example.

    Args:
      has_template: Whether there is a chat template; alpaca rows become a chat then,
        and the classic alpaca text otherwise.

    Raises:
      SampleError: A field is missing, empty or of the wrong type.
    """
    if format is RowFormat.MESSAGES:
        messages = _messages(row, "messages")
        return Chat(
            messages=messages,
            num_prompt=len(messages) - 1,
            auto=configs.TrainOn.ASSISTANT,
        )
    if format is RowFormat.PROMPT_COMPLETION:
        return _prompt_completion(row)
    return _alpaca(row, has_template=has_template)


def _prompt_completion(row: Row) -> Example:
    prompt, completion = row.get("prompt"), row.get("completion")
    if not isinstance(prompt, list) and not isinstance(completion, list):
        return Plain(
            prompt=_text(row, "prompt"), completion=_filled_text(row, "completion")
        )
    head = _as_messages(row, "prompt", role="user")
    tail = _as_messages(row, "completion", role="assistant")
    return Chat(
        messages=[*head, *tail],
        num_prompt=len(head),
        auto=configs.TrainOn.COMPLETION,
    )


def _alpaca(row: Row, *, has_template: bool) -> Example:
    instruction = _filled_text(row, "instruction")
    context = _text(row, "input") if row.get("input") is not None else ""
    output = _filled_text(row, "output")
    if not has_template:
        prompt = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
        return Plain(
            prompt=prompt.format(instruction=instruction, input=context),
            completion=output,
        )
    question = f"{instruction}\n\n{context}" if context else instruction
    return Chat(
        messages=[
            {"role": "user", "content": question},
            {"role": "assistant", "content": output},
        ],
        num_prompt=1,
        auto=configs.TrainOn.COMPLETION,
    )


def _as_messages(row: Row, key: str, *, role: str) -> Sequence[Message]:
    if isinstance(row.get(key), str):
        return [{"role": role, "content": _filled_text(row, key)}]
    return _messages(row, key)


def _messages(row: Row, key: str) -> Sequence[Message]:
    messages = _present(row, key)
    if not isinstance(messages, list):
        raise _wrong_type(key, "an array of messages", messages)
    if not messages:
        raise errors.SampleError("empty", f"{key!r} has no messages")
    for index, message in enumerate(messages):
        _check_message(message, f"{key}[{index}]")
    return messages


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, dict):
        raise _wrong_type(place, "an object", message)
    for key in ("role", "content"):
        value = _present(message, key, place=place)
        if not isinstance(value, str):
            raise _wrong_type(f"{place}.{key}", "a string", value)
    for key in ("train", "weight"):
        if message.get(key) is not None:
            raise errors.SampleError(
                "unknown field", f"{place}.{key}: losses per message are not supported"
            )
    if message["role"] == "assistant" and not message["content"].strip():
        raise errors.SampleError("empty", f"{place}: the assistant says nothing")


def _text(row: Row, key: str) -> str:
    value = _present(row, key)
    if not isinstance(value, str):
        raise _wrong_type(key, "a string", value)
    return value


def _filled_text(row: Row, key: str) -> str:
    text = _text(row, key)
    if not text.strip():
        raise errors.SampleError("empty", f"{key!r} has no text")
    return text


def _present(row: Row, key: str, *, place: str = "the row") -> object:
    if row.get(key) is None:
        found = "is null" if key in row else f"is missing; there are {sorted(row)}"
        raise errors.SampleError("missing field", f"{key!r} of {place} {found}")
    return row[key]


def _wrong_type(place: str, expected: str, value: object) -> errors.SampleError:
    return errors.SampleError(
        "wrong type", f"{place!r} must be {expected}, found {jsonl.json_type(value)}"
    )
