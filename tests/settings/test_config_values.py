import pytest

from mtuner_jax import configs
from mtuner_jax.settings import config_values, yaml_nodes

NAMES = str | tuple[str, ...]


def parse(kind, text, name="field"):
    return config_values.parse(name, kind, yaml_nodes.compose(text, source="run.yaml"))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (float, "1e-4", 1e-4),
        (float, "3", 3.0),
        (int, "20", 20),
        (bool, "false", False),
        (str, "no", "no"),
        (str, "8", "8"),
        (str, "1e-4", "1e-4"),
        (configs.Platform, "cpu", configs.Platform.CPU),
        (tuple[str, ...], "a.jsonl", ("a.jsonl",)),
        (tuple[str, ...], "[a, b]", ("a", "b")),
        (dict[str, int], "{'.*q_proj': 8}", {".*q_proj": 8}),
        (dict[str, float], "{q: 8}", {"q": 8.0}),
        (NAMES, "[q_proj, v_proj]", ("q_proj", "v_proj")),
        (NAMES, "q_proj, v_proj", ("q_proj", "v_proj")),
        (NAMES, "q_proj", ("q_proj",)),
        (NAMES, "'q_proj'", "q_proj"),
        (NAMES, "all-linear", "all-linear"),
        (NAMES, r".*layers\.[0-9]+\.(q|v)_proj", r".*layers\.[0-9]+\.(q|v)_proj"),
    ],
)
def test_values_take_the_type_of_their_field(kind, text, value):
    got = parse(kind, text)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (float, "fast", r"run.yaml:1: field='fast' is a str, expected float"),
        (float, "'1e-4'", r"field='1e-4' is a str, expected float"),
        (float, "true", r"field='true' is a bool, expected float"),
        (float, ".nan", r"field='.nan' is a float, expected float; it must be finite"),
        (int, "1e3", r"field='1e3' is a float, expected int; write 1000"),
        (int, "2.5", r"field='2.5' is a float, expected int$"),
        (int, "[1]", r"field=\[1\] is a list, expected int"),
        (bool, "no", r"field='no' is a str, expected bool; write true or false"),
        (str, "false", r"field='false' is a bool, expected str; put it in quotes"),
        (configs.Platform, "tpu", r"field='tpu' is not one of auto \| cpu \| gpu"),
        (tuple[str, ...], "{a: 1}", r"is a dict, expected list of str"),
        (tuple[str, ...], "[a, [b]]", r"field\[1\]=\['b'\] is a list, expected str"),
        (dict[str, int], "{q: x}", r"field\['q'\]='x' is a str, expected int"),
        (dict[str, int], "8", r"field='8' is an int, expected map of str to int"),
    ],
)
def test_wrong_types_name_field_value_and_both_types(kind, text, message):
    with pytest.raises(configs.ConfigError, match=message):
        parse(kind, text)
