import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mtuner_jax.checkpoints import safetensors_files


def test_arrays_of_any_memory_order_survive(tmp_path):
    tensors = {
        "transposed": np.arange(6.0, dtype=np.float32).reshape(2, 3).T,
        "strided": np.arange(40, dtype=ml_dtypes.bfloat16).reshape(5, 8)[::2, 1::3],
        "reversed": np.arange(5, dtype=np.float16)[::-1],
        "scalar": np.array(3.0, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / "x.safetensors"
    safetensors_files.write(path, tensors)
    got = safetensors.numpy.load_file(path)
    assert got.keys() == tensors.keys()
    for name, want in tensors.items():
        assert (got[name].shape, got[name].dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got[name], want)


def test_metadata_says_pt_and_no_temporary_file_stays(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors_files.write(path, {"a": np.ones(3, np.float32)})
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_write_that_reads_back_different_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    safetensors_files.write(path, {"a": np.ones(3, np.float32)})
    before = path.read_bytes()
    save = safetensors.numpy.save_file

    def broken(tensors, filename, metadata):
        save({k: x + 1 for k, x in tensors.items()}, filename, metadata)

    monkeypatch.setattr("safetensors.numpy.save_file", broken)
    with pytest.raises(safetensors_files.SafetensorsError, match="reads back diff"):
        safetensors_files.write(path, {"a": np.zeros(3, np.float32)})
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_folder_reads_whole_tensors_and_parts(tmp_path):
    x = np.arange(48, dtype=np.float32).reshape(6, 8)
    safetensors_files.write(tmp_path / "model.safetensors", {"x": x})
    folder = safetensors_files.Folder(tmp_path)
    assert folder.infos()["x"].shape == (6, 8)
    assert folder.infos()["x"].dtype == "F32"
    whole = folder.read("x", (slice(0, 6), slice(0, 8)))
    np.testing.assert_array_equal(whole, x)
    part = folder.read("x", (slice(2, 4), slice(3, 5)))
    np.testing.assert_array_equal(part, x[2:4, 3:5])


def test_pickles_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(safetensors_files.SafetensorsError, match="save_pretrained"):
        safetensors_files.Folder(tmp_path)


def test_an_empty_folder_and_shards_without_index_are_errors(tmp_path):
    with pytest.raises(safetensors_files.SafetensorsError, match="has neither"):
        safetensors_files.Folder(tmp_path)
    name = "model-00001-of-00002.safetensors"
    safetensors_files.write(tmp_path / name, {"x": np.zeros(1, np.float32)})
    with pytest.raises(safetensors_files.SafetensorsError, match="add the index"):
        safetensors_files.Folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"x": "a.safetensors", "y": "b.safetensors"}, "1 are not there: b.saf"),
        ({"x": "a.safetensors", "y": "a.safetensors"}, "1 tensors that their file"),
    ],
)
def test_an_index_that_promises_too_much_is_an_error(tmp_path, weight_map, text):
    safetensors_files.write(tmp_path / "a.safetensors", {"x": np.zeros(1, np.float32)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(safetensors_files.SafetensorsError, match=text):
        safetensors_files.Folder(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors_files.write(path, {"x": np.zeros(100, np.float32)})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(safetensors_files.SafetensorsError, match="damaged"):
        safetensors_files.Folder(tmp_path)
