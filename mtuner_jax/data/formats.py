"""What a row means: a conversation, a prompt and its completion, alpaca fields, a text.

The format is found by column names, in the order of `RowFormat`, once per file; each
row is then checked by that format's own rules. A column that carries meaning and has
no use in its format is refused by name; any other is named in the log.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mtuner_jax import configs
from mtuner_jax.data import errors, messages
from mtuner_jax.data.messages import Message

Row = Mapping[str, Any]


class RowFormat(enum.StrEnum):
    """The kinds of rows, in the order in which they are looked for."""

    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"
    TEXT = "text"


class Columns(NamedTuple):
    """The columns of a format.

    Attributes:
      needed: Those that tell it.
      optional: Those that it uses if they are there.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


_TOOLS = ("tools", "tool_defs", "functions")
COLUMNS = {
    RowFormat.MESSAGES: Columns(("messages",), ("system", *_TOOLS)),
    RowFormat.PROMPT_COMPLETION: Columns(("prompt", "completion"), ("system", *_TOOLS)),
    RowFormat.ALPACA: Columns(
        ("instruction", "output"), ("input", "system", "history", *_TOOLS)
    ),
    RowFormat.SHAREGPT: Columns(("conversations",), ("system", *_TOOLS)),
    RowFormat.TEXT: Columns(("text",)),
}
# Without them a sample would mean something else.
_MEANINGFUL = frozenset(
    "system history context documents chosen rejected images image audio videos".split()
) | frozenset(_TOOLS)

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
      messages: Objects with at least `role` and `content`, as templates take them.
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
        if present.issuperset(columns.needed):
            return format
    if present.issuperset(("chosen", "rejected")):
        raise errors.SampleError(
            "unknown format",
            "pairs of chosen and rejected answers are for DPO, which is not offered; "
            "dataset.columns: {completion: chosen} trains on the chosen ones",
        )
    wanted = " | ".join(" + ".join(columns.needed) for columns in COLUMNS.values())
    raise errors.SampleError(
        "unknown format",
        f"columns {sorted(row)}; expected one of: {wanted}; dataset.columns maps "
        "names, such as {prompt: question, completion: answer}",
    )


def rename(row: Row, columns: Mapping[str, str]) -> Row:
    """A row with its columns under our names.

    Args:
      row: As read.
      columns: {our name: the file's name}.

    Raises:
      SampleError: The row has no such column.
    """
    if not columns:
        return row
    missing = [theirs for theirs in columns.values() if theirs not in row]
    if missing:
        raise errors.SampleError(
            "missing field", f"dataset.columns: no {missing}; there are {sorted(row)}"
        )
    taken = set(columns.values()) | set(columns)
    rest = {key: value for key, value in row.items() if key not in taken}
    return rest | {ours: row[theirs] for ours, theirs in columns.items()}


def unused(row: Row, format: RowFormat, ignored: Sequence[str]) -> list[str]:
    """Columns with a value that the format has no use for.

    Raises:
      SampleError: One of them would change what the sample means, and is not among
        those `ignored`.
    """
    used = {*COLUMNS[format].needed, *COLUMNS[format].optional, *ignored}
    names = [key for key, value in row.items() if key not in used and _filled(value)]
    for name in names:
        if name in _MEANINGFUL:
            raise errors.SampleError(
                "unused column",
                f"{name!r} has no place in format {format}; put it into the prompt or "
                f"messages, or leave it out with dataset.ignore_columns: [{name}]",
            )
    return names


def parse(row: Row, format: RowFormat, *, has_template: bool) -> Example:
    """Checks a row and turns it into an example.

    Args:
      row: With our column names.
      format: The format of its file.
      has_template: Whether there is a chat template; alpaca rows become a chat then,
        and the classic alpaca text otherwise.

    Raises:
      SampleError: A field is missing, empty or of the wrong type.
    """
    if format is RowFormat.ALPACA:
        return _alpaca(row, has_template=has_template)
    return _PARSERS[format](row)


def _conversation(key: str) -> Callable[[Row], Example]:
    def parse(row: Row) -> Example:
        value = messages.present(row, key)
        return _chat(row, messages.parse(value, key), auto=configs.TrainOn.ASSISTANT)

    return parse


