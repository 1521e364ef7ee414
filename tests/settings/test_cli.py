import dataclasses
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from mtuner_jax import configs
from mtuner_jax.settings import cli


def parse(*argv):
    return cli.parse(argv, configs.RunConfig, prog="train.py")


@pytest.fixture
def run_yaml(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_nothing_written_gives_the_defaults():
    assert parse() == configs.RunConfig()


def test_flags_win_over_the_file_and_the_file_over_defaults(run_yaml):
    path = run_yaml(
        "learning_rate: 1e-4\nmax_steps: 7\nlora:\n  r: 4\n  lora_alpha: 8\n"
    )
    config = parse("--max_steps", "9", "--config", path, "--lora.r", "16")
    assert config == configs.RunConfig(
        learning_rate=1e-4, max_steps=9, lora=configs.LoraConfig(r=16, lora_alpha=8.0)
    )


def test_dashes_and_underscores_are_the_same():
    config = parse("--learning-rate=1e-3", "--lora.use-rslora", "--random_init")
    assert config.learning_rate == 1e-3
    assert config.lora.use_rslora and config.random_init


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--packing"], True),
        (["--packing=false"], False),
        (["--packing", "false"], False),
    ],
)
def test_booleans_stand_alone_or_with_a_value(argv, value):
    assert parse(*argv, "--seed", "1").packing is value


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["q_proj,v_proj"], ("q_proj", "v_proj")),
        (["[q_proj, v_proj]"], ("q_proj", "v_proj")),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
        (["q_proj"], ("q_proj",)),
        (["all-linear"], "all-linear"),
        (["[qv]_pro[j]"], "[qv]_pro[j]"),
        ([r".*\.[0-9]{1,2}\..*_proj"], r".*\.[0-9]{1,2}\..*_proj"),
    ],
)
def test_target_modules_are_names_a_regex_or_all_linear(argv, value):
    assert parse("--lora.target_modules", *argv).lora.target_modules == value


def test_lists_and_maps_as_flags():
    config = parse("--dataset.path", "a,b", "--lora.rank_pattern", r"{'.*\.q_proj': 8}")
    assert config.dataset.path == ("a", "b")
    assert config.lora.rank_pattern == {r".*\.q_proj": 8}


def test_negative_values_are_values():
    with pytest.raises(configs.ConfigError, match="max_steps=-1 must not be negative"):
        parse("--max_steps", "-1")


def test_aliases_of_older_configs(run_yaml):
    text = "model_name_or_path: /m\nwarmup_ratio: 0.1\ndataset: a.jsonl\nlora: null\n"
    config = parse("--config", run_yaml(text))
    assert config.model == "/m"
    assert config.warmup_steps == 0.1
    assert config.dataset.path == ("a.jsonl",)
    assert parse("--dataset", "a", "b").dataset.path == ("a", "b")


def test_null_in_the_file_is_not_set(run_yaml):
    assert parse("--config", run_yaml("max_steps:\nseed: ~\n")) == configs.RunConfig()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--learning_rat", "1"],
            "unknown setting learning_rat; did you mean learning",
        ),
        (["--lora_r", "1"], r"unknown setting lora_r; write --lora\.r 1$"),
        (["--lora_alfa", "1"], r"did you mean lora\.lora_alpha\?"),
        (["--xyzzy", "1"], "unknown setting xyzzy; --help lists them all"),
        (["--lora", "16"], r"--lora: lora is a group, set one of lora\.r,"),
        (["--learning_rate", "fast"], "learning_rate='fast' is a str, expected float"),
        (["--max_steps"], "--max_steps: its value is missing"),
        (["--max_steps="], "--max_steps: max_steps='' is a str, expected int"),
        (["--mesh", "a", "b"], "--mesh takes one value, found 2: a b"),
        (["run.yaml"], "unexpected argument 'run.yaml': settings are written --NAME"),
        (["--warmup_ratio", "3"], "warmup_ratio=3.0 must be in .* write warmup_steps"),
        (["--lora.r", "0"], "lora.r=0 must be at least 1$"),
        (["--config", "no.yaml"], "--config no.yaml: No such file or directory"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(argv, message):
    with pytest.raises(configs.ConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nlora:\n  rr: 2\n",
            r"run.yaml:3: unknown setting lora\.rr; did you me",
        ),
        (
            "seed: 1\nmax_step:\n",
            r"run.yaml:2: unknown setting max_step; did you mean max",
        ),
        (
            "seed: 1\nmax_steps: soon\n",
            r"run.yaml:2: max_steps='soon' is a str, expected",
        ),
        ("seed: 1\nlora:\n  r: 0\n", r"lora.r=0 .* \(lora.r is set at .*run.yaml:3\)"),
        (
            "model: a\nmodel_name_or_path: b\n",
            "run.yaml:2: .* sets model, which .*yaml:1",
        ),
        ("- a\n", "expected lines such as"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_its_line(run_yaml, text, message):
    with pytest.raises(configs.ConfigError, match=message):
        parse("--config", run_yaml(text))


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes("seed: 1".encode("utf-16"))
    with pytest.raises(configs.ConfigError, match="save it as UTF-8"):
        parse("--config", str(path))


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 5\n")
    assert parse("--config", str(path)).seed == 5


def test_print_config_prints_what_parses_back_and_exits(capsys, run_yaml):
    with pytest.raises(SystemExit) as exited:
        parse("--print_config", "--lora.r", "3")
    assert exited.value.code == 0
    path = run_yaml(capsys.readouterr().out)
    assert cli.load_yaml(path, configs.RunConfig).lora.r == 3


def test_help_prints_every_setting_and_exits(capsys):
    with pytest.raises(SystemExit) as exited:
        parse("--help")
    assert exited.value.code == 0
    assert "--lora.target_modules (str or list of str; all-linear)" in (
        capsys.readouterr().out
    )


def is_expression(text):
    try:
        re.compile(text)
    except (re.error, Warning):
        return False
    return True


texts = st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12)
names = st.text("abc_.-1e[]{}, 'q", min_size=1)
lora_configs = st.builds(
    configs.LoraConfig,
    r=st.integers(1, 512),
    lora_alpha=st.floats(1e-9, 1e9),
    target_modules=names.filter(is_expression) | st.lists(names, min_size=1).map(tuple),
    rank_pattern=st.dictionaries(
        texts.filter(is_expression), st.integers(1, 99), max_size=2
    ),
    alpha_pattern=st.dictionaries(
        texts.filter(is_expression), st.floats(0.1, 99), max_size=2
    ),
)
run_configs = st.builds(
    configs.RunConfig,
    model=texts,
    mesh=names,
    learning_rate=st.floats(1e-12, 1.0),
    platform=st.sampled_from(configs.Platform),
    packing=st.booleans(),
    lora=lora_configs,
    dataset=st.builds(configs.DatasetConfig, path=st.lists(texts).map(tuple)),
)


@hypothesis.given(config=run_configs)
@hypothesis.settings(max_examples=60, deadline=None)
def test_dump_yaml_parses_back_to_an_equal_config(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    path.write_text(cli.dump_yaml(config), encoding="utf-8")
    assert cli.load_yaml(path, configs.RunConfig) == config


def test_other_config_types_parse_the_same_way():
    config = cli.parse(["--learning_rate", "1e-3"], configs.OptimizerConfig)
    assert config == dataclasses.replace(configs.OptimizerConfig(), learning_rate=1e-3)
