"""`scripts/train.py` as a user runs it, in processes of its own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mtuner_jax.inspection import compile_only
from tests.data import chat_tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS = 6
SETTINGS = {
    "max_length": 64,
    "global_batch_size": 8,
    "max_steps": STEPS,
    "learning_rate": "1e-2",
    "lr_scheduler_type": "constant",
    "lora.r": 4,
    "lora.lora_dropout": 0.1,
    "lora.use_rslora": "true",
    "val_size": 5,
    "eval_on_start": "true",
    "save_steps": 3,
    "report_to": "none",
    "mesh": "pcie8",
    "verify_plan": "false",
}
WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A folder with a tiny Hugging Face model, its tokenizer and a dataset."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("workshop")
    tokenizer = chat_tokenizers.chatml()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(60):
        words = list(rng.choice(WORDS, rng.integers(2, 6)))
        messages = [
            {"role": "user", "content": " ".join(words)},
            {"role": "assistant", "content": " ".join(reversed(words))},
        ]
        lines.append(json.dumps({"messages": messages}))
    (root / "data.jsonl").write_text("\n".join(lines))
    return root


def train(workshop, name, **changes):
    """Runs train.py in a process of its own; returns the finished process."""
    settings = {**SETTINGS, **changes}
    flags = [f"--{key}={value}" for key, value in settings.items()]
    command = [
        sys.executable,
        str(ROOT / "scripts/train.py"),
        f"--model={workshop / 'model'}",
        f"--dataset.path={workshop / 'data.jsonl'}",
        f"--output_dir={workshop / name}",
        *flags,
    ]
    environment = {**os.environ, "MTUNER_CACHE_DIR": str(workshop / "cache")}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
    )


def succeed(process):
    assert process.returncode == 0, process.stdout + process.stderr


def records(workshop, name):
    lines = (workshop / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def curve(workshop, name):
    """(step, loss, grad_norm, lr, tokens) of each step."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "epoch")
    return [
        tuple(record[key] for key in keys)
        for record in records(workshop, name)
        if "loss" in record
    ]


@pytest.fixture(scope="module")
def whole(workshop):
    """A run that was never stopped, its plan checked by compiling if possible."""
    succeed(train(workshop, "whole", verify_plan="true"))
    return "whole"


def test_a_run_leaves_what_it_says(workshop, whole):
    run = workshop / whole
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.yaml",
        "run_info.json",
        "metrics.jsonl",
        "train.log",
        "plan.json",
        "timeline.json",
        "training_loss.png",
        "checkpoints",
        "adapter",
    }
    losses = [loss for _, loss, *_ in curve(workshop, whole)]
    assert len(losses) == STEPS
    assert losses[-1] < 0.9 * losses[0]
    log = (run / "train.log").read_text()
    assert "no accelerator found: mesh pcie8 runs on 8 virtual CPU devices" in log
    assert "trainable of" in log
    assert "plans compared in" in log
    checked = "predicted, " if compile_only.available() else "memory was not checked"
    assert checked in log
    assert f"{STEPS} steps, loss" in log
    for step in (3, STEPS):
        assert (run / f"checkpoints/{step}/adapter/adapter_model.safetensors").is_file()


@pytest.fixture(scope="module")
def stopped(workshop):
    """A run that ended after three steps."""
    succeed(train(workshop, "stopped", max_steps=3))
    return workshop / "stopped"


def resumed_copy(workshop, stopped, name, **changes):
    shutil.copytree(stopped, workshop / name)
    process = train(workshop, name, **changes)
    succeed(process)
    assert "resumed from" in process.stderr
    return name


def test_stop_and_resume_in_a_new_process_changes_no_bit(workshop, whole, stopped):
    name = resumed_copy(workshop, stopped, "resumed")
    assert curve(workshop, name) == curve(workshop, whole)
    adapters = [
        (workshop / run / "adapter/adapter_model.safetensors").read_bytes()
        for run in (name, whole)
    ]
    assert adapters[0] == adapters[1]


def test_resume_on_fewer_devices_goes_on_along_the_same_curve(workshop, whole, stopped):
    name = resumed_copy(workshop, stopped, "fewer", mesh="4", plan="replicated")
    got, want = (
        [loss for _, loss, *_ in curve(workshop, run)] for run in (name, whole)
    )
    assert np.linalg.norm(np.subtract(got, want)) <= 1e-5 * np.linalg.norm(want)


def test_a_finished_run_says_so(workshop, whole):
    again = train(workshop, whole)
    succeed(again)
    assert "is finished: step 6 of 6" in again.stderr


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_loads_the_adapter_and_gets_our_evaluation_loss(workshop, whole):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from mtuner_jax import configs
    from mtuner_jax.data import loading
    from mtuner_jax.settings import cli

    config = cli.load_yaml(workshop / whole / "config.yaml", configs.RunConfig)
    tokenizer = transformers.AutoTokenizer.from_pretrained(workshop / whole / "adapter")
    data = loading.load(config, tokenizer, global_batch_size=1)
    base = transformers.AutoModelForCausalLM.from_pretrained(workshop / "model")
    model = peft.PeftModel.from_pretrained(base, workshop / whole / "adapter").eval()
    total, tokens = 0.0, 0.0
    for rows in data.eval:
        segments = rows.segment_ids[0]
        for document in range(1, segments.max() + 1):
            place = segments == document
            ids = torch.tensor(rows.input_ids[0][place][None].astype(np.int64))
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0].double()
            picked = torch.log_softmax(logits, -1).numpy()
            targets = rows.targets[0][place]
            losses = -picked[np.arange(len(targets)), targets]
            total += float((losses * rows.weights[0][place]).sum())
            tokens += float(rows.weights[0][place].sum())
    evaluations = [r for r in records(workshop, whole) if "eval_loss" in r]
    assert [record["step"] for record in evaluations] == [0, STEPS]
    assert evaluations[-1]["eval_tokens"] == tokens
    assert abs(total / tokens - evaluations[-1]["eval_loss"]) <= 1e-5 * total / tokens


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lora.target_modules": "q_proj,v_porj"}, "did you mean 'v_proj'"),
        ({"attention": "cudnn"}, "attention=cudnn cannot be used with"),
        ({"model": "llama2-7b"}, "is a shape without tokenizer and weights"),
        ({"max_length": 4}, "no trained token after truncation"),
    ],
)
def test_bad_settings_end_with_a_clear_error(workshop, changes, text):
    process = train(workshop, "bad", **changes)
    assert process.returncode == 2, process.stderr
    assert text in process.stderr
    assert "Traceback" not in process.stderr


def test_a_loss_that_is_not_finite_ends_the_run_without_an_adapter(workshop):
    process = train(workshop, "exploding", learning_rate="1e30", max_grad_norm=0)
    assert process.returncode == 1, process.stderr
    assert "untouched" in process.stderr
    assert not (workshop / "exploding/adapter").exists()
