import json

import pytest

from mtuner_jax import configs
from mtuner_jax.data import errors, formats

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [], "prompt": "", "completion": ""}, "messages"),
        ({"messages": None, "prompt": "", "completion": ""}, "prompt_completion"),
        ({"prompt": "", "completion": "", "output": ""}, "prompt_completion"),
        ({"instruction": "", "output": "", "input": None, "x": 1}, "alpaca"),
    ],
)
def test_format_is_found_by_columns_in_order(row, format):
    assert formats.detect(row) is formats.RowFormat(format)


def test_unknown_columns_are_named():
    with pytest.raises(errors.SampleError, match=r"columns \['texts', 'x'\]; expected"):
        formats.detect({"texts": "a", "x": 1})


def test_choosing_a_format():
    assert formats.choose("auto") is None
    assert formats.choose("alpaca") is formats.RowFormat.ALPACA
    with pytest.raises(errors.DataError, match=r"dataset\.format='chatml': one of"):
        formats.choose("chatml")


def parse(row, format="messages", *, has_template=True):
    return formats.parse(row, formats.RowFormat(format), has_template=has_template)


@pytest.mark.parametrize(
    ("row", "format", "text"),
    [
        ({"messages": "hi"}, "messages", "'messages' must be an array of messages, fo"),
        ({"messages": []}, "messages", "empty: 'messages' has no messages"),
        (
            {"messages": None},
            "messages",
            "missing field: 'messages' of the row is null",
        ),
        ({"messages": [1]}, "messages", r"'messages\[0\]' must be an object"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages",
            r"'messages\[0\]\.content' must be a string, found the number 5",
        ),
        (
            {"messages": [USER, {"role": "assistant"}]},
            "messages",
            r"'content' of messages\[1\] is missing; there are \['role'\]",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": " "}]},
            "messages",
            r"messages\[1\]: the assistant says nothing",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
            "messages",
            r"messages\[1\]\.weight=0.5: 0 \(without loss\) or 1",
        ),
        (
            {"instruction": "q", "output": 42},
            "alpaca",
            "'output' must be a string, found the number 42",
        ),
        (
            {"instruction": "q", "output": True},
            "alpaca",
            "'output' must be a string, found the boolean true",
        ),
        ({"instruction": "q", "output": ""}, "alpaca", "empty: 'output' has no text"),
        ({"instruction": "q"}, "alpaca", "'output' of the row is missing"),
        ({"instruction": "q", "output": "a", "input": []}, "alpaca", "found an array"),
        (
            {"prompt": "p", "completion": {}},
            "prompt_completion",
            "'completion' must be a string, found an object",
        ),
        ({"prompt": "p", "completion": " "}, "prompt_completion", "has no text"),
        ({"prompt": [], "completion": "c"}, "prompt_completion", "has no messages"),
    ],
)
def test_a_wrong_field_is_named(row, format, text):
    with pytest.raises(errors.SampleError, match=text):
        parse(row, format)


def test_input_may_be_null_in_some_rows_and_a_string_in_others():
    base = {"instruction": "do", "output": "done"}
    for row in (base, {**base, "input": None}, {**base, "input": ""}):
        assert parse(row, "alpaca").messages[0]["content"] == "do"
    chat = parse({**base, "input": "this"}, "alpaca")
    assert chat.messages[0]["content"] == "do\n\nthis"
    assert (chat.num_prompt, chat.auto) == (1, configs.TrainOn.COMPLETION)


def test_alpaca_without_a_template_uses_the_classic_text():
    row = {"instruction": "do {x}", "input": "{y}", "output": "done"}
    plain = parse(row, "alpaca", has_template=False)
    assert plain.prompt.startswith("Below is an instruction that describes a task, ")
    assert plain.prompt.endswith(
        "### Instruction:\ndo {x}\n\n### Input:\n{y}\n\n### Response:\n"
    )
    plain = parse({**row, "input": None}, "alpaca", has_template=False)
    assert "### Input:" not in plain.prompt


def test_prompt_and_completion_are_texts_or_messages():
    plain = parse({"prompt": "p", "completion": "c"}, "prompt_completion")
    assert plain == formats.Plain(prompt="p", completion="c")
    for prompt, completion in (
        ([USER], [ASSISTANT]),
        ("q", [ASSISTANT]),
        ([USER], "a"),
    ):
        row = {"prompt": prompt, "completion": completion}
        chat = parse(row, "prompt_completion")
        assert chat.messages == [USER, ASSISTANT]
        assert chat.num_prompt == 1


def test_sharegpt_system_columns_and_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "gpt", "value": "a"},
        ],
        "system": "be nice",
        "tools": json.dumps(tools),
    }
    assert formats.detect(row) is formats.RowFormat.SHAREGPT
    chat = parse(row, "sharegpt")
    system = {"role": "system", "content": "be nice"}
    assert chat.messages == [system, USER, ASSISTANT]
    assert (chat.num_prompt, chat.tools) == (2, tools)
    both = {"messages": [system, USER, ASSISTANT], "system": "s"}
    with pytest.raises(errors.SampleError, match="two system texts"):
        parse(both, "messages")
    with pytest.raises(errors.SampleError, match="two lists of tools: tools and funct"):
        parse({"messages": [USER, ASSISTANT], "tools": tools, "functions": [{}]})


def test_a_system_text_makes_a_chat_of_prompt_and_completion():
    row = {"prompt": "q", "completion": "a", "system": "s"}
    chat = parse(row, "prompt_completion")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert (chat.num_prompt, chat.auto) == (2, configs.TrainOn.COMPLETION)


def test_alpaca_has_a_system_text_and_earlier_turns():
    row = {"instruction": "q", "output": "a", "system": "s", "history": [["h", "r"]]}
    chat = parse(row, "alpaca")
    assert [m["content"] for m in chat.messages] == ["s", "h", "r", "q", "a"]
    assert (chat.num_prompt, chat.auto) == (4, configs.TrainOn.ASSISTANT)
    with pytest.raises(errors.SampleError, match="'system' needs one, and the tokeniz"):
        parse(row, "alpaca", has_template=False)
    with pytest.raises(
        errors.SampleError, match=r"'history\[0\]' must be a pair of st"
    ):
        parse({**row, "history": [["h"]]}, "alpaca")


def test_a_text_is_trained_on_as_a_whole():
    assert parse({"text": "t"}, "text") == formats.Plain(prompt="", completion="t")


def test_columns_are_mapped_by_name():
    columns = {"prompt": "question", "completion": "answer"}
    row = {"question": "q", "answer": "a", "prompt": "other"}
    assert formats.rename(row, columns) == {"prompt": "q", "completion": "a"}
    with pytest.raises(errors.SampleError, match=r"no \['answer'\]; there are"):
        formats.rename({"question": "q"}, columns)


def test_columns_that_carry_meaning_are_used_or_refused_and_others_named():
    row = {"prompt": "q", "completion": "a", "source": "s", "id": 1, "context": None}
    format = formats.RowFormat.PROMPT_COMPLETION
    assert formats.unused(row, format, ()) == ["source", "id"]
    for column in ("context", "documents", "history", "images"):
        with pytest.raises(errors.SampleError, match=rf"ignore_columns: \[{column}\]"):
            formats.unused({**row, column: "x"}, format, ())
        assert formats.unused({**row, column: "x"}, format, (column,))
    with pytest.raises(errors.SampleError, match="for DPO"):
        formats.detect({"chosen": "a", "rejected": "b"})
