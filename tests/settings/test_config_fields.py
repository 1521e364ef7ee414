import pathlib
import runpy

import mtuner_jax
from mtuner_jax import configs
from mtuner_jax.settings import config_fields

ROOT = pathlib.Path(mtuner_jax.__file__).parent.parent


def test_fields_are_dotted_and_carry_type_default_and_text():
    fields = config_fields.of(configs.RunConfig)
    rank = fields["lora.r"]
    assert (rank.type, rank.default, rank.group) == (int, 16, "lora")
    assert rank.text == "Rank of the update; adapters are A [in, r] and B [r, out]."
    assert "lora" not in fields


def test_texts_of_base_classes_and_of_several_lines_are_found():
    fields = config_fields.of(configs.RunConfig)
    assert fields["warmup_steps"].text.endswith("it is a share of all steps.")
    assert "per_device_train_batch_size x" in fields["global_batch_size"].text


def test_types_read_as_a_user_thinks_of_them():
    fields = config_fields.of(configs.RunConfig)
    names = {
        name: config_fields.type_name(field.type) for name, field in fields.items()
    }
    assert names["learning_rate"] == "float"
    assert names["platform"] == "auto | cpu | gpu"
    assert names["lora.target_modules"] == "str or list of str"
    assert names["lora.rank_pattern"] == "map of str to int"


def test_help_names_every_field_with_its_default():
    text = config_fields.help_text(configs.RunConfig)
    for name, field in config_fields.of(configs.RunConfig).items():
        assert f"--{name} (" in text
        assert field.text[:40] in text
    assert "--learning_rate (float; 0.0002)" in text


def test_configuration_page_is_what_the_dataclasses_say():
    script = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script["text"](), "run scripts/config_reference.py"
