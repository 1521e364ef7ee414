import peft
import pytest

from models import llama
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import peft_configs
from mtuner_jax.configs import LoraConfig
from tests import tiny

CONTENT = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def test_what_peft_writes_is_read(tmp_path):
    theirs = peft.LoraConfig(
        r=8,
        lora_alpha=12,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        use_rslora=True,
        task_type="CAUSAL_LM",
        rank_pattern={"v_proj": 4},
        alpha_pattern={"q_proj": 3},
    )
    ours = peft_configs.from_peft(theirs.to_dict())
    assert (ours.r, ours.lora_alpha, ours.lora_dropout) == (8, 12.0, 0.1)
    assert sorted(ours.target_modules) == ["q_proj", "v_proj"]
    assert ours.use_rslora
    assert (ours.rank_pattern, ours.alpha_pattern) == ({"v_proj": 4}, {"q_proj": 3.0})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not implemented"),
        ({"use_dora": True}, "use_dora=True is not implemented"),
        ({"bias": "all"}, "bias='all' is not implemented"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": "8"}, "r='8' is no number"),
        ({"lora_alpha": None}, "lora_alpha=None is no number"),
        ({"target_modules": None}, "lacks r or target_modules"),
    ],
)
def test_what_would_change_the_result_is_refused(changes, text):
    with pytest.raises(peft_configs.PeftConfigError, match=text):
        peft_configs.from_peft(CONTENT | changes)


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        (".*self_attn.*", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (".*mlp.*", ["gate_proj", "up_proj", "down_proj"]),
        (".*(q_proj|lm_head)", ["q_proj"]),
        (
            r".*\.[02]\.self_attn\.q_proj",
            ["model.layers.0.self_attn.q_proj", "model.layers.2.self_attn.q_proj"],
        ),
    ],
)
def test_a_regular_expression_is_written_as_the_modules_that_are_trained(pattern, want):
    config = LoraConfig(r=4, target_modules=pattern)
    linears = llama.Llama(tiny.CONFIG).linears()
    specs = lora.resolve(config, linears, num_layers=tiny.CONFIG.num_layers)
    content = peft_configs.to_peft(config, specs, base_name="base")
    assert content["target_modules"] == want
    again = peft_configs.from_peft(content)
    assert lora.resolve(again, linears, num_layers=tiny.CONFIG.num_layers) == specs
