import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models import llama, llama_configs, llama_hf_names
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import safetensors_files
from mtuner_jax.ops import tapes
from mtuner_jax.ops.low_rank.operands import LayerAdapters, Lora
from mtuner_jax.protocols.states import Batch

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def tiny_config(**changes):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    return llama_configs.LlamaConfig(**{**sizes, **changes})


def random_tensors(config, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {
        t.name: (rng.standard_normal(t.shape) * 0.1).astype(DTYPES[dtype])
        for t in llama_hf_names.tensors(config)
    }


def write_folder(folder, config, tensors, *, num_files=1):
    """A Hugging Face checkpoint as other tools write it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_configs.to_hf(config)))
    if num_files == 1:
        safetensors_files.write(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = dict(list(tensors.items())[i::num_files])
        safetensors_files.write(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def abstract_tree(config, *, dtype="float32", num_devices=8, table_rows=None):
    """The tree of arrays, rows sharded over every mesh axis, as the engine wants it."""
    sizes = (2, 2, 2) if num_devices == 8 else (num_devices,)
    axes = ("x", "y", "z")[: len(sizes)]
    mesh = jax.make_mesh(
        sizes,
        axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:num_devices],
    )
    tree = {}
    for t in llama_hf_names.tensors(config):
        shape = t.shape[::-1] if t.transposed else t.shape
        if t.padded:
            shape = (table_rows or shape[0], *shape[1:])
        spec = jax.P(axes) if len(shape) == 2 else jax.P()
        if t.layer is not None:
            shape, spec = (config.num_layers, *shape), jax.P(None, *spec)
        node = tree
        for key in t.path[:-1]:
            node = node.setdefault(key, {})
        node[t.path[-1]] = jax.ShapeDtypeStruct(
            shape, DTYPES[dtype], sharding=jax.NamedSharding(mesh, spec)
        )
    return tree


def logits(config, params, ids, *, adapters=None, specs=()):
    """Logits of our own decoder, [B, T, V]."""
    model = llama.Llama(config)
    ones = np.ones_like(ids)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    batch = Batch(ids, ids, ones.astype(np.float32), ones, positions, ones)
    context = model.context(batch)
    scalings = lora.scaling_arrays(specs)
    x_BTD = model.embed(params["embed"]["table"], jnp.asarray(ids))
    for layer in range(config.num_layers):
        loras = {
            module: Lora(
                jnp.asarray(leaf["lora_a"][layer]),
                jnp.asarray(leaf["lora_b"][layer]),
                scalings[module][layer],
            )
            for module, leaf in (adapters or {}).items()
        }
        x_BTD = model.layer(
            jax.tree.map(lambda a, i=layer: a[i], params["layers"]),
            LayerAdapters(loras, None),
            x_BTD,
            context=context,
            tape=tapes.Tape(),
        )
    x_BTD = model.final_norm(params["head"]["norm"], x_BTD)
    table_VD = params["head"].get("table", params["embed"]["table"])
    return np.asarray(x_BTD @ table_VD.T)


@pytest.fixture
def tiny():
    """The helpers above, as one object (test modules cannot import each other)."""

    class Tiny:
        config = staticmethod(tiny_config)
        tensors = staticmethod(random_tensors)
        folder = staticmethod(write_folder)
        abstract = staticmethod(abstract_tree)
        logits = staticmethod(logits)

    return Tiny
