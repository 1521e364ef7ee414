import dataclasses
import json
import tracemalloc

import jax
import numpy as np
import pytest

from models import llama_hf_names
from mtuner_jax.checkpoints import hf_import, matching, safetensors_files


def leaf(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def load(tiny, config, folder, **abstract):
    return hf_import.load(
        safetensors_files.Folder(folder),
        llama_hf_names.tensors(config),
        tiny.abstract(config, **abstract),
    )


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_arrives_at_its_place(tiny, tmp_path, num_files, tied):
    config = tiny.config(
        tie_word_embeddings=tied,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
    )
    tensors = tiny.tensors(config)
    folder = tiny.folder(tmp_path / "m", config, tensors, num_files=num_files)
    params = load(tiny, config, folder)
    for name in llama_hf_names.tensors(config):
        got = np.asarray(leaf(params, name.path))
        got = got if name.layer is None else got[name.layer]
        got = got.T if name.transposed else got
        np.testing.assert_array_equal(got, tensors[name.name])
    assert ("table" in params["head"]) != tied


def test_arrays_have_the_shardings_and_dtypes_asked_for(tiny, tmp_path):
    config = tiny.config()
    folder = tiny.folder(tmp_path, config, tiny.tensors(config))
    abstract = tiny.abstract(config, dtype="bfloat16")
    params = hf_import.load(
        safetensors_files.Folder(folder), llama_hf_names.tensors(config), abstract
    )
    for got, want in zip(
        jax.tree.leaves(params), jax.tree.leaves(abstract), strict=True
    ):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_files_of_every_float_dtype_load_on_any_mesh(
    tiny, tmp_path, dtype, num_devices
):
    config = tiny.config(num_layers=1)
    tensors = tiny.tensors(config, dtype)
    folder = tiny.folder(tmp_path, config, tensors)
    params = load(tiny, config, folder, num_devices=num_devices)
    got = np.asarray(params["layers"]["mlp.up_proj"]["kernel"][0])
    want = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(got, want)


def test_tables_are_padded_with_zero_rows(tiny, tmp_path):
    config = tiny.config(vocab_size=93)
    tensors = tiny.tensors(config)
    folder = tiny.folder(tmp_path, config, tensors)
    params = load(tiny, config, folder, table_rows=112)
    for table, name in (
        (params["embed"]["table"], "model.embed_tokens.weight"),
        (params["head"]["table"], "lm_head.weight"),
    ):
        np.testing.assert_array_equal(np.asarray(table)[:93], tensors[name])
        assert not np.asarray(table)[93:].any()


def test_devices_with_nothing_but_padding_get_zeros(tmp_path):
    x = np.ones((5, 4), np.float32)
    safetensors_files.write(tmp_path / "model.safetensors", {"x": x})
    name = llama_hf_names.HfTensor(
        name="x", path=("x",), layer=None, shape=(5, 4), padded=True
    )
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    for rows, real in ((8, 5), (16, 5)):
        target = jax.ShapeDtypeStruct(
            (rows, 4), np.float32, sharding=jax.NamedSharding(mesh, jax.P("a"))
        )
        folder = safetensors_files.Folder(tmp_path)
        got = np.asarray(hf_import.load(folder, [name], {"x": target})["x"])
        np.testing.assert_array_equal(got[:real], x)
        assert not got[real:].any()


def test_kernels_are_padded_with_zero_rows(tmp_path):
    x = np.arange(15, dtype=np.float32).reshape(3, 5)  # [out, in]
    safetensors_files.write(tmp_path / "model.safetensors", {"x": x})
    name = llama_hf_names.HfTensor(
        name="x", path=("x",), layer=0, shape=(3, 5), transposed=True
    )
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    target = jax.ShapeDtypeStruct(
        (1, 8, 3), np.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "a"))
    )
    folder = safetensors_files.Folder(tmp_path)
    array = hf_import.load(folder, [name], {"x": target})["x"]
    np.testing.assert_array_equal(np.asarray(array)[0, :5], x.T)
    assert not np.asarray(array)[0, 5:].any()


