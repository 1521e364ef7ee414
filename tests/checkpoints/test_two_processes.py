"""Import when no process sees all devices: two processes on this machine."""

import json
import socket
import subprocess
import sys

import numpy as np

from models import llama_hf_names

PROGRAM = """
import json, pathlib, sys
import jax
import numpy as np

rank, port, folder = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)

from models import llama_configs, llama_hf_names
from mtuner_jax.checkpoints import hf_import, safetensors_files
from tests.checkpoints import conftest

config = llama_configs.from_file(folder / "in" / "config.json")
names = llama_hf_names.tensors(config)
source, read = safetensors_files.Folder(folder / "in"), {}
plain_read = source.read

def recording(name, box):
    part = plain_read(name, box)
    read[name] = part.size
    return part

source.read = recording
abstract = conftest.abstract_tree(config, num_devices=4, table_rows=256)
params = hf_import.load(source, names, abstract)
replicated = jax.NamedSharding(abstract["embed"]["table"].sharding.mesh, jax.P())
whole = jax.jit(lambda tree: tree, out_shardings=replicated)(params)
assert params.keys() == whole.keys()
if rank == 0:
    flat = {jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(whole)}
    np.savez(folder / "whole.npz", **flat)
(folder / f"read-{rank}.json").write_text(json.dumps(read))
"""


def test_each_process_reads_its_part_and_all_of_it_is_there(tiny, tmp_path):
    config = tiny.config(num_layers=2, tie_word_embeddings=True)
    tensors = tiny.tensors(config)
    tiny.folder(tmp_path / "in", config, tensors, num_files=2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors
    for rank in range(2):
        read = json.loads((tmp_path / f"read-{rank}.json").read_text())
        for name, x in tensors.items():
            share = x.size // 2 if x.ndim == 2 else x.size
            if "embed" in name:  # padded from 96 to 256 rows: all are on process 0
                share = (x.shape[0] if rank == 0 else 1) * x.shape[1]
            assert read[name] == share, name
    with np.load(tmp_path / "whole.npz") as whole:
        for name in llama_hf_names.tensors(config):
            got = whole["".join(f"['{key}']" for key in name.path)]
            got = got if name.layer is None else got[name.layer]
            got = got.T if name.transposed else got
            want = tensors[name.name]
            np.testing.assert_array_equal(got[: len(want)], want)
