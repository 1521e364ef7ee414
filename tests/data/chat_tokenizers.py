"""Small real tokenizers of the three kinds that matter, built without downloads."""

import tokenizers
import transformers
from tokenizers import (
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "What does str.removeprefix do in Python?",
    "Return a str with the given prefix string removed if present.",
    "Below is an instruction that describes a task. system user assistant",
    "def f(x):\n    if x:\n        return x\n    return  None\n",
] * 4

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
    " + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As SmolLM2's: a default system message where none is given.
CHATML_WITH_SYSTEM = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe helpful<|im_end|>\\n' }}{% endif %}"
) + CHATML.removeprefix("{% for message in messages %}")
# The mark without the end of the turn, as some authors write it.
CHATML_GENERATION = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{{ '<|im_end|>\\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>"
    "\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}"
    "{% endif %}{% endfor %}"
)
# Shows a turn's answer only when it is the last one, as templates that hide
# reasoning do.
REWRITING = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if loop.last or message['role'] != 'assistant' %}"
    "{{ message['content'] }}{% else %}{{ '...' }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(special, *, bos=None, adds_bos=False):
    """A byte-level BPE as of GPT-2; its post-processor trims offsets."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def chatml(template=CHATML):
    """As SmolLM2: bos_token begins every turn, eos_token ends it."""
    backend = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return _wrap(
        backend, template, bos="<|im_start|>", eos="<|im_end|>", pad="<|im_end|>"
    )


def llama3(template=LLAMA3):
    """As Llama 3: adds BOS by itself, has no pad token, turns end before EOS."""
    special = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    backend = byte_level(special, bos=special[0], adds_bos=True)
    return _wrap(backend, template, bos=special[0], eos=special[1])


def llama2(template=LLAMA2):
    """As Llama 2: sentencepiece-like, with a space in front of every text."""
    backend = tokenizers.Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _wrap(backend, template, bos="<s>", eos="</s>", unk="<unk>")


def _wrap(backend, template, **special):
    names = {f"{kind}_token": token for kind, token in special.items()}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    wrapped.chat_template = template
    return wrapped
