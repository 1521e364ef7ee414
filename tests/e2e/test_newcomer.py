"""The way of somebody new: own model, own ShareGPT file, a stop, files for others."""

import json
import signal
import time

import numpy as np
import pytest

from models import llama_family
from mtuner_jax.configs import ExportConfig, GenerateConfig
from mtuner_jax.data import templates
from mtuner_jax.runs import exporting, generating
from tests import tiny_runs

PROMPT = "alpha beta gamma"


def write_sharegpt(path):
    """The rows of the workshop, as ShareGPT has them, as one JSON array."""
    rows = []
    for line in tiny_runs.rows(24):
        user, answer = json.loads(line)["messages"]
        turns = [
            {"from": "human", "value": user["content"]},
            {"from": "gpt", "value": answer["content"]},
        ]
        rows.append({"id": len(rows), "conversations": turns})
    path.write_text(json.dumps(rows, indent=1))
    return path


def wait_for_step(run, process, step):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").is_file() and len(tiny_runs.curve(run)) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate(timeout=5)[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was stopped once and went on, of 40 steps."""
    root = tiny_runs.workshop(tmp_path_factory.mktemp("newcomer"))
    data = write_sharegpt(root / "conversations.json")
    changes = {"dataset.path": data, "max_steps": 40, "save_steps": 0, "val_size": 4}
    process = tiny_runs.start(root, "run", **changes)
    wait_for_step(root / "run", process, 2)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode in (0, 85), errors
    again = tiny_runs.start(root, "run", **changes)
    errors = again.communicate(timeout=200)[1]
    assert again.returncode == 0, errors
    assert "Traceback" not in errors
    assert "a held-out question: " in errors and "with the adapter: " in errors
    return root / "run"


def test_the_run_went_on_where_it_was_stopped(run):
    steps = [step for step, *_ in tiny_runs.curve(run)]
    assert steps == list(range(1, 41))
    losses = [loss for _, loss, *_ in tiny_runs.curve(run)]
    assert losses[-1] < 0.9 * losses[0]
    assert "format sharegpt (found by its columns)" in (run / "train.log").read_text()


def answer_of(**choice):
    config = GenerateConfig(max_new_tokens=12, dtype="float32", **choice)
    answers = generating.answerer(config, llama_family.FAMILY)
    messages = [{"role": "user", "content": PROMPT}]
    return answers.answer(answers.renderer.prompt_ids(messages))


def test_merged_model_and_gguf_answer_as_the_run_and_transformers_does(run, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def export(format, output):
        config = ExportConfig(
            run=str(run), format=format, output=str(output), dtype="fp32"
        )
        return exporting.export(config, llama_family.FAMILY)

    merged = export("merged", tmp_path / "merged")
    gguf = export("gguf", tmp_path / "model.gguf")
    adapter = export("peft", tmp_path / "adapter")
    base = answer_of(model=str(run.parent / "model"))
    want = answer_of(run=str(run))
    assert want != base
    assert answer_of(model=str(merged)) == want
    assert answer_of(model=str(gguf)) == want
    assert answer_of(adapter=str(adapter)) == want

    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    model = transformers.AutoModelForCausalLM.from_pretrained(merged)
    messages = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
        )[0, ids.shape[1] :]
    theirs = tokenizer.decode(found, skip_special_tokens=True)
    assert theirs == want
    assert templates.load_source(tokenizer, "") is not None
    assert np.isfinite(found.numpy()).all()
