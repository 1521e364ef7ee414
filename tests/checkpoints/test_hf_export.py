import dataclasses
import json
import math

import numpy as np
import peft
import pytest
import torch
import transformers

from models import llama, llama_configs, llama_hf_names
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import (
    folders,
    hf_export,
    hf_import,
    peft_tensors,
    safetensors_files,
)
from mtuner_jax.configs import LoraConfig

IDS = np.random.default_rng(0).integers(0, 96, (2, 7)).astype(np.int32)


def load(tiny, config, folder):
    return hf_import.load(
        safetensors_files.Folder(folder),
        llama_hf_names.tensors(config),
        tiny.abstract(config),
    )


def random_adapters(specs, seed=1):
    """Adapters as training leaves them: zero beyond each layer's rank."""
    rng = np.random.default_rng(seed)
    adapters = {}
    for spec in specs:
        shape = (len(spec.ranks), spec.max_rank)
        used = (np.arange(spec.max_rank) < np.array(spec.ranks)[:, None]).astype("f4")
        a = rng.standard_normal((shape[0], spec.in_dim, shape[1])) * used[:, None]
        b = rng.standard_normal((*shape, spec.out_dim)) * used[:, :, None]
        adapters[spec.module] = {
            "lora_a": (0.2 * a).astype(np.float32),
            "lora_b": (0.2 * b).astype(np.float32),
        }
    return adapters


def resolve(config, lora_config):
    linears = llama.Llama(config).linears()
    return lora.resolve(lora_config, linears, num_layers=config.num_layers)


def torch_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(IDS).long()).logits.float().numpy()


def assert_close(got, want, bound=1e-5):
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


