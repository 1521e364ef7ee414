import pytest

from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.devices import meshes
from mtuner_jax.runs import pricing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": "no.json"}, r"plan='no\.json': no such file"),
        ({"hardware": "pcie9"}, r"hardware='pcie9' is unknown \(did you mean pcie8"),
        ({"hardware": "no.json"}, r"hardware='no\.json': no such file"),
    ],
)
def test_a_plan_and_a_machine_are_looked_for_before_the_data(settings, message):
    config = RunConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        pricing.check_named(config, meshes.parse("2"), device_kind="")


def test_a_file_that_is_no_plan_is_named(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="plan"):
        pricing.check_named(
            RunConfig(plan=str(path)), meshes.parse("2"), device_kind=""
        )
