import json

import pytest

from mtuner_jax.data import errors, messages

USER = {"role": "user", "content": "q"}
CALL = {"name": "look", "arguments": {"at": 1}}


def parsed(*given):
    return messages.parse(list(given), "messages").messages


def test_sharegpt_turns_are_messages():
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "a"},
    ]
    want = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {"role": "tool", "content": "o"},
        {"role": "assistant", "content": "a"},
    ]
    assert parsed(*turns) == want
    assert messages.parse(json.dumps(turns), "messages").messages == want


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert parsed({"role": "user", "content": parts})[0]["content"] == "a b"
    parts[1] = {"type": "image_url", "image_url": {}}
    with pytest.raises(
        errors.SampleError, match=r"content\[1\] is a part of type 'ima"
    ):
        parsed({"role": "user", "content": parts})


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_calls_need_no_text_beside_them(content):
    calls = [{"type": "function", "function": CALL}]
    message = {"role": "assistant", "tool_calls": calls, **content}
    assert parsed(USER, message)[1]["tool_calls"] == calls
    older = {"role": "assistant", "function_call": CALL, **content}
    assert parsed(USER, older)[1]["tool_calls"] == calls
    with pytest.raises(errors.SampleError, match=r"null|missing|says nothing"):
        parsed(USER, {"role": "assistant", "tool_calls": [], **content})


def test_weights_of_messages():
    answer = {"role": "assistant", "content": "a"}
    flags = messages.parse(
        [
            {**USER, "weight": 1},
            {**answer, "weight": 0},
            {**answer, "weight": 1.0},
            {**answer, "train": True},
            {**answer, "train": False, "weight": None},
        ],
        "messages",
    )
    assert flags.trained == (None, False, None, True, False)
    assert all(set(message) == {"role", "content"} for message in flags.messages)
    for wrong, text in (
        ({"weight": 0.5}, "weight=0.5: 0"),
        ({"train": "no"}, 'train="no": 0'),
        ({"train": True, "weight": 0}, "contradict"),
    ):
        with pytest.raises(errors.SampleError, match=text):
            parsed(USER, {**answer, **wrong})


def test_nulls_of_unified_schemas_are_left_out():
    message = {"role": "user", "content": "q", "tool_calls": None, "name": None}
    assert parsed(message) == [USER]


def test_tools_are_schemas_or_their_json():
    schema = {"type": "function", "function": {"name": "look"}}
    assert messages.tools([schema], "tools") == [schema]
    assert messages.tools(json.dumps([schema]), "tools") == [schema]
    assert messages.tools([{"name": "look"}], "functions") == [schema]
    assert messages.tools("[]", "tools") is None
    for wrong, text in (
        ("[{", "invalid JSON: the text of 'tools'"),
        ("none", "'tools' must be an array of tools"),
        ([1], r"'tools\[0\]' must be an object"),
    ):
        with pytest.raises(errors.SampleError, match=text):
            messages.tools(wrong, "tools")
