import dataclasses
import json
import math
import re

import jax
import pytest

from models import llama_configs, llama_family
from mtuner_jax.configs import LoraConfig, PlanConfig
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.inspection import compile_only
from mtuner_jax.planning import plans
from mtuner_jax.runs import requests
from scripts import plan

TINY = llama_configs.LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
SMALL_STEP = ("--mesh", "pcie8", "--max_length", "512", "--global_batch_size", "16")


@pytest.fixture
def folder(tmp_path):
    """A local Hugging Face folder without weights."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(llama_configs.to_hf(TINY)))
    return path


def run(*flags):
    return plan.main([str(flag) for flag in flags])


def request(**changes):
    settings = {
        "name": "tiny",
        "mesh": meshes.parse("pcie8"),
        "global_batch_size": 16,
        "max_length": 512,
    }
    return requests.StepRequest(**{**settings, **changes})


def static_file(path, **changes):
    """A plan's file for the tiny model; nothing kept, unless told."""
    settings = {
        "name": "fsdp",
        "num_layers": TINY.num_layers,
        "mesh_sizes": (2, 2, 2),
        "rows": (2, 1),
        **changes,
    }
    path.write_text(plans.to_json(plans.static(**settings)))
    return path


def test_table_json_and_plan_file_tell_the_same(folder, tmp_path, capsys):
    found, data = tmp_path / "plan.json", tmp_path / "all.json"
    flags = ("--model", folder, *SMALL_STEP, "--output", found, "--json", data)
    assert run(*flags) == 0
    table = capsys.readouterr().out
    content = json.loads(data.read_text())
    made = plans.read(found)
    assert content["plan"] == json.loads(plans.to_json(made))
    assert (made.num_layers, made.rows) == (TINY.num_layers, 16)
    assert plans.table(made) in table
    assert content["hardware"] == "pcie8"
    kinds = {k: v for k, v in content["forecast"].items() if k != "total"}
    assert sum(kinds.values()) == content["forecast"]["total"]
    assert content["forecast"]["total"] <= content["budget_bytes"]
    fitting = [static["step_s"] for static in content["statics"] if static["fits"]]
    assert math.isclose(content["gain"], min(fitting) / content["timeline"]["step_s"])
    assert content["gain"] >= 1
    assert f"gain {content['gain']:.2f}x" in table


def test_json_to_the_standard_output_is_all_of_it(folder, capsys):
    assert run("--model", folder, *SMALL_STEP, "--json", "-") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["workload"]["num_layers"] == TINY.num_layers


def test_a_plan_of_a_file_has_the_price_that_it_had_when_searched(folder, tmp_path):
    found = tmp_path / "plan.json"
    contents = []
    for flags in (("--output", found), ("--plan", found)):
        data = tmp_path / "all.json"
        assert run("--model", folder, *SMALL_STEP, *flags, "--json", data) == 0
        contents.append(json.loads(data.read_text()))
    searched, priced = contents
    for name in ("plan", "forecast", "timeline", "budget_bytes", "gain", "statics"):
        assert priced[name] == searched[name], name


def test_seven_billion_on_pcie_is_planned(tmp_path, capsys):
    data = tmp_path / "all.json"
    flags = ("--mesh", "pcie8", "--max_length", "4096", "--global_batch_size", "8")
    assert run("--model", "llama2-7b", *flags, "--json", data) == 0
    content = json.loads(data.read_text())
    assert plans.from_json(json.dumps(content["plan"])).num_layers == 32
    assert "links" in content["assumed"]
    assert "rests on figures of pcie8 that nobody measured" in capsys.readouterr().out
    assert content["num_scored"] > 0


