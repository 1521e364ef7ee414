import gguf
import numpy as np
import pytest
import transformers

from models import llama_configs, llama_hf_names
from mtuner_jax.checkpoints import (
    gguf_export,
    gguf_import,
    gguf_tokenizers,
    gguf_vocabularies,
    hf_import,
    model_export,
    safetensors_files,
)
from tests.data import chat_tokenizers

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(tiny, tmp_path, config, *, dtype="float32", tokenizer=None):
    """A checkpoint in a folder, and the same as a GGUF file."""
    folder = tiny.folder(tmp_path / "in", config, tiny.tensors(config))
    tokenizer = tokenizer or chat_tokenizers.chatml()
    gguf_export.write(
        tmp_path / "out" / "model.gguf",
        safetensors_files.Folder(folder),
        llama_configs.to_hf(config),
        gguf_vocabularies.of_tokenizer(tokenizer, num_rows=config.vocab_size),
        dtype=dtype,
        name="tiny",
    )
    return folder, tmp_path / "out" / "model.gguf"


def whole(source, name):
    shape = source.infos()[name].shape
    return source.read(name, tuple(slice(0, size) for size in shape))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3}),
        ("qwen2", {"attention_bias": True, "rope_scaling": YARN}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 8}),
    ],
)
def test_config_and_tensors_read_back_equal(tiny, tmp_path, family, changes):
    hf = llama_configs.to_hf(tiny.config(family=family, vocab_size=360, head_dim=64))
    hf |= {"max_position_embeddings": 2048} | changes
    hf["rope_theta"] = 500000.0
    config = llama_configs.from_hf(hf)
    folder, file = write(tiny, tmp_path, config)
    source, want = gguf_import.GgufFile(file), safetensors_files.Folder(folder)
    got = llama_configs.from_hf(source.hf_config())
    assert got.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    expected = llama_configs.to_hf(config) | {"rms_norm_eps": got.rms_norm_eps}
    assert llama_configs.to_hf(got) == expected
    assert source.infos().keys() == want.infos().keys()
    for name in want.infos():
        np.testing.assert_array_equal(whole(source, name), whole(want, name))


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float16", 1e-3), ("bfloat16", 1e-2), ("q8_0", 1e-2)]
)
def test_smaller_types_stay_near(tiny, tmp_path, dtype, bound):
    config = tiny.config(vocab_size=360)
    folder, file = write(tiny, tmp_path, config, dtype=dtype)
    source, want = gguf_import.GgufFile(file), safetensors_files.Folder(folder)
    for name in want.infos():
        got, exact = whole(source, name), whole(want, name)
        assert np.linalg.norm(got - exact) <= bound * np.linalg.norm(exact), name
    kinds = {
        tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors
    }
    assert kinds["blk.0.ffn_up.weight"].name.lower() in (dtype, "bf16", "f16")
    assert kinds["blk.0.attn_norm.weight"] is gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize("kind", ["chatml", "llama3", "llama2"])
def test_tokenizers_read_back_equal(tiny, tmp_path, kind):
    tokenizer = getattr(chat_tokenizers, kind)()
    config = tiny.config(num_layers=1, vocab_size=400)
    _, file = write(tiny, tmp_path, config, tokenizer=tokenizer)
    got = gguf_tokenizers.build(gguf_import.GgufFile(file).metadata)
    text = "What does x.removeprefix(1234) do?\n\n  It's \u00e9 \U0001f600 <unk> \t."
    assert got.encode(text) == tokenizer.encode(text)
    assert got.chat_template == tokenizer.chat_template
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(got, name) == getattr(tokenizer, name)


def test_transformers_reads_the_file_as_we_do(tiny, tmp_path):
    torch = pytest.importorskip("torch")
    config = tiny.config(vocab_size=360, rms_norm_eps=1e-5)
    folder, file = write(tiny, tmp_path, config)
    ids = np.random.default_rng(0).integers(0, 300, (2, 7)).astype(np.int32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name
    )
    with torch.no_grad():
        got = theirs(torch.from_numpy(ids).long()).logits.float().numpy()
    params = hf_import.load(
        safetensors_files.Folder(folder),
        llama_hf_names.tensors(config),
        tiny.abstract(config, num_devices=1),
    )
    want = tiny.logits(config, params, ids)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_what_gguf_cannot_say_is_refused(tiny, tmp_path):
    config = tiny.config(num_layers=1, vocab_size=360)
    hf = llama_configs.to_hf(config)
    source = safetensors_files.Folder(
        tiny.folder(tmp_path / "in", config, tiny.tensors(config))
    )
    vocabulary = gguf_vocabularies.Vocabulary({})

    def refused(text, hf=hf, dtype="float32"):
        with pytest.raises(model_export.ExportError, match=text):
            gguf_export.write(
                tmp_path / "m.gguf", source, hf, vocabulary, dtype=dtype, name="m"
            )
        assert not list(tmp_path.glob("*m.gguf*"))

    refused("dtype='int4': one of float32", dtype="int4")
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    refused("rope_type='dynamic' has no form", hf={**hf, **scaling})
    odd = {**YARN, "attention_factor": 1.5, "beta_fast": 32.0, "beta_slow": 1.0}
    odd["truncate"] = True
    refused("these YaRN settings", hf={**hf, "rope_scaling": odd})
    refused("model_type='phi3' has no GGUF", hf={**hf, "model_type": "phi3"})
    tokenizer = chat_tokenizers.chatml()
    tokenizer.backend_tokenizer.pre_tokenizer = None
    with pytest.raises(model_export.ExportError, match=r"cuts text as this one.*gpt-2"):
        gguf_vocabularies.of_tokenizer(tokenizer, num_rows=360)
