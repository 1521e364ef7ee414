import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from scripts import bench
from scripts.benchmarks import bench_configs, step_benches

FLAGS = ["--random_init", "--model", "smollm2-135m"]


def test_flags_put_a_plan_together():
    config = bench_configs.parse(
        [
            *(*FLAGS, "--saved", "layer_input", "--rest_axes", "1"),
            *("--kept_layers", "2", "--bwd_keep_axes", "2"),
            *("--tail_layers", "1", "--tail_chunks", "2"),
        ]
    )
    static = plans.static(
        name="fsdp",
        num_layers=4,
        mesh_sizes=(2, 2),
        rows=(2, 1),
        saved=config.saved,
    )
    plan = step_benches.with_keeps(static, config)
    found = [
        (part.num_layers, part.rest_axes, part.fwd_keep_axes, part.bwd_keep_axes)
        for part in plan.segments
    ]
    assert found == [(2, 1, 1, 2), (1, 0, 0, 0), (1, 0, 0, 0)]
    assert (plan.tail_layers, plan.tail_chunks) == (1, 2)
    assert {part.saved for part in plan.segments} == {plans.Saved.LAYER_INPUT}


def test_cases_add_their_flags_to_the_commands(tmp_path):
    path = tmp_path / "cases.txt"
    path.write_text("--plan replicated\n# no case\n\n--xla a=1,b=c --trace\n")
    cases = bench.read_cases([*FLAGS, "--cases", str(path)])
    configs = [bench_configs.parse(case) for case in cases]
    assert [config.plan for config in configs] == ["replicated", "fsdp"]
    assert (configs[1].xla, configs[1].trace) == (("a=1", "b=c"), True)


def test_weights_that_are_not_said_to_be_random_are_refused():
    with pytest.raises(ConfigError, match="random_init=False: weights are random"):
        bench_configs.parse(["--model", "llama2-7b"])
    with pytest.raises(ConfigError, match="xla='a': name=value"):
        bench_configs.parse([*FLAGS, "--xla", "a"])
