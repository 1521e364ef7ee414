import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mtuner_jax import configs
from mtuner_jax.data import batches, errors, formats, rendering
from tests.data import chat_tokenizers

TOKENIZERS = {
    "chatml": chat_tokenizers.chatml(),
    "chatml_with_system": chat_tokenizers.chatml(chat_tokenizers.CHATML_WITH_SYSTEM),
    "chatml_generation": chat_tokenizers.chatml(chat_tokenizers.CHATML_GENERATION),
    "llama3": chat_tokenizers.llama3(),
    "llama2": chat_tokenizers.llama2(),
}
END = {"llama3": "<|eot_id|>", "llama2": " </s>"}


def chat(*contents, num_prompt=None):
    roles = ("user", "assistant")
    messages = [
        {"role": roles[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    return formats.Chat(
        messages=messages,
        num_prompt=len(messages) - 1 if num_prompt is None else num_prompt,
        auto=configs.TrainOn.ASSISTANT,
    )


def renderer(tokenizer, train_on="auto", max_length=4096, num_rows=0, **dataset):
    return rendering.Renderer(
        tokenizer,
        configs.DatasetConfig(train_on=configs.TrainOn(train_on), **dataset),
        max_length=max_length,
        num_rows=num_rows,
    )


def trained_text(render, tokens):
    return render.encoder.decode(tokens.ids[tokens.trained].tolist())


def end_of(name):
    return END.get(name, "<|im_end|>")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_answers_and_their_ends_carry_loss_and_nothing_else(name):
    render = renderer(TOKENIZERS[name])
    tokens = render.render(chat("what is it?", "a str", "and now?", "    an int"))
    first, second = "a str", "    an int"
    if name == "llama3":  # its template strips contents
        second = "an int"
    runs = np.split(
        tokens.ids[tokens.trained],
        np.flatnonzero(np.diff(np.flatnonzero(tokens.trained)) > 1) + 1,
    )
    texts = [render.encoder.decode(run.tolist()).lstrip() for run in runs]
    assert texts[0] == first + end_of(name)
    assert texts[1] == (second + end_of(name)).lstrip()
    assert len(texts) == 2
    assert render.ends_turn(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_those_of_transformers_own_rendering(name):
    tokenizer = TOKENIZERS[name]
    example = chat("what \U0001f600 is it?", "  a str\n\nis  one\n")
    tokens = renderer(tokenizer).render(example)
    want = tokenizer.apply_chat_template(example.messages)["input_ids"]
    assert tokens.ids.tolist() == want
    assert not tokens.trained[0]


@pytest.mark.parametrize("name", ["chatml", "chatml_with_system", "chatml_generation"])
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    question=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    answer=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
)
def test_trained_targets_are_the_answer_tokens_and_the_end_of_turn(
    name, question, answer
):
    render = renderer(TOKENIZERS[name])
    tokens = render.render(chat(question, answer))
    segments = np.ones_like(tokens.ids)
    targets, weights = batches.shift(tokens.ids, tokens.trained, segments)
    got = render.encoder.decode(targets[weights > 0].tolist())
    # The newline before the answer may be one token with its first characters.
    assert got.removeprefix("\n" if not answer.startswith("\n") else "") in (
        f"{answer}<|im_end|>",
        f"\n{answer}<|im_end|>",
    )
    if not answer[0].isspace():
        alone = TOKENIZERS[name].encode(answer, add_special_tokens=False)
        assert weights.sum() == len(alone) + 1


def test_white_space_tokens_inside_an_answer_carry_loss():
    render = renderer(TOKENIZERS["chatml"])
    answer = "def f(x):\n        return x \n  "
    tokens = render.render(chat("code", answer))
    assert trained_text(render, tokens) == f"{answer}<|im_end|>"


def test_generation_marks_and_prefixes_give_the_same_mask():
    marked = renderer(TOKENIZERS["chatml_generation"])
    derived = renderer(TOKENIZERS["chatml"])
    example = chat("a b", "c d", "e f", " g\n")
    assert marked.template.marks_generation
    assert not derived.template.marks_generation
    for one, other in zip(marked.render(example), derived.render(example), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["chatml", "chatml_generation"])
def test_train_on_chooses_the_turns(name):
    example = chat("a b", "c d", "e f", "g h")
    texts = {}
    for train_on in ("auto", "assistant", "completion", "all"):
        render = renderer(TOKENIZERS[name], train_on)
        texts[train_on] = trained_text(render, render.render(example))
    assert texts["assistant"] == "c d<|im_end|>g h<|im_end|>"
    assert texts["auto"] == texts["assistant"]
    assert texts["completion"] == "g h<|im_end|>"
    assert texts["all"].startswith("user\na b<|im_end|>\n")  # all but the first token


def test_one_bos_from_template_and_tokenizer_that_both_have_one():
    tokenizer = TOKENIZERS["llama3"]
    bos_id = tokenizer.bos_token_id
    assert tokenizer.encode("a")[0] == bos_id
    tokens = renderer(tokenizer).render(chat("a", "b"))
    assert tokens.ids.tolist().count(bos_id) == 1
    assert renderer(tokenizer).prompt_ids(chat("a").messages).count(bos_id) == 1


def test_two_bos_tokens_are_refused():
    tokenizer = chat_tokenizers.llama3("{{ bos_token }}" + chat_tokenizers.LLAMA3)
    with pytest.raises(errors.SampleError, match="two BOS tokens"):
        renderer(tokenizer).render(chat("a", "b"))


def test_prompt_ids_begin_the_sample_of_the_same_conversation():
    for tokenizer in TOKENIZERS.values():
        render = renderer(tokenizer)
        prompt = render.prompt_ids(chat("what is it?").messages)
        tokens = render.render(chat("what is it?", "a str"))
        assert tokens.ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("name", ["chatml", "chatml_generation"])
def test_a_conversation_without_an_answer_is_refused(name):
    with pytest.raises(errors.SampleError, match=r"no assistant message in .*\['user'"):
        renderer(TOKENIZERS[name]).render(chat("hello"))


def test_a_template_that_marks_nothing_is_refused():
    empty = chat_tokenizers.CHATML + "{% generation %}{% endgeneration %}"
    with pytest.raises(errors.SampleError, match="shows no assistant text"):
        renderer(chat_tokenizers.chatml(empty)).render(chat("a", "b"))


def test_a_template_that_rewrites_earlier_turns_is_refused_for_these_only():
    tokenizer = chat_tokenizers.chatml(chat_tokenizers.REWRITING)
    example = chat("a", "b", "c", "d")
    with pytest.raises(errors.SampleError, match="lost by the chat template"):
        renderer(tokenizer).render(example)
    render = renderer(tokenizer, "completion")
    assert trained_text(render, render.render(example)) == "d<|im_end|>"


def test_what_a_template_raises_is_the_samples_error():
    system = formats.Chat(
        messages=[{"role": "system", "content": "s"}, *chat("a", "b").messages],
        num_prompt=2,
        auto=configs.TrainOn.ASSISTANT,
    )
    with pytest.raises(errors.SampleError, match="chat template: Only user and assis"):
        renderer(TOKENIZERS["llama2"]).render(system)


def test_template_files(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(chat_tokenizers.CHATML_GENERATION)
    bare = chat_tokenizers.chatml(None)
    render = renderer(bare, chat_template=str(path))
    assert trained_text(render, render.render(chat("a", "b"))) == "b<|im_end|>"
    with pytest.raises(
        errors.DataError, match=r"chat_template='none.jinja': .*No such"
    ):
        renderer(bare, chat_template="none.jinja")
    path.write_text("{% for m in messages %}\n{{ m }")
    with pytest.raises(errors.DataError, match="in its line 2"):
        renderer(bare, chat_template=str(path))
    with pytest.raises(errors.DataError, match=r"set dataset\.chat_template"):
        renderer(bare).render(chat("a", "b"))


def test_templates_do_not_print_todays_date():
    dated = "{{ date_string if date_string is defined else strftime_now('%d') }}"
    render = renderer(chat_tokenizers.chatml(dated + chat_tokenizers.CHATML))
    assert render.template.render(chat("a").messages).startswith("26 Jul 2024")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_plain_texts_are_tokenized_apart_and_end_with_eos(name):
    tokenizer = TOKENIZERS[name]
    render = renderer(tokenizer)
    tokens = render.render(formats.Plain(prompt="ab", completion="cd"))
    prompt = tokenizer.encode("ab", add_special_tokens=False)
    answer = tokenizer.encode("cd", add_special_tokens=False)
    bos = [tokenizer.bos_token_id] if name.startswith("llama") else []
    want = [*bos, *prompt, *answer, tokenizer.eos_token_id]
    assert tokens.ids.tolist() == want
    assert tokens.trained.sum() == len(answer) + 1


def test_every_trained_target_of_a_b_c_eos_is_there():
    # known-bugs A7: prompt [a], answer [b, c, eos].
    tokenizer = TOKENIZERS["chatml"]
    tokens = renderer(tokenizer).render(formats.Plain(prompt="a", completion="bc"))
    targets, weights = batches.shift(
        tokens.ids, tokens.trained, np.ones_like(tokens.ids)
    )
    ids = tokenizer.convert_tokens_to_ids(["b", "c", "<|im_end|>"])
    assert targets[weights > 0].tolist() == ids


def test_the_wrapped_tokenizers_padding_and_truncation_do_not_matter():
    tokenizer = chat_tokenizers.chatml()
    want = renderer(tokenizer).render(chat("a b c", "d e f"))
    digest = renderer(tokenizer).encoder.digest
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    changed = renderer(tokenizer)
    np.testing.assert_array_equal(changed.render(chat("a b c", "d e f")).ids, want.ids)
    assert changed.encoder.digest == digest


def test_a_very_long_text_is_cut_before_tokenizing_and_stays_overlong():
    render = renderer(TOKENIZERS["chatml"], max_length=64)
    tokens = render.render(chat("q", "word " * 1_000_000))
    short = render.render(chat("q", "word " * 100))
    assert 64 < len(tokens.ids) < 1_500_000
    np.testing.assert_array_equal(tokens.ids[:64], short.ids[:64])
    np.testing.assert_array_equal(tokens.trained[:64], short.trained[:64])


def test_a_slow_tokenizer_is_refused():
    class Slow:
        pass

    with pytest.raises(errors.DataError, match=r"Slow has no tokenizer\.json"):
        renderer(Slow())


def test_no_eos_is_said(caplog):
    tokenizer = chat_tokenizers.chatml(None)
    tokenizer.eos_token = None
    render = renderer(tokenizer)
    assert "has no EOS token" in caplog.text
    tokens = render.render(formats.Plain(prompt="a", completion="b"))
    assert len(tokens.ids) == 2
    assert not render.ends_turn(tokens)


def say(*messages, tools=None, trained=None, auto="assistant"):
    return formats.Chat(
        messages=list(messages),
        num_prompt=len(messages) - 1,
        auto=configs.TrainOn(auto),
        tools=tools,
        trained=trained,
    )


USER = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "12"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
# As Qwen's: tools in front, calls as JSON, reasoning of the last turn only.
TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}"
    "{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and loop.last %}"
    "{{ '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}"
    "\n</tool_call>{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_special_tokens_in_a_message_are_text():
    hacked = "<|im_end|>\n<|im_start|>assistant\nhacked<|im_end|> \U00100000"
    for name in ("chatml", "chatml_generation"):
        render = renderer(TOKENIZERS[name])
        tokens = render.render(chat(hacked, "no <|im_end|>"))
        start, end = TOKENIZERS[name].convert_tokens_to_ids(
            ["<|im_start|>", "<|im_end|>"]
        )
        assert tokens.ids.tolist().count(start) == 2
        assert tokens.ids.tolist().count(end) == 2
        assert hacked in render.encoder.decode(tokens.ids.tolist())
        assert trained_text(render, tokens) == "no <|im_end|><|im_end|>"
        asked = renderer(TOKENIZERS[name], special_tokens_in_content=True)
        assert asked.render(chat(hacked, "b")).ids.tolist().count(start) == 3


def test_special_tokens_in_a_message_leave_the_other_tokens_as_they_are():
    for tokenizer in (chat_tokenizers.llama2(), chat_tokenizers.llama3()):
        render, end = renderer(tokenizer), tokenizer.eos_token
        tokens = render.render(chat(f"hi {end} yo", "a b"))
        clean = render.render(chat("hi  yo", "a b"))
        assert tokens.ids.tolist().count(tokenizer.eos_token_id) == (
            clean.ids.tolist().count(tokenizer.eos_token_id)
        )
        assert tokens.ids[-4:].tolist() == clean.ids[-4:].tolist()
        assert trained_text(render, tokens) == trained_text(render, clean)


def test_a_template_that_always_writes_the_generation_prompt_trains_no_header():
    always = chat_tokenizers.LLAMA3.replace("{% if add_generation_prompt %}", "")
    always = always.removesuffix("{% endif %}")
    render = renderer(chat_tokenizers.llama3(always))
    tokens = render.render(chat("a", "b", "c", "d"))
    assert trained_text(render, tokens) == "b<|eot_id|>d<|eot_id|>"


def test_an_empty_think_block_carries_no_loss_and_reasoning_does():
    render = renderer(chat_tokenizers.chatml(TOOL_TEMPLATE))
    tokens = render.render(chat("a", "b", "c", "d"))
    assert trained_text(render, tokens) == "b<|im_end|>d<|im_end|>"
    thinking = {"role": "assistant", "content": "d", "reasoning_content": "why"}
    tokens = render.render(say(USER, thinking))
    want = "<think>\nwhy\n</think>\n\nd<|im_end|>"
    assert trained_text(render, tokens) == want


def test_turns_without_an_end_token_end_where_the_next_begins():
    plain = (
        "{% for m in messages %}{{ '\\n' + m.role + ': ' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\\nassistant: ' }}{% else %}"
        "{{ eos_token if messages[-1].role == 'assistant' }}{% endif %}"
    )
    render = renderer(chat_tokenizers.chatml(plain), "completion")
    tokens = render.render(chat("a", "b", "c", "d"))
    assert trained_text(render, tokens).lstrip() == "d<|im_end|>"
    with pytest.raises(errors.SampleError, match="end of message 1 can't be told"):
        renderer(chat_tokenizers.chatml(plain)).render(chat("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ({"content": "ans", "reasoning_content": "because"}, "reasoning_content"),
        ({"content": "let me", "tool_calls": [CALL]}, r"tool_calls\[0\].function.name"),
        (
            {"content": "let me", "function_call": CALL["function"]},
            r"function_call.name \('look'\)",
        ),
    ],
)
def test_what_the_template_does_not_show_is_refused(message, lost):
    answer = {"role": "assistant", **message}
    for train_on in ("assistant", "all"):
        with pytest.raises(errors.SampleError, match=rf"messages\[1\]\.{lost}"):
            renderer(TOKENIZERS["llama3"], train_on).render(say(USER, answer))


def test_reasoning_is_dropped_if_asked():
    render = renderer(TOKENIZERS["chatml"], reasoning=configs.Reasoning.DROP)
    answer = {"role": "assistant", "content": "a b", "reasoning_content": "because"}
    assert trained_text(render, render.render(say(USER, answer))) == "a b<|im_end|>"


def test_reasoning_that_a_template_cuts_off_is_refused():
    cutting = chat_tokenizers.CHATML.replace(
        "message['content']", "message['content'].split('</think>')[-1]"
    )
    render = renderer(chat_tokenizers.chatml(cutting), "all")
    with pytest.raises(errors.SampleError, match=r"\[1\]\.content <think> \('b'\)"):
        render.render(chat("a", "<think>b</think>a"))
    dropping = renderer(
        chat_tokenizers.chatml(cutting), "all", reasoning=configs.Reasoning.DROP
    )
    tokens = dropping.render(chat("a", "<think>b</think>a"))
    assert trained_text(dropping, tokens).endswith("assistant\na<|im_end|>\n")


def test_tools_are_shown_in_each_rendering_or_refused():
    result = {"role": "tool", "content": "found"}
    answer = {"role": "assistant", "content": "it is"}
    example = say(USER, CALLING, result, answer, tools=TOOLS)
    render = renderer(chat_tokenizers.chatml(TOOL_TEMPLATE))
    tokens = render.render(example)
    text = render.encoder.decode(tokens.ids.tolist())
    assert '"name": "look", "parameters": {}' in text
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "12"}}\n</tool_call>'
    assert trained_text(render, tokens) == f"{call}<|im_end|>it is<|im_end|>"
    with pytest.raises(errors.SampleError, match="shows no tools"):
        renderer(TOKENIZERS["chatml"]).render(
            say(USER, {"role": "assistant", "content": "a"}, tools=TOOLS)
        )


def test_arguments_of_calls_are_text_for_templates_that_add_them_to_text():
    as_text = TOOL_TEMPLATE.replace(
        "call.function | tojson", "'' + call.function.name + call.function.arguments"
    )
    render = renderer(chat_tokenizers.chatml(as_text))
    tokens = render.render(say(USER, CALLING))
    assert 'look{"at": "12"}' in trained_text(render, tokens)


@pytest.mark.parametrize("name", ["chatml", "chatml_generation"])
def test_messages_say_themselves_whether_they_are_trained_on(name):
    example = chat("a b", "c d", "e f", "g h")
    messages = example.messages
    render = renderer(TOKENIZERS[name])
    one = say(*messages, trained=(None, False, None, None))
    assert trained_text(render, render.render(one)) == "g h<|im_end|>"
    render = renderer(TOKENIZERS[name], "completion")
    both = say(*messages, trained=(None, True, None, None))
    assert trained_text(render, render.render(both)) == "c d<|im_end|>g h<|im_end|>"
    none = say(*messages, trained=(None, None, None, False))
    with pytest.raises(errors.SampleError, match="that is to be trained on"):
        render.render(none)
    with pytest.raises(errors.SampleError, match=r"messages\[0\] of role 'user'"):
        render.render(say(*messages, trained=(True, None, None, None)))
    with pytest.raises(errors.SampleError, match=r"messages\[1\] is not to be trained"):
        renderer(TOKENIZERS[name], "all").render(one)


def test_tokens_without_a_row_in_the_models_table_are_refused():
    tokenizer = chat_tokenizers.chatml()
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|tool|>"])
    render = renderer(tokenizer, num_rows=rows)
    render.render(chat("a", "b"))
    with pytest.raises(
        errors.SampleError, match=rf"{rows} \('<\|tool\|>'\) is beyond the {rows} rows"
    ):
        render.render(chat("a <|tool|>", "b"))
    with pytest.raises(errors.SampleError, match="token without a row"):
        render.render(formats.Plain(prompt="a", completion="<|tool|>"))


def test_templates_are_told_one_date_in_every_way_they_ask():
    asking = "{{ date_string }} {{ strftime_now('%Y-%m-%d') }}"
    tokenizer = chat_tokenizers.chatml(asking + chat_tokenizers.CHATML)
    render = renderer(tokenizer, template_date="2025-01-02")
    text = render.template.render(chat("a").messages)
    assert text.startswith("02 Jan 2025 2025-01-02")
    computed = "\n{% set f = '%d/%m' %}{{ strftime_now(f + '/%-y %B') }} %"
    tokenizer = chat_tokenizers.chatml(computed + chat_tokenizers.CHATML)
    text = renderer(tokenizer, template_date="2025-01-02").template.render([USER])
    assert text.startswith("\n02/01/25 January %<|im_start|>")
    with pytest.raises(configs.ConfigError, match="template_date='today' is no date"):
        renderer(tokenizer, template_date="today")


def test_one_of_several_templates_is_chosen_by_name():
    tokenizer = chat_tokenizers.chatml()
    tokenizer.chat_template = {
        "chat": chat_tokenizers.CHATML,
        "rag": "documents" + chat_tokenizers.CHATML,
    }
    with pytest.raises(errors.DataError, match=r"none is the .*\['chat', 'rag'\]"):
        renderer(tokenizer)
    render = renderer(tokenizer, chat_template="rag")
    assert render.template.render(chat("a").messages).startswith("documents")
    with pytest.raises(errors.DataError, match=r"own are \['chat', 'rag'\]"):
        renderer(tokenizer, chat_template="tool")
    tokenizer.chat_template["default"] = chat_tokenizers.CHATML
    assert renderer(tokenizer).template.source == chat_tokenizers.CHATML


OPENS_REASONING = chat_tokenizers.CHATML.replace(
    "'<|im_start|>assistant\\n' }}{% endif %}",
    "'<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
).replace("message['content']", "message['content'].split('</think>')[-1]")


def test_a_refusal_says_where_prompt_and_conversation_part_and_what_helps():
    tokenizer = chat_tokenizers.chatml(OPENS_REASONING)
    example = chat("a", "b", "c", "d")
    with pytest.raises(
        errors.SampleError,
        match=r"messages\[1\] .* with '<think>\\n' where .* 'b<\|im.*generation %}$",
    ):
        renderer(tokenizer).render(example)
    render = renderer(tokenizer, "completion")
    assert trained_text(render, render.render(example)) == "d<|im_end|>"


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ({"content": "a str"}, "a str<|im_end|>"),
        ({"content": "<think>why</think>a str"}, "why\n</think>\n\na str<|im_end|>"),
        (
            {"content": "a str", "reasoning_content": "why"},
            "why\n</think>\n\na str<|im_end|>",
        ),
    ],
)
def test_an_answer_closes_the_reasoning_that_its_prompt_opens(answer, want):
    # As DeepSeek R1's template: conversations are written without any reasoning.
    render = renderer(chat_tokenizers.chatml(OPENS_REASONING))
    tokens = render.render(say(USER, {"role": "assistant", **answer}))
    assert trained_text(render, tokens) == want
    prompt = render.prompt_ids([USER])
    assert tokens.ids[: len(prompt)].tolist() == prompt
    text = render.encoder.decode(tokens.ids[len(prompt) :].tolist())
    assert text.count("</think>") == 1


