import pytest
import yaml

from mtuner_jax import configs
from mtuner_jax.settings import yaml_nodes


def read(text):
    node = yaml_nodes.compose(text, source="run.yaml")
    return yaml_nodes.plain(node)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("2e-5", 2e-5),
        ("1e4", 1e4),
        ("+.5", 0.5),
        (".inf", float("inf")),
        ("12", 12),
        ("0x10", 16),
        ("0o17", 15),
        ("no", "no"),
        ("on", "on"),
        ("12:30:00", "12:30:00"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("true", True),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text, value):
    got = read(text)
    assert got == value
    assert type(got) is type(value)


def test_a_key_that_stands_twice_is_an_error_with_both_lines():
    with pytest.raises(
        configs.ConfigError, match=r"run.yaml:3: 'a' stands already at run.yaml:1"
    ):
        read("a: 1\nb: 2\na: 3\n")


def test_broken_yaml_is_an_error_with_file_and_line():
    with pytest.raises(configs.ConfigError, match=r"run.yaml:3: not valid YAML"):
        read("a: 1\nb: [1, 2\n")


def test_tags_outside_the_core_schema_are_refused():
    with pytest.raises(configs.ConfigError, match=r"run.yaml:1: the tag !env is not"):
        read("a: !env HOME")


def test_dump_reads_back_equal_under_yaml_1_2_and_1_1():
    tree = {
        "number": 1e-08,
        "text": ["1e-4", "no", "on", "", "2x2x2", "12:30", "a: b", "# x", "null"],
        "map": {r".*\.q_proj": 8},
        "flag": True,
        "quoted": yaml_nodes.Quoted("q_proj"),
    }
    text = yaml_nodes.dump(tree)
    assert read(text) == tree
    assert yaml.safe_load(text) == tree
    assert 'quoted: "q_proj"' in text