def test_a_compute_bound_step_has_nothing_to_win(capsys):
    flags = ("--mesh", "h200x1", "--max_length", "512", "--global_batch_size", "1")
    assert run("--model", "smollm2-135m", *flags) == 0
    assert "gain 1.00x: compute-bound, nothing to be won" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--model", "llama2-700b"), r"no such shape \(did you mean llama2-70b"),
        (("--hardware", "pcie9"), r"hardware='pcie9' is unknown \(did you mean pcie8"),
        (("--mesh", "2y2"), "mesh='2y2' is unknown"),
        (("--memory_budget", "-1"), "memory_budget=-1.0 must not be negative"),
        (("--memory_budget", "0.01"), "memory_budget=0.01 GiB per device: from 64.0"),
        (("--memory_budget", "50"), "memory_budget=50.0 GiB .* has 39.4 GiB"),
        (("--global_batch_size", "-3"), "global_batch_size=-3 must not be negative"),
        (("--plan", "replicated"), "plan='replicated': auto, or a plan's .json file"),
        (("--plan", "no.json"), "plan='no.json': no such file"),
        (("--attention", "flex"), "attention='flex'"),
        (("--lora.target_modules", "w_proj"), "w_proj"),
        (("--max_lenght", "5"), "max_length"),
        (("--output", "no/plan.json"), "output='no/plan.json': there is no folder no"),
        (("--plot", "."), r"plot='\.' is a folder; name a file"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_change(folder, capsys, flags, text):
    settings = {"--model": folder, "--mesh": "pcie8", flags[0]: flags[1]}
    assert run(*(word for pair in settings.items() for word in pair)) == 2
    assert re.search(f"error: .*{text}", capsys.readouterr().err)


def test_what_no_plan_fits_says_the_least_memory_and_a_knob(capsys):
    flags = ("--model", "llama2-7b", "--mesh", "rtx4090x8", "--max_length", "4096")
    assert run(*flags, "--memory_budget", "1") == 2
    error = capsys.readouterr().err
    assert re.search(r"no plan fits.* at least [\d,]+ bytes.*max_length to 2048", error)


def test_a_plan_of_another_model_mesh_batch_or_version_is_refused(
    folder, tmp_path, capsys
):
    path = tmp_path / "plan.json"
    for changes, text in (
        ({"num_layers": 5}, "has 5 layers, .* 4; plan again for this model"),
        ({"mesh_sizes": (2, 4)}, "is for mesh 2x4, this one is 2x2x2"),
        ({"rows": (1, 1)}, "runs 8 rows a step, the global batch is 16"),
        ({"weight_dtype": "float32"}, "is for weights in float32, not bfloat16"),
        (
            {"model": "L4 D256 F512 N4 K4 H64 V2048"},
            "is for a model of L4 D256 F512 N4 K4 H64 V2048, .*tiny is one of "
            "L4 D256 F512 N4 K2 H64 V2048; plan again for this model",
        ),
    ):
        static_file(path, **changes)
        assert run("--model", folder, *SMALL_STEP, "--plan", path) == 2
        assert re.search(text, capsys.readouterr().err)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    assert run("--model", folder, *SMALL_STEP, "--plan", path) == 2
    assert "plan version 1 is not 2; plan again" in capsys.readouterr().err


def test_a_plan_above_the_budget_is_priced_and_said_not_to_fit(tmp_path, capsys):
    path = tmp_path / "plan.json"
    static_file(path, name="replicated", num_layers=32, rows=(1, 1))
    flags = ("--mesh", "pcie8", "--max_length", "512", "--memory_budget", "10")
    assert run("--model", "llama2-7b", *flags, "--plan", path) == 3
    assert "does not fit: " in capsys.readouterr().out


def test_inputs_are_those_of_the_request():
    inputs = requests.make(
        llama_family.FAMILY.named()["llama2-7b"],
        request(
            lora=LoraConfig(r=4, lora_dropout=0.1, target_modules=("q_proj",)),
            memory_budget=1.5,
            memory_fraction=0.5,
            attention="xla",
        ),
    )
    assert inputs.budget_bytes == 3 * 2**29
    assert inputs.hardware.pool_fraction == 0.5
    assert inputs.workload.num_adapter_weights == 32 * 4 * 2 * 4096
    assert (inputs.workload.dropout, inputs.workload.attention) == (True, "xla")
    one = requests.make(llama_family.LlamaShape(TINY), request(mesh=meshes.parse("1")))
    assert one.mesh_sizes == (1,)
    assert one.budget_bytes == one.hardware.budget_bytes


def test_a_card_that_cannot_be_compiled_for_names_those_that_can(
    folder, tmp_path, capsys
):
    unknown = dataclasses.replace(machines.preset("pcie8"), device="NVIDIA B9")
    machines.write(tmp_path / "b9.json", unknown)
    flags = ("--mesh", "2x2x2", "--hardware", tmp_path / "b9.json", "--verify")
    assert run("--model", folder, *flags) == 2
    error = capsys.readouterr().err
    assert re.search(r"no compile-only target for NVIDIA B9; .* NVIDIA A100", error)


@pytest.mark.aot
@pytest.mark.skipif(
    not compile_only.available(), reason=compile_only.unavailable_reason()
)
def test_kernels_that_only_their_gpu_compiles_are_not_verified(folder, capsys):
    flags = ("--mesh", "h200x1", "--max_length", "512", "--global_batch_size", "4")
    assert run("--model", folder, *flags) == 0
    assert "Flash attention" in capsys.readouterr().out
    assert run("--model", folder, *flags, "--verify") == 2
    assert "--attention xla" in capsys.readouterr().err


@pytest.mark.aot
@pytest.mark.skipif(
    not compile_only.available(), reason=compile_only.unavailable_reason()
)
@pytest.mark.skipif(
    not compile_only.has_cudnn(), reason="XLA's attention compiles twice as long"
)
def test_verify_compiles_and_refuses_what_exceeds_the_budget(folder, tmp_path, capsys):
    path, data = static_file(tmp_path / "plan.json"), tmp_path / "all.json"
    step = ("--mesh", "pcie8", "--max_length", "4096", "--global_batch_size", "16")
    flags = ("--model", folder, *step, "--plan", path, "--memory_budget", "0.0625")
    flags += ("--lora.target_modules", "q_proj")
    assert run(*flags, "--verify", "--json", data) == 3
    content = json.loads(data.read_text())
    compiled, forecast = content["compiled"], content["forecast"]
    arguments = ("weights", "tables", "adapters", "batch", "kept_arenas")
    assert compiled["inputs"] == sum(forecast[name] for name in arguments)
    assert compiled["inputs"] + compiled["temporaries"] > content["budget_bytes"]
    text = capsys.readouterr().out
    assert "compiled for NVIDIA A100-PCIE-40GB" in text
    assert re.search("does not fit: .* above the budget$", text)
    assert jax.default_backend() == "cpu"


def test_settings_say_what_they_are(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    for field in dataclasses.fields(PlanConfig):
        assert f"--{field.name}" in text