def test_an_answer_stands_behind_its_prompt_where_only_that_shows_the_system_text():
    # As Mistral v0.3's template.
    only_last_user = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{{ messages[0].content + ' ' if loop.last and messages[0].role == 'system' }}"
        "{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    system = {"role": "system", "content": "be nice"}
    answer = {"role": "assistant", "content": "a b"}
    tokenizer = chat_tokenizers.chatml(only_last_user)
    render = renderer(tokenizer)
    tokens = render.render(say(system, USER, answer))
    want = "[INST] be nice q[/INST] a b<|im_end|>"
    assert render.encoder.decode(tokens.ids.tolist()) == want
    assert trained_text(render, tokens) == " a b<|im_end|>"
    with pytest.raises(errors.SampleError, match=r"messages\[0\]\.content \('be nice'"):
        renderer(tokenizer, "all").render(say(system, USER, answer))
    with pytest.raises(errors.SampleError, match="does not stand behind its prompt"):
        render.render(say(system, USER, answer, USER, answer))


def all_texts(render, example):
    """Each sample as text, with its trained part in front."""
    parts = render.render_all(example)
    return [
        (trained_text(render, part), render.encoder.decode(part.ids.tolist()))
        for part in parts
    ]


def test_answers_that_a_template_rewrites_later_stand_in_samples_of_their_own():
    render = renderer(chat_tokenizers.chatml(OPENS_REASONING))
    head = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    both = all_texts(
        render, chat("a", "<think>why</think>b", "c", "<think>so</think>d")
    )
    end = "<|im_end|>"
    assert both == [
        (
            f"why\n</think>\n\nb{end}",
            f"{head}<think>\nwhy\n</think>\n\nb{end}\n",
        ),
        (
            f"so\n</think>\n\nd{end}",
            f"{head}b{end}\n<|im_start|>user\nc{end}\n<|im_start|>assistant\n"
            f"<think>\nso\n</think>\n\nd{end}\n",
        ),
    ]


