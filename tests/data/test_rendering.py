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


def renderer(tokenizer, train_on="auto", max_length=4096, chat_template=""):
    return rendering.Renderer(
        tokenizer,
        train_on=configs.TrainOn(train_on),
        max_length=max_length,
        chat_template=chat_template,
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
    with pytest.raises(errors.SampleError, match="changes with what follows"):
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
