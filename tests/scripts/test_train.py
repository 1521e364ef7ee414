"""What train.py makes of a command before it trains."""

import pytest

from scripts import train


def prepared(*argv):
    config = train.read_config([*argv])
    return train.for_mesh(config, [*argv]) if train.takes_recipe([*argv]) else config


@pytest.mark.parametrize(
    ("mesh", "budget"), [("pcie8", 0.25), ("1", 2.0), ("2", 1.0), ("2x2", 0.5)]
)
def test_the_recipes_memory_budget_is_the_same_on_all_devices_together(
    mesh, budget, caplog
):
    with caplog.at_level("INFO"):
        assert prepared("--mesh", mesh).memory_budget == budget
    assert ("the recipe's 0.25 GiB for 8 devices" in caplog.text) == (budget != 0.25)


def test_a_budget_that_is_asked_for_stays():
    assert prepared("--mesh", "2", "--memory_budget", "0.25").memory_budget == 0.25
    assert prepared("--mesh=2", "--memory-budget=0.25").memory_budget == 0.25


def test_the_recipe_is_for_commands_without_model_data_and_settings(tmp_path):
    settings = tmp_path / "run.yaml"
    settings.write_text("max_steps: 3\n")
    assert prepared("--mesh", "8").memory_budget == 0.25
    assert prepared("--model", "m", "--mesh", "2").memory_budget == 0.0
    assert prepared("--dataset.path", "d.jsonl").max_length == 1024
    assert prepared("--config", str(settings)).memory_budget == 0.0
