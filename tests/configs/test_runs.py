import pytest

from mtuner_jax.configs import ConfigError, LoraConfig, RunConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"adam_beta1": 1.0}, r"adam_beta1=1.0 must be in \[0, 1\)"),
        ({"adam_beta2": 2.0}, r"adam_beta2=2.0 must be in \[0, 1\)"),
        ({"adam_epsilon": -1.0}, "adam_epsilon=-1.0 must be above 0"),
        ({"weight_decay": -5.0}, "weight_decay=-5.0 must not be negative"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be above 0"),
        ({"seed": -1}, r"seed=-1 must be in \[0, 4294967296\)"),
        ({"seed": 2**32}, "seed=4294967296 must be in"),
        ({"val_size": 2.5}, "val_size=2.5: a whole number of samples, or a share"),
        ({"plan": "fspd"}, r"plan='fspd' \(did you mean fsdp\?\): one of auto, fsdp"),
        ({"plan": "plan.txt"}, "plan='plan.txt': one of .*, a .json file"),
        ({"attention": "flex"}, "attention='flex': one of auto, xla, cudnn"),
        ({"dtype": "bfloat"}, r"dtype='bfloat' \(did you mean bfloat16\?\)"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_range(setting, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lora_alpha": 0.0}, r"lora\.lora_alpha=0.0 must be above 0"),
        ({"alpha_pattern": {"q_proj": -1.0}}, r"alpha_pattern\['q_proj'\]=-1.0 must"),
        ({"lora_dropout": 1.0}, r"lora\.lora_dropout=1.0 must be in \[0, 1\)"),
        ({"target_modules": ".*(q_proj"}, "no regular expression: missing \\)"),
        ({"rank_pattern": {"*": 4}}, r"lora\.rank_pattern='\*' is no regular expr"),
        ({"alpha_pattern": {"[": 4.0}}, r"lora\.alpha_pattern='\[' is no regular"),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_the_setting(setting, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**setting)


def test_the_ends_of_the_ranges_are_allowed():
    RunConfig(adam_beta1=0.0, adam_beta2=0.0, weight_decay=0.0, seed=2**32 - 1)
    RunConfig(val_size=3.0, plan="mine.json", lora=LoraConfig(lora_dropout=0.0))
