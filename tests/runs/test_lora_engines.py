import pytest

from mtuner_jax.configs import RunConfig
from mtuner_jax.runs import lora_engines


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ({}, False),
        ({"mesh": "2"}, False),
        ({"mesh": "2x2x2"}, False),
        ({"mesh": "pcie8"}, True),
        ({"mesh": "2", "hardware": "h200x2"}, True),
    ],
)
def test_prices_of_cards_are_for_runs_that_name_a_machine(settings, asks):
    assert lora_engines._asks_for_prices(RunConfig(**settings)) == asks