def _chat(
    row: Row,
    said: messages.Messages,
    *,
    auto: configs.TrainOn,
    num_prompt: int = -1,
) -> Chat:
    """A chat with the system text and the tools of its row."""
    prompt = len(said.messages) - 1 if num_prompt < 0 else num_prompt
    system = _optional_text(row, "system")
    if system:
        if said.messages[0]["role"] == "system":
            raise errors.SampleError(
                "two system texts", "the column 'system' and the first message"
            )
        first: Message = {"role": "system", "content": system}
        said = messages.Messages([first, *said.messages], (None, *said.trained))
        prompt += 1
    given = [key for key in _TOOLS if _filled(row.get(key))]
    if len(given) > 1:
        raise errors.SampleError("two lists of tools", " and ".join(given))
    return Chat(
        messages=said.messages,
        num_prompt=prompt,
        auto=auto,
        tools=messages.tools(row[given[0]], given[0]) if given else None,
        trained=said.trained if any(f is not None for f in said.trained) else None,
    )


def _prompt_completion(row: Row) -> Example:
    prompt = messages.present(row, "prompt")
    completion = messages.present(row, "completion")
    is_text = not isinstance(prompt, list) and not isinstance(completion, list)
    if is_text and not any(_filled(row.get(key)) for key in ("system", *_TOOLS)):
        return Plain(
            prompt=_text(row, "prompt"), completion=_filled_text(row, "completion")
        )
    head = _as_messages(row, "prompt", role="user")
    tail = _as_messages(row, "completion", role="assistant")
    both = messages.Messages(head.messages + tail.messages, head.trained + tail.trained)
    return _chat(
        row, both, auto=configs.TrainOn.COMPLETION, num_prompt=len(head.messages)
    )


def _alpaca(row: Row, *, has_template: bool) -> Example:
    instruction = _filled_text(row, "instruction")
    context = _optional_text(row, "input")
    output = _filled_text(row, "output")
    history = row.get("history") or []
    if not has_template:
        for key in ("system", "history", *_TOOLS):
            if _filled(row.get(key)):
                raise errors.SampleError(
                    "no chat template",
                    f"{key!r} needs one, and the tokenizer has none; set "
                    "dataset.chat_template to a Jinja file",
                )
        prompt = ALPACA_WITH_INPUT if context else ALPACA_WITHOUT_INPUT
        return Plain(
            prompt=prompt.format(instruction=instruction, input=context),
            completion=output,
        )
    question = f"{instruction}\n\n{context}" if context else instruction
    turns = [*messages.first_texts(history, "history"), (question, output)]
    said = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    auto = configs.TrainOn.ASSISTANT if history else configs.TrainOn.COMPLETION
    return _chat(row, messages.Messages(said, (None,) * len(said)), auto=auto)


def _whole_text(row: Row) -> Example:
    return Plain(prompt="", completion=_filled_text(row, "text"))


_PARSERS: dict[RowFormat, Callable[[Row], Example]] = {
    RowFormat.MESSAGES: _conversation("messages"),
    RowFormat.PROMPT_COMPLETION: _prompt_completion,
    RowFormat.SHAREGPT: _conversation("conversations"),
    RowFormat.TEXT: _whole_text,
}


def _as_messages(row: Row, key: str, *, role: str) -> messages.Messages:
    if isinstance(row.get(key), str):
        message = {"role": role, "content": _filled_text(row, key)}
        return messages.Messages([message], (None,))
    return messages.parse(messages.present(row, key), key)


def _text(row: Row, key: str) -> str:
    value = messages.present(row, key)
    if not isinstance(value, str):
        raise messages.wrong_type(key, "a string", value)
    return value


def _optional_text(row: Row, key: str) -> str:
    return _text(row, key) if row.get(key) is not None else ""


def _filled_text(row: Row, key: str) -> str:
    text = _text(row, key)
    if not text.strip():
        raise errors.SampleError("empty", f"{key!r} has no text")
    return text


def _filled(value: object) -> bool:
    return value not in (None, "", [], {}, "[]", "null")