def test_arrays_may_live_in_host_memory(tiny, tmp_path):
    config = tiny.config()
    tensors = tiny.tensors(config)
    abstract = tiny.abstract(config)
    up = abstract["layers"]["mlp.up_proj"]["kernel"]
    abstract["layers"]["mlp.up_proj"]["kernel"] = up.update(
        sharding=up.sharding.with_memory_kind("pinned_host")
    )
    params = hf_import.load(
        safetensors_files.Folder(tiny.folder(tmp_path, config, tensors)),
        llama_hf_names.tensors(config),
        abstract,
    )
    got = params["layers"]["mlp.up_proj"]["kernel"]
    assert got.sharding.memory_kind == "pinned_host"
    want = tensors["model.layers.2.mlp.up_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(got)[2], want)


def test_host_memory_stays_near_one_tensor(tiny, tmp_path):
    config = tiny.config(
        num_layers=24, hidden_size=256, intermediate_size=1024, head_dim=64
    )
    tensors = tiny.tensors(config)
    total_bytes = sum(x.nbytes for x in tensors.values())
    largest_bytes = max(x.nbytes for x in tensors.values())
    folder = tiny.folder(tmp_path, config, tensors)
    del tensors
    load(tiny, config, folder)  # traces and compiles: not what is measured
    tracemalloc.start()
    load(tiny, config, folder)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total_bytes > 60 * largest_bytes
    # The tensor, the contiguous copy of its shards, and what jit keeps of a trace.
    assert peak_bytes < 4 * largest_bytes


def test_all_kinds_of_mismatch_are_listed_at_once(tiny, tmp_path):
    config = tiny.config()
    tensors = tiny.tensors(config)
    for layer in range(3):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.qweight"] = np.zeros((2, 2), np.float32)
    tensors["model.norm.weight"] = np.zeros((31,), np.float32)
    tensors["lm_head.weight"] = np.zeros((96, 32), np.int8)
    folder = tiny.folder(tmp_path, config, tensors)
    with pytest.raises(matching.ImportMismatchError) as caught:
        load(tiny, config, folder)
    text = str(caught.value)
    assert "3 missing (model.layers.0.mlp.up_proj.weight," in text
    assert "1 unexpected (model.layers.0.mlp.up_proj.qweight)" in text
    assert "1 misshapen (model.norm.weight [31] instead of [32])" in text
    assert "1 of an unsupported dtype (lm_head.weight I8)" in text


def test_mismatch_is_found_before_anything_is_read(tiny, tmp_path, monkeypatch):
    config = tiny.config()
    tensors = tiny.tensors(config)
    del tensors["model.norm.weight"]
    source = safetensors_files.Folder(tiny.folder(tmp_path, config, tensors))
    monkeypatch.setattr(source, "read", lambda name, box: pytest.fail("read"))
    with pytest.raises(matching.ImportMismatchError, match="1 missing"):
        hf_import.load(source, llama_hf_names.tensors(config), tiny.abstract(config))


def test_computed_tensors_and_true_copies_are_ignored(tiny, tmp_path):
    config = tiny.config(tie_word_embeddings=True)
    tensors = tiny.tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        tensors[name] = np.ones((8,), np.float32)
    params = load(tiny, config, tiny.folder(tmp_path, config, tensors))
    assert "table" not in params["head"]


def test_a_head_that_differs_from_the_tied_table_is_refused(tiny, tmp_path):
    config = tiny.config(tie_word_embeddings=True)
    tensors = tiny.tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(ValueError, match="tie_word_embeddings=true; set it to false"):
        load(tiny, config, tiny.folder(tmp_path, config, tensors))


def test_a_missing_head_hints_at_tied_tables(tiny, tmp_path):
    config = tiny.config()
    tensors = tiny.tensors(config)
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="needs tie_word_embeddings=true"):
        load(tiny, config, tiny.folder(tmp_path, config, tensors))


def test_local_folders_and_gguf_files_come_before_the_hub(tiny, tmp_path, monkeypatch):
    config = tiny.config()
    tiny.folder(tmp_path / "owner" / "name", config, tiny.tensors(config))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert str(hf_import.locate("owner/name")) == "owner/name"
    assert hf_import.locate(str(tmp_path / "model.gguf")).name == "model.gguf"


def test_locate_says_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hf_import.ModelNotFoundError, match="no such folder or file"):
        hf_import.locate("./nowhere/at/all")
    with pytest.raises(hf_import.ModelNotFoundError, match="no such folder or file"):
        hf_import.locate("absent.gguf")
    with pytest.raises(hf_import.ModelNotFoundError, match="has no config"):
        hf_import.locate(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(hf_import.ModelNotFoundError, match="it is an adapter"):
        hf_import.locate(str(tmp_path))


def test_an_unreachable_hub_is_named(tmp_path, monkeypatch):
    # An address that refuses connections at once, with or without a network.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hf_import.ModelNotFoundError) as caught:
        hf_import.locate("nobody/nothing")
    assert "'nobody/nothing': no local folder" in str(caught.value)
    assert "the Hugging Face hub has none" in str(caught.value)


def test_identity_recognises_the_same_base_elsewhere(tiny, tmp_path):
    config = tiny.config()
    tensors = tiny.tensors(config)
    one = tiny.folder(tmp_path / "a", config, tensors, num_files=2)
    two = tiny.folder(tmp_path / "b", config, tensors, num_files=2)
    hf = json.loads((two / "config.json").read_text())
    hf["transformers_version"] = "5.0"
    (two / "config.json").write_text(json.dumps(hf, indent=2))
    before, after = hf_import.base_identity(one), hf_import.base_identity(two)
    assert json.loads(json.dumps(before)) == after


def test_identity_tells_other_weights_and_other_configs_apart(tiny, tmp_path):
    config = tiny.config()
    one = tiny.folder(tmp_path / "a", config, tiny.tensors(config))
    two = tiny.folder(tmp_path / "b", config, tiny.tensors(config, seed=1))
    other = dataclasses.replace(config, rope_theta=5e5)
    three = tiny.folder(tmp_path / "c", other, tiny.tensors(config))
    stored = hf_import.base_identity(one)
    weights, changed = map(hf_import.base_identity, (two, three))
    assert weights["config"] == stored["config"]
    assert weights["files"].keys() == stored["files"].keys() == {"model.safetensors"}
    assert weights["files"] != stored["files"]
    assert changed["files"] == stored["files"]
    assert changed["config"] != stored["config"]
