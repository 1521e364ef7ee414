import json

import numpy as np
import pytest
import torch
import transformers

from models import llama, llama_configs, llama_hf_names
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import merging, model_export, safetensors_files
from mtuner_jax.configs import LoraConfig
from tests import tiny as small

IDS = np.random.default_rng(0).integers(0, 96, (2, 7)).astype(np.int32)


def read_all(folder):
    source = safetensors_files.Folder(folder)
    return {
        name: source.read(name, tuple(slice(0, size) for size in info.shape))
        for name, info in source.infos().items()
    }


def write(folder, config, source, **options):
    model_export.write_model(
        folder,
        source,
        llama_hf_names.tensors(config),
        llama_configs.to_hf(config),
        options=model_export.ModelOptions(**options),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_read_is_written_byte_for_byte(tiny, tmp_path, dtype, tied):
    config = tiny.config(tie_word_embeddings=tied, family="qwen3")
    tensors = tiny.tensors(config, dtype)
    folder = tiny.folder(tmp_path / "in", config, tensors, num_files=2)
    source = safetensors_files.Folder(folder)
    write(tmp_path / "out", config, source, dtype=dtype, generation={"top_k": 5})
    got = read_all(tmp_path / "out")
    assert got.keys() == tensors.keys()
    for name, want in tensors.items():
        assert got[name].dtype == want.dtype
        assert got[name].tobytes() == want.tobytes(), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {**llama_configs.to_hf(config), "torch_dtype": dtype}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"top_k": 5}


def test_model_is_split_into_files_with_an_index(tiny, tmp_path):
    config = tiny.config()
    tensors = tiny.tensors(config)
    source = safetensors_files.Folder(tiny.folder(tmp_path / "in", config, tensors))
    write(tmp_path / "out", config, source, max_shard_size=20_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(x.size * 2 for x in tensors.values())
    reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reread.dtype == torch.bfloat16
    got = reread.state_dict()["model.layers.1.mlp.down_proj.weight"].float().numpy()
    want = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(got, want, rtol=2**-8)


@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_model_has_our_logits_in_transformers(tiny, tmp_path, tied):
    config = tiny.config(tie_word_embeddings=tied)
    tensors = tiny.tensors(config)
    source = safetensors_files.Folder(tiny.folder(tmp_path / "in", config, tensors))
    lora_config = LoraConfig(
        r=4,
        use_rslora=True,
        target_modules=("q_proj", "down_proj", "v_proj"),
        rank_pattern={"layers.1.self_attn.q_proj": 2},
    )
    linears = llama.Llama(config).linears()
    specs = lora.resolve(lora_config, linears, num_layers=config.num_layers)
    adapters = small.filled(specs, dtype=np.float32)
    merged = merging.Merged(source, adapters, specs)
    write(tmp_path / "out", config, merged, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        got = theirs(torch.from_numpy(IDS).long()).logits.numpy()
    names = {name.name: name for name in llama_hf_names.tensors(config)}
    params = {"layers": {}, "embed": {}, "head": {}}
    for name, x in tensors.items():
        place = names[name]
        node = params
        for key in place.path[:-1]:
            node = node.setdefault(key, {})
        x = x.T if place.transposed else x
        if place.layer is None:
            node[place.path[-1]] = x
        else:
            node.setdefault(place.path[-1], []).append(x)
    params["layers"] = {
        module: {leaf: np.stack(parts) for leaf, parts in leaves.items()}
        for module, leaves in params["layers"].items()
    }
    want = tiny.logits(config, params, IDS, adapters=adapters, specs=specs)
    plain = tiny.logits(config, params, IDS)
    assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)
    assert np.linalg.norm(plain - want) > 0.01 * np.linalg.norm(want)


def test_any_part_of_a_merged_tensor_is_that_of_the_whole(tiny, tmp_path):
    config = tiny.config(num_layers=1)
    tensors = tiny.tensors(config)
    source = safetensors_files.Folder(tiny.folder(tmp_path / "in", config, tensors))
    specs = lora.resolve(
        LoraConfig(r=2), llama.Llama(config).linears(), num_layers=config.num_layers
    )
    merged = merging.Merged(source, small.filled(specs, dtype=np.float32), specs)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = merged.read(name, (slice(0, 64), slice(0, 32)))
    part = merged.read(name, (slice(8, 20), slice(4, 9)))
    np.testing.assert_allclose(part, whole[8:20, 4:9], rtol=1e-6)
    assert merged.infos()[name].dtype == "F32"


def test_weights_that_overflow_are_refused_and_nothing_is_written(tiny, tmp_path):
    config = tiny.config(num_layers=1)
    tensors = tiny.tensors(config)
    tensors["model.norm.weight"][3] = 1e30
    source = safetensors_files.Folder(tiny.folder(tmp_path / "in", config, tensors))
    with pytest.raises(
        model_export.ExportError, match=r"model\.norm\.weight holds NaN"
    ):
        write(tmp_path / "out", config, source, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_unknown_dtypes_and_sizes_are_refused():
    with pytest.raises(model_export.ExportError, match="dtype='int4'"):
        model_export.ModelOptions(dtype="int4")
    with pytest.raises(model_export.ExportError, match="max_shard_size=0"):
        model_export.ModelOptions(max_shard_size=0)