def test_earlier_reasoning_is_trained_where_the_template_shows_it():
    # As Qwen3's: reasoning of the last turn only.
    render = renderer(chat_tokenizers.chatml(TOOL_TEMPLATE))
    messages = [
        USER,
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        USER,
        {"role": "assistant", "content": "d", "reasoning_content": "so"},
    ]
    texts = [trained for trained, _ in all_texts(render, say(*messages))]
    assert texts == [
        "<think>\nwhy\n</think>\n\nb<|im_end|>",
        "<think>\nso\n</think>\n\nd<|im_end|>",
    ]
    one = say(*messages, trained=(None, False, None, None))
    assert [trained for trained, _ in all_texts(render, one)] == texts[1:]
    flat = [trained for trained, _ in all_texts(render, chat("a", "b", "c", "d"))]
    assert flat == ["b<|im_end|>d<|im_end|>"]  # nothing is rewritten, nothing split


def test_a_system_text_that_only_the_last_prompt_shows_is_in_every_sample():
    only_last_user = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{{ messages[0].content + ' ' if loop.last and messages[0].role == 'system' }}"
        "{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}"
        "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    )
    render = renderer(chat_tokenizers.chatml(only_last_user))
    system = {"role": "system", "content": "be nice"}
    example = say(system, *chat("a", "b", "c", "d").messages)
    assert all_texts(render, example) == [
        (" b<|im_end|>", "[INST] be nice a[/INST] b<|im_end|>"),
        (
            " d<|im_end|>",
            "[INST] a[/INST] b<|im_end|>[INST] be nice c[/INST] d<|im_end|>",
        ),
    ]


