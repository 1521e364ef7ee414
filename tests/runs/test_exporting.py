import json
import logging

import pytest

from models import llama_family
from mtuner_jax.configs import ConfigError, ExportConfig, GenerateConfig, UserError
from mtuner_jax.runs import exporting, generating
from tests import tiny_runs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A workshop with a run of three steps that answers every second one."""
    root = tiny_runs.workshop(tmp_path_factory.mktemp("exporting"))
    code = tiny_runs.train(
        root,
        "run",
        max_steps=3,
        val_size=2,
        generation_steps=2,
        generation_prompts="alpha beta,gamma",
        generation_max_new_tokens=6,
        **{"lora.rank_pattern": "{q_proj: 4}"},
    )
    assert code == 0
    return root


def export(root, output, **changes):
    config = ExportConfig(output=str(output), **{"run": str(root / "run"), **changes})
    return exporting.export(config, llama_family.FAMILY)


def test_answers_while_training_are_in_the_runs_folder(root):
    lines = (root / "run" / "samples.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [(r["step"], r["prompt"]) for r in records] == [
        (2, "alpha beta"),
        (2, "gamma"),
    ]
    assert all(isinstance(record["text"], str) for record in records)


def test_prompts_are_texts_lines_or_messages(root, tmp_path):
    file = tmp_path / "prompts.jsonl"
    chat = [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "left out"},
    ]
    file.write_text(f'a\n\n{json.dumps({"messages": chat})}\n{{"prompt": "c"}}\n')
    config = GenerateConfig(prompt=("x",), prompts=str(file), system="s")
    got = generating.conversations(config)
    assert [[m["content"] for m in messages] for messages in got] == [
        ["s", "x"],
        ["s", "a"],
        ["s", "b"],
        ["s", "c"],
    ]
    file.write_text('{"text": 1}\n')
    with pytest.raises(ConfigError, match=r"jsonl:1: neither messages nor prompt"):
        generating.conversations(config)


def test_a_talk_remembers_what_was_said(root):
    config = GenerateConfig(run=str(root / "run"), max_new_tokens=5)
    answers = generating.answerer(config, llama_family.FAMILY)
    asked = iter(["alpha", "", "beta"])
    said = []

    def ask():
        try:
            return next(asked)
        except StopIteration:
            raise EOFError from None

    generating.talk(config, answers, ask=ask, say=said.append)
    first, second = "".join(said).split("\n")[:2]
    prompt = answers.renderer.prompt_ids([{"role": "user", "content": "alpha"}])
    assert answers.answer(prompt) == first
    messages = [
        {"role": "user", "content": "alpha"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "beta"},
    ]
    assert answers.answer(answers.renderer.prompt_ids(messages)) == second


def test_readers_without_patterns_are_told_and_served(root, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        export(root, tmp_path / "own", format="peft")
    assert "PEFT reads it rightly, vLLM and llama.cpp scale it wrongly" in caplog.text
    export(root, tmp_path / "all", format="peft", readers="all", dtype="bf16")
    content = json.loads((tmp_path / "all" / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["rank_pattern"]) == (4, 4, {})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "nowhere"}, "no run's folder, it has no config.yaml"),
        ({"checkpoint": 7}, "no adapter in .*7/adapter; checkpoints: 1, 2, 3; choose"),
        (
            {"run": "", "adapter": "nowhere"},
            "adapter='nowhere': no adapter_config.json",
        ),
        ({"run": "", "format": "peft", "model": "MODEL"}, "give run or adapter"),
        ({"format": "merged", "dtype": "q8_0"}, "dtype='q8_0': one of .* for merged"),
        ({"format": "gguf", "output": "FILE"}, "is a file; choose another output"),
        ({"output": "MODEL"}, "holds files that are not of an earlier export"),
    ],
)
def test_what_cannot_be_exported_is_told(root, tmp_path, changes, text):
    file = tmp_path / "used.gguf"
    file.write_text("")
    (root / "model" / "notes.txt").write_text("mine")
    named = {"MODEL": str(root / "model"), "FILE": str(file)}
    changes = {key: named.get(value, value) for key, value in changes.items()}
    output = changes.pop("output", tmp_path / "out")
    with pytest.raises(UserError, match=text):
        export(root, output, **changes)


def test_wrong_choices_are_refused():
    for settings, text in (
        ({"format": "onnx"}, "format='onnx'"),
        ({"output": ""}, "output is empty"),
        ({"max_shard_size": "5"}, "max_shard_size='5'"),
        ({"run": "a", "adapter": "b"}, "give one of them"),
        ({"checkpoint": 3}, "give run, too"),
    ):
        with pytest.raises(ConfigError, match=text):
            ExportConfig(**{"output": "o", **settings})
    with pytest.raises(ConfigError, match="top_p=0"):
        GenerateConfig(top_p=0.0)
