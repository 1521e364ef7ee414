import math

import pytest

from models import llama_family, llama_sizes
from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.runs import requests


def resolve(name, lora_config):
    request = requests.StepRequest(
        name=name,
        mesh=meshes.parse("pcie8"),
        global_batch_size=8,
        max_length=64,
        lora=lora_config,
        attention="xla",
    )
    return requests.resolve(llama_family.FAMILY.named()[name], request)


@pytest.mark.parametrize("name", llama_sizes.SIZES)
def test_workload_has_the_models_sizes(name):
    config = llama_sizes.SIZES[name]
    resolved = resolve(name, LoraConfig(r=8, target_modules=("q_proj", "down_proj")))
    workload, model = resolved.workload, resolved.decoder
    layer = workload.layer_weight_bytes // 2 + workload.replicated_layer_weights
    tables = (1 if config.tie_word_embeddings else 2) * workload.table_bytes // 2
    total = config.num_layers * layer + tables + config.hidden_size
    assert total == model.num_parameters
    shapes = model.shapes()["layers"]
    leaves = [math.prod(s[1:]) for leaf in shapes.values() for s in leaf.values()]
    assert layer == sum(leaves)
    assert workload.num_adapter_weights == lora.num_parameters(resolved.adapters)
    assert workload.intermediate_size == config.intermediate_size
    assert workload.shape_name.endswith(" tied") == config.tie_word_embeddings


def test_shapes_tell_models_of_as_many_layers_apart():
    names = {
        name: resolve(name, LoraConfig()).workload.shape_name
        for name in ("llama2-7b", "llama3.1-8b")
    }
    assert names == {
        "llama2-7b": "L32 D4096 F11008 N32 K32 H128 V32000",
        "llama3.1-8b": "L32 D4096 F14336 N32 K8 H128 V128256",
    }


def test_answers_while_training_have_their_room_beside_the_step():
    machine = machines.find("h200x1", mesh_sizes=(1,))
    all_of_it, copy = machine.budget_bytes, 14 * 2**30
    assert requests.budget_bytes(machine, 0) == all_of_it
    assert requests.budget_bytes(machine, 0, answers_bytes=copy) == all_of_it - copy
    most = (all_of_it - copy) / 2**30
    assert requests.budget_bytes(machine, 80, answers_bytes=copy) == 80 * 2**30
    for budget, taken in ((most + 1, copy), (0, all_of_it)):
        with pytest.raises(ConfigError, match=r"a copy of the base .* leaves"):
            requests.budget_bytes(machine, budget, answers_bytes=taken)


def test_a_step_of_more_rows_than_the_data_has_is_bounded():
    requests.check_rows(48, 48, num_devices=1)
    requests.check_rows(8, 3, num_devices=8)  # every device has to take one
    requests.check_rows(64, 48, num_devices=8)  # which the data's summary warns of
    text = r"a step takes 100,000 rows, .* has 48: .* set global_batch_size to 48 or"
    with pytest.raises(ConfigError, match=text):
        requests.check_rows(100_000, 48, num_devices=8)