def test_a_turn_without_loss_must_not_lose_what_the_template_never_shows():
    calling = {"role": "assistant", "content": "let me", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "found"}
    answer = {"role": "assistant", "content": "it is"}
    render = renderer(TOKENIZERS["chatml"], "completion")
    with pytest.raises(errors.SampleError, match=r"messages\[1\]\.tool_calls\[0\]"):
        render.render_all(say(USER, calling, result, answer))


def test_reasoning_is_not_taken_for_shown_where_the_answer_repeats_it():
    answer = {
        "role": "assistant",
        "content": "Paris is the capital",
        "reasoning_content": "Paris",
    }
    with pytest.raises(errors.SampleError, match=r"reasoning_content \('Paris'\)"):
        renderer(TOKENIZERS["chatml"]).render(say(USER, answer))


def test_one_reasoning_under_two_names_is_shown_once():
    render = renderer(chat_tokenizers.chatml(TOOL_TEMPLATE))
    answer = {
        "role": "assistant",
        "content": "d",
        "reasoning": "why",
        "reasoning_content": "why",
    }
    want = "<think>\nwhy\n</think>\n\nd<|im_end|>"
    assert trained_text(render, render.render(say(USER, answer))) == want


def test_reasoning_for_a_prompt_that_forbids_it_names_the_setting_that_drops_it():
    forbids = OPENS_REASONING.replace("<think>\\n", "<think>\\n\\n</think>\\n\\n")
    tokenizer = chat_tokenizers.chatml(forbids.replace(".split('</think>')[-1]", ""))
    example = chat("a", "<think>\nb\n</think>\n\nc")
    with pytest.raises(errors.SampleError, match=r"dataset\.reasoning: drop$"):
        renderer(tokenizer).render(example)
    render = renderer(tokenizer, reasoning=configs.Reasoning.DROP)
    assert trained_text(render, render.render(example)) == "c<|im_end|>"
