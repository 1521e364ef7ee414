"""A tiny model with tokenizer and data on disk, and runs of it, here or elsewhere."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from models import llama_configs, llama_family, llama_hf_names
from mtuner_jax import configs
from mtuner_jax.checkpoints import safetensors_files
from mtuner_jax.runs import lora
from mtuner_jax.settings import cli
from tests.data import chat_tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
SETTINGS = {
    "max_length": 64,
    "global_batch_size": 2,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "lora.r": 2,
    "save_steps": 1,
    "report_to": "none",
    "plot_loss": "false",
    "platform": "cpu",
    "mesh": "1",
    "plan": "replicated",
    "verify_plan": "false",
}


def rows(count, *, seed=0):
    """Lines of JSONL: words and the same words backwards."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        words = list(rng.choice(WORDS, rng.integers(2, 6)))
        messages = [
            {"role": "user", "content": " ".join(words)},
            {"role": "assistant", "content": " ".join(reversed(words))},
        ]
        lines.append(json.dumps({"messages": messages}))
    return lines


def write_model(folder, *, seed=0, zero=()):
    """A Hugging Face folder; the tensors whose names hold one of `zero` are zero."""
    tokenizer = chat_tokenizers.chatml()
    config = llama_configs.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    rng = np.random.default_rng(seed)
    tensors = {
        tensor.name: np.ones(tensor.shape, np.float32)
        if "norm" in tensor.name
        else (0.2 * rng.standard_normal(tensor.shape)).astype(np.float32)
        * (not any(part in tensor.name for part in zero))
        for tensor in llama_hf_names.tensors(config)
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_configs.to_hf(config)))
    safetensors_files.write(folder / "model.safetensors", tensors)
    tokenizer.save_pretrained(folder)
    return folder


def workshop(root):
    """A folder with `model` and `data.jsonl`."""
    write_model(root / "model")
    (root / "data.jsonl").write_text("\n".join(rows(12)) + "\n")
    return root


def flags(root, name, **changes):
    """train.py's arguments for the run `name` in a workshop."""
    settings = {
        "model": root / "model",
        "dataset.path": root / "data.jsonl",
        "output_dir": root / name,
        **SETTINGS,
        **changes,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def start(root, name, **changes):
    """train.py in a process of its own."""
    command = [sys.executable, str(ROOT / "scripts/train.py")]
    cache = {"MTUNER_CACHE_DIR": str(root / "cache")}
    return subprocess.Popen(
        [*command, *flags(root, name, **changes)],
        env={**os.environ, **cache},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def curve(run):
    """(step, loss, grad_norm, tokens) of each step of a run's folder."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    keys = ("step", "loss", "grad_norm", "tokens")
    return [
        tuple(record[key] for key in keys)
        for record in map(json.loads, lines)
        if "loss" in record
    ]


def contents(folder):
    """Every file below a folder with its bytes and its time."""
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def train(root, name, **changes):
    """The same in this process; returns the exit code."""
    argv = flags(root, name, **changes)
    config = cli.parse(argv, configs.RunConfig, prog="train.py", description="")
    return lora.train(config, llama_family.FAMILY, argv=argv)
