import copy
import inspect
import io
import re
import subprocess
import sys

import pytest
import sentencepiece
import transformers
from tokenizers import pre_tokenizers

from mtuner_jax.checkpoints import gguf_import, gguf_tokenizers

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "don't we'll I'VE they're O'Neill's",
    "tabs\tand\nnew\r\nlines\n\n\n  indented",
    "numbers 1 12 123 1234567890 3.14159 1e-5 0xFF v2.0",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n",
    '{"key": [1, 2, {"a": null}], "b": "\\u00e9"}',
    "naïve café Zürich Straße Ωμέγα привет мир שלום مرحبا हिन्दी",
    "日本語のテキスト 中文文本 한국어 텍스트 ไทย",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and combining e\u0301 n\u0303",
    "math ∑∫√ ≠ ≤ ± ÷ 2² x³",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <repo_name>x<file_sep>y",
    "<|im_start|no|> <|unknown|> < |im_end|>",
    "a" * 300,
    "\u200bzero\u00a0width\u3000ideographic",
    "https://example.org/path?q=1&r=%20#frag user@example.org",
]


@pytest.fixture(scope="module")
def smollm2():
    file = gguf_import.GgufFile(gguf_import.packaged_smollm2())
    return gguf_tokenizers.build(file.metadata)


@pytest.fixture(scope="module")
def theirs():
    path = gguf_import.packaged_smollm2()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_equal_those_of_transformers(smollm2, theirs, text):
    got = smollm2(text, add_special_tokens=False)["input_ids"]
    assert got == theirs(text, add_special_tokens=False)["input_ids"]
    assert smollm2.decode(got) == text


def test_digits_are_split_before_spaces_are_grouped(smollm2, theirs):
    """`smollm` splits digit by digit first, so spaces before a digit stay together.

    llama.cpp does so, and the vocabulary, in which no token joins a digit to anything,
    shows that training did. transformers' GGUF reader has no rule for `smollm`.
    """
    ids = smollm2("x  12", add_special_tokens=False)["input_ids"]
    assert smollm2.convert_ids_to_tokens(ids) == ["x", "ĠĠ", "1", "2"]
    ids = theirs("x  12", add_special_tokens=False)["input_ids"]
    assert theirs.convert_ids_to_tokens(ids) == ["x", "Ġ", "Ġ", "1", "2"]
    learned = [token for i, token in enumerate(vocabulary(smollm2)) if i > 16]
    assert not [t for t in learned if re.search("[0-9]", t) and len(t) > 1]


def test_that_rule_is_the_only_difference_to_transformers(smollm2, theirs):
    backend = copy.deepcopy(theirs.backend_tokenizer)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    for text in (*TEXTS, "½ ² 1½  x²", inspect.getsource(subprocess)):
        got = smollm2(text, add_special_tokens=False)["input_ids"]
        assert got == backend.encode(text, add_special_tokens=False).ids


def vocabulary(tokenizer):
    return tokenizer.convert_ids_to_tokens(list(range(tokenizer.vocab_size)))


def test_special_tokens_and_chat_template_come_along(smollm2, theirs):
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(smollm2, name) == getattr(theirs, name)
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    ]
    got = smollm2.apply_chat_template(messages, tokenize=False)
    assert got == theirs.apply_chat_template(messages, tokenize=False)
    assert "<|im_start|>assistant\nBecause.<|im_end|>" in got


def test_saved_tokenizer_loads_with_transformers(smollm2, tmp_path):
    smollm2.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert again(text)["input_ids"] == smollm2(text)["input_ids"]
    assert again.chat_template == smollm2.chat_template
    assert again.eos_token == smollm2.eos_token


def test_no_torch_is_imported():
    code = (
        "import sys; from mtuner_jax.checkpoints import gguf_import as g;"
        "from mtuner_jax.checkpoints import gguf_tokenizers as t;"
        "t.build(g.GgufFile(g.packaged_smollm2()).metadata)('x');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def sentencepiece_model():
    text = inspect.getsource(subprocess) + "\n".join(TEXTS)
    lines = [line for line in text.splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_metadata(model, **changes):
    count = range(model.get_piece_size())
    kinds = {model.unk_id(): 2, model.bos_id(): 3, model.eos_id(): 3}
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in count],
        "tokenizer.ggml.scores": [model.get_score(i) for i in count],
        "tokenizer.ggml.token_type": [
            6 if model.is_byte(i) else kinds.get(i, 1) for i in count
        ],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        **changes,
    }
    return lambda key, default=None: values.get(key, default)


@pytest.mark.parametrize("text", [text for text in TEXTS if "\x00" not in text])
def test_sentencepiece_ids_equal_those_of_sentencepiece(sentencepiece_model, text):
    tokenizer = gguf_tokenizers.build(spm_metadata(sentencepiece_model))
    got = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert got == sentencepiece_model.encode(text)
    assert tokenizer.decode(got) == text


def test_bos_and_eos_are_added_as_the_file_says(sentencepiece_model):
    bos, eos = sentencepiece_model.bos_id(), sentencepiece_model.eos_id()
    body = sentencepiece_model.encode("hello")
    cases = [({}, [bos, *body]), ({"tokenizer.ggml.add_bos_token": False}, body)]
    cases += [({"tokenizer.ggml.add_eos_token": True}, [bos, *body, eos])]
    for changes, want in cases:
        tokenizer = gguf_tokenizers.build(spm_metadata(sentencepiece_model, **changes))
        assert tokenizer("hello")["input_ids"] == want


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "viking",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.merges": [],
            },
            "'viking' is not known, so text would be cut wrongly",
        ),
    ],
)
def test_unknown_kinds_are_refused(values, text):
    with pytest.raises(gguf_tokenizers.GgufTokenizerError, match=text):
        gguf_tokenizers.build(lambda key, default=None: values.get(key, default))


@pytest.mark.parametrize(
    ("content", "lacking"),
    [
        ({"tokenizer.ggml.model": "gpt2"}, "tokens"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]},
            "merges",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]},
            "scores",
        ),
    ],
)
def test_a_file_without_a_whole_tokenizer_is_told_what_it_lacks(content, lacking):
    def metadata(key, default=None):
        return content.get(key, default)

    text = rf"the GGUF file lacks tokenizer\.ggml\.{lacking}: .* tokenizer\.json"
    with pytest.raises(gguf_tokenizers.GgufTokenizerError, match=text):
        gguf_tokenizers.build(metadata)
