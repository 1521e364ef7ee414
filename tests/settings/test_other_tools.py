"""Files of Axolotl, LLaMA-Factory and TRL, pasted as they are."""

import pytest

from mtuner_jax import configs
from mtuner_jax.settings import cli, config_fields, other_tools

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
load_in_8bit: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
"""
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
template: llama3
cutoff_len: 2048
output_dir: saves/llama3-8b/lora/sft
per_device_train_batch_size: 1
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
TRL = """\
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
max_seq_length: 4096
use_peft: true
lora_r: 32
lora_alpha: 16
attn_implementation: flash_attention_2
eval_strategy: steps
eval_steps: 100
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            AXOLOTL,
            [
                "15 of 17 settings are unknown",
                ":1: unknown setting base_model; write model: NousResearch",
                "unknown setting load_in_8bit; remove it: weights are kept in dtype",
                "unknown setting datasets; write dataset.path",
                ":6: unknown setting val_set_size; write val_size: 0.1",
                "unknown setting adapter; remove it: every run is supervised LoRA",
                "unknown setting sequence_len; write max_length: 2048",
                "unknown setting sample_packing; write packing: true",
                "unknown setting lora_r; write lora.r: 16",
                "unknown setting lora_target_linear; write lora.target_modules: all",
                "unknown setting micro_batch_size; write per_device_train_batch_siz",
                "unknown setting num_epochs; write num_train_epochs: 1",
                "unknown setting optimizer; remove it: AdamW is the one optimizer",
                "unknown setting lr_scheduler; write lr_scheduler_type: cosine",
                "unknown setting bf16; write dtype: auto",
            ],
        ),
        (
            LLAMA_FACTORY,
            [
                "8 of 13 settings are unknown",
                "unknown setting stage; remove it: every run is supervised LoRA",
                "unknown setting lora_rank; write lora.r: 8",
                "unknown setting lora_target; write lora.target_modules: all-linear",
                "unknown setting template; write dataset.chat_template",
                "unknown setting cutoff_len; write max_length: 2048",
                "unknown setting bf16; write dtype: bfloat16",
            ],
        ),
        (
            TRL,
            [
                "7 of 10 settings are unknown",
                "unknown setting dataset_name; write dataset.path: trl-lib/Capybara",
                "unknown setting max_seq_length; write max_length: 4096",
                "unknown setting attn_implementation; remove it: attention: auto",
                "unknown setting eval_strategy; write eval_steps, in optimizer steps",
            ],
        ),
    ],
    ids=["axolotl", "llama-factory", "trl"],
)
def test_all_unknown_keys_of_a_pasted_file_are_told_with_our_names(
    tmp_path, text, lines
):
    path = tmp_path / "pasted.yaml"
    path.write_text(text)
    with pytest.raises(configs.ConfigError) as refused:
        cli.parse(["--config", str(path)], configs.RunConfig)
    told = str(refused.value)
    assert [line for line in lines if line not in told] == [], told
    assert len(told.splitlines()) == 1 + int(lines[0].partition(" ")[0])


def test_all_unknown_flags_are_told_at_once():
    argv = ["--lora_r", "8", "--learning_rte", "1", "--seed", "3", "--xyzzy", "1", "2"]
    with pytest.raises(configs.ConfigError) as refused:
        cli.parse(argv, configs.RunConfig)
    assert str(refused.value).splitlines() == [
        "the command line: 3 of 4 settings are unknown",
        "  --lora_r: unknown setting lora_r; write --lora.r 8",
        "  --learning_rte: unknown setting learning_rte; did you mean learning_rate?",
        "  --xyzzy: unknown setting xyzzy; --help lists them all",
    ]


def test_every_name_that_is_offered_is_a_setting():
    known = config_fields.of(configs.RunConfig).keys()
    offered = {*other_tools.SAME.values()}
    offered |= {name for name, _ in other_tools.CHANGED.values()}
    assert offered <= known


def test_a_changed_value_is_one_that_the_setting_takes():
    for name, value in other_tools.CHANGED.values():
        cli.parse([f"--{name}", value], configs.RunConfig)