CASES = {
    "all_linear": (LoraConfig(r=4, lora_alpha=8.0), lambda module, layer: (4, 2.0)),
    "rslora": (
        LoraConfig(
            r=16,
            lora_alpha=16.0,
            use_rslora=True,
            target_modules=("q_proj", "down_proj"),
        ),
        lambda module, layer: (
            (16, 16 / math.sqrt(16))
            if module in ("self_attn.q_proj", "mlp.down_proj")
            else None
        ),
    ),
    "patterns": (
        LoraConfig(
            r=4,
            lora_alpha=8.0,
            target_modules=("q_proj", "v_proj", "gate_proj"),
            rank_pattern={r"layers\.1\.self_attn\.q_proj": 7, "gate_proj": 2},
            alpha_pattern={"v_proj": 20.0},
        ),
        lambda module, layer: {
            "self_attn.q_proj": (7, 8 / 7) if layer == 1 else (4, 2.0),
            "self_attn.v_proj": (4, 5.0),
            "mlp.gate_proj": (2, 4.0),
        }.get(module),
    ),
    "regex_rslora_patterns": (
        LoraConfig(
            r=4,
            lora_alpha=8.0,
            use_rslora=True,
            target_modules=r".*\.[02]\.(self_attn\.o_proj|mlp\.up_proj)",
            rank_pattern={r"2\.mlp\.up_proj": 9},
        ),
        lambda module, layer: {
            ("self_attn.o_proj", 0): (4, 4.0),
            ("self_attn.o_proj", 2): (4, 4.0),
            ("mlp.up_proj", 0): (4, 4.0),
            ("mlp.up_proj", 2): (9, 8 / 3),
        }.get((module, layer)),
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny Llama that transformers itself made and saved."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern")
@pytest.mark.filterwarnings(  # peft 0.21 asks transformers 5 for a deprecated name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_peft_loads_the_adapter_and_gives_the_merged_and_our_logits(
    tiny, tmp_path, base, case
):
    lora_config, expected = CASES[case]
    config = llama_configs.from_file(base / "config.json")
    specs = resolve(config, lora_config)
    adapters = random_adapters(specs)
    options = hf_export.AdapterOptions(base_name=str(base))
    out = tmp_path / "adapter"
    hf_export.write_adapter(out, adapters, specs, lora_config, options=options)

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    base_logits = torch_logits(plain)
    with_adapter = peft.PeftModel.from_pretrained(plain, out)
    got = torch_logits(with_adapter)

    merged = transformers.AutoModelForCausalLM.from_pretrained(base)
    num_merged = 0
    for spec in specs:
        for layer in range(config.num_layers):
            if (found := expected(spec.module, layer)) is None:
                continue
            rank, scale = found
            a = adapters[spec.module]["lora_a"][layer, :, :rank]
            b = adapters[spec.module]["lora_b"][layer, :rank]
            linear = merged.get_submodule(f"model.layers.{layer}.{spec.module}")
            linear.weight.data += torch.from_numpy(scale * (a @ b).T)
            num_merged += 1
    assert num_merged == sum(rank > 0 for spec in specs for rank in spec.ranks)
    assert_close(got, torch_logits(merged))
    assert np.linalg.norm(got - base_logits) > 0.1 * np.linalg.norm(base_logits)

    params = load(tiny, config, base)
    assert_close(tiny.logits(config, params, IDS), base_logits)
    assert_close(tiny.logits(config, params, IDS, adapters=adapters, specs=specs), got)


@pytest.mark.parametrize("case", CASES)
def test_adapter_and_its_config_read_back_equal(tmp_path, base, case):
    lora_config, _ = CASES[case]
    config = llama_configs.from_file(base / "config.json")
    specs = resolve(config, lora_config)
    adapters = random_adapters(specs)
    options = hf_export.AdapterOptions(base_name=str(base))
    hf_export.write_adapter(
        tmp_path / "a", adapters, specs, lora_config, options=options
    )
    again = hf_export.read_adapter_config(tmp_path / "a")
    assert resolve(config, again) == specs
    assert (again.r, again.lora_alpha) == (lora_config.r, lora_config.lora_alpha)
    got = hf_export.read_adapter(tmp_path / "a", specs)
    assert got.keys() == adapters.keys()
    for module, leaf in adapters.items():
        np.testing.assert_array_equal(got[module]["lora_a"], leaf["lora_a"])
        np.testing.assert_array_equal(got[module]["lora_b"], leaf["lora_b"])


@pytest.fixture
def written(tmp_path, base):
    """An adapter folder with everything that made it."""
    lora_config = LoraConfig(r=4, lora_alpha=8.0, target_modules=("q_proj",))
    specs = resolve(llama_configs.from_file(base / "config.json"), lora_config)
    adapters = random_adapters(specs)
    options = hf_export.AdapterOptions(base_name="owner/base")
    out = tmp_path / "adapter"
    hf_export.write_adapter(out, adapters, specs, lora_config, options=options)
    return out, adapters, specs, lora_config, options


def test_files_are_those_of_peft(written):
    out, *_ = written
    assert sorted(entry.name for entry in out.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    header = safetensors_files.read_header(out / "adapter_model.safetensors")
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    assert header[f"{stem}.lora_A.weight"].shape == (4, 32)
    assert header[f"{stem}.lora_B.weight"].shape == (32, 4)
    assert {info.dtype for info in header.values()} == {"F32"}
    content = json.loads((out / "adapter_config.json").read_text())
    assert content["base_model_name_or_path"] == "owner/base"
    assert content["target_modules"] == ["q_proj"]
    assert content["lora_alpha"] == 8 and isinstance(content["lora_alpha"], int)
    assert content["inference_mode"] is True and content["modules_to_save"] is None
    theirs = peft.LoraConfig.from_pretrained(out)
    assert theirs.target_modules == {"q_proj"}


def test_an_adapter_of_nothing_is_refused_and_the_old_one_stays(written, caplog):
    out, adapters, specs, lora_config, options = written
    before = (out / "adapter_model.safetensors").read_bytes()
    with pytest.raises(peft_tensors.AdapterTensorsError, match="no adapter to write"):
        hf_export.write_adapter(out, {}, (), lora_config, options=options)
    assert (out / "adapter_model.safetensors").read_bytes() == before
    with caplog.at_level("INFO"):
        hf_export.write_adapter(out, adapters, specs, lora_config, options=options)
    assert "adapter: 6 tensors, 0.0 MiB" in caplog.text


def test_adapter_may_be_written_in_bfloat16(written):
    out, adapters, specs, lora_config, options = written
    options = dataclasses.replace(options, dtype="bfloat16")
    hf_export.write_adapter(out, adapters, specs, lora_config, options=options)
    header = safetensors_files.read_header(out / "adapter_model.safetensors")
    assert {info.dtype for info in header.values()} == {"BF16"}
    got = hf_export.read_adapter(out, specs)
    want = adapters["self_attn.q_proj"]["lora_a"]
    assert_close(got["self_attn.q_proj"]["lora_a"], want, bound=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_adapter_never_replaces_a_good_one(written, bad):
    out, adapters, specs, lora_config, options = written
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    adapters["self_attn.q_proj"]["lora_b"][1, 2, 3] = bad
    with pytest.raises(peft_tensors.AdapterTensorsError, match="1 of 6 adapter tens"):
        hf_export.write_adapter(out, adapters, specs, lora_config, options=options)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_an_overflow_of_the_cast_is_refused(written):
    out, adapters, specs, lora_config, options = written
    adapters["self_attn.q_proj"]["lora_a"][0, 0, 0] = 1e6
    options = dataclasses.replace(options, dtype="float16")
    with (
        np.errstate(over="ignore"),
        pytest.raises(peft_tensors.AdapterTensorsError, match="infinity as float16"),
    ):
        hf_export.write_adapter(out, adapters, specs, lora_config, options=options)


def test_a_failure_while_writing_leaves_the_old_adapter_alone(written):
    out, adapters, specs, lora_config, options = written
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    class FullDisk:
        def save_pretrained(self, folder):
            raise OSError("No space left on device")

    options = dataclasses.replace(options, tokenizer=FullDisk())
    adapters["self_attn.q_proj"]["lora_a"] *= 2
    with pytest.raises(OSError, match="No space left"):
        hf_export.write_adapter(out, adapters, specs, lora_config, options=options)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert [entry.name for entry in out.parent.iterdir()] == ["adapter"]


def test_a_folder_with_other_files_is_not_replaced(written):
    out, adapters, specs, lora_config, options = written
    (out / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(folders.FolderError, match=r"\(thesis.tex\) and would be lost"):
        hf_export.write_adapter(out, adapters, specs, lora_config, options=options)
    assert (out / "thesis.tex").exists()


def test_an_existing_empty_folder_is_filled(written, tmp_path):
    _, adapters, specs, lora_config, options = written
    (tmp_path / "empty").mkdir()
    hf_export.write_adapter(
        tmp_path / "empty", adapters, specs, lora_config, options=options
    )
    assert (tmp_path / "empty" / "adapter_model.safetensors").is_file()


def test_wrong_keys_are_listed(written):
    out, _, specs, *_ = written
    path = out / "adapter_model.safetensors"
    tensors = safetensors_files.read_file(path)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    x = tensors.pop(first)
    tensors[first.replace(".weight", ".default.weight")] = x
    tensors[first.replace("layers.0", "layers.1")] = x[:3]
    safetensors_files.write(path, tensors)
    with pytest.raises(hf_export.AdapterFileError) as caught:
        hf_export.read_adapter(out, specs)
    text = str(caught.value)
    assert f"1 missing ({first})" in text
    assert "1 unexpected (" in text and "lora_A.default.weight" in text
    assert "1 misshapen (" in text and "[3, 32] instead of [4, 32]" in text


def test_a_folder_without_adapter_is_an_error(tmp_path):
    with pytest.raises(hf_export.AdapterFileError, match="not an adapter"):
        hf_export.read_adapter_config(tmp_path)


@pytest.mark.parametrize("case", ["patterns", "rslora"])
@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern")
@pytest.mark.filterwarnings(  # as above
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
def test_a_portable_adapter_is_right_for_readers_of_one_rank_and_alpha(
    tmp_path, base, case
):
    folder = base
    lora_config = CASES[case][0]
    specs = resolve(llama_configs.from_file(folder / "config.json"), lora_config)
    adapters = random_adapters(specs)
    options = hf_export.AdapterOptions(base_name=str(folder))
    hf_export.write_adapter(
        tmp_path / "own", adapters, specs, lora_config, options=options
    )
    portable = hf_export.portable(adapters, specs)
    hf_export.write_adapter(tmp_path / "any", *portable, options=options)
    content = json.loads((tmp_path / "any" / "adapter_config.json").read_text())
    rank = max(spec.max_rank for spec in specs)
    assert (content["r"], content["lora_alpha"]) == (rank, rank)
    assert not content["rank_pattern"] and not content["alpha_pattern"]
    assert not content["use_rslora"]
    tensors = safetensors_files.read_file(tmp_path / "any/adapter_model.safetensors")
    assert {min(x.shape) for x in tensors.values()} == {rank}
    logits = []
    for name in ("own", "any"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(model, tmp_path / name)
        logits.append(torch_logits(loaded))
    assert_close(logits[1], logits[0])
