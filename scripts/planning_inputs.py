"""From what a user asks for to what the planner takes, checked.

Shared by all scripts that plan or price a step.
"""

import dataclasses
import difflib
import json
import math
import pathlib

from models import llama, llama_configs, llama_sizes
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import gguf_import, hf_import
from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.numbers import sizes
from mtuner_jax.planning import plans, reports
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import search, static_plans
from mtuner_jax.planning.workloads import Workload
from scripts import sizing

LEAST_BUDGET_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A step to be planned.

    Attributes:
      name: The model's, for messages.
      mesh: The devices.
      global_batch_size: Rows in an optimizer step.
      max_length: Tokens in a row.
      lora: The adapters.
      dtype: Of frozen weights and activations.
      attention: Implementation that computes it, `cudnn` or `xla`.
      hardware: A machine's name or file, or `auto`.
      memory_budget: GiB per device that the compiled step may take; 0 for the pool of
        XLA's allocator less the hardware's reserve.
      memory_fraction: Share of a card's memory in that pool; 0 for the hardware's.
      device_kind: What JAX calls the GPUs of this machine; empty if the step is not
        for them.
    """

    name: str
    mesh: meshes.MeshSpec
    global_batch_size: int
    max_length: int
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dtype: str = "bfloat16"
    attention: str = "cudnn"
    hardware: str = "auto"
    memory_budget: float = 0.0
    memory_fraction: float = 0.0
    device_kind: str = ""

    def __post_init__(self):
        for field in ("global_batch_size", "max_length"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: at least 1")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype={self.dtype!r}: bfloat16 or float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What search and models take.

    Attributes:
      workload: Sizes of the model, its adapters and the step's rows.
      hardware: The machine's figures.
      mesh_sizes: Devices along each mesh axis, slowest link first; (1,) for one.
      budget_bytes: Per device, that the compiled step may take.
    """

    workload: Workload
    hardware: Hardware
    mesh_sizes: tuple[int, ...]
    budget_bytes: int


def make(config: llama_configs.LlamaConfig, request: Request) -> Inputs:
    """Joins model, adapters, batch, machine and budget.

    Raises:
      ConfigError: Target modules that the model does not have, an unknown machine, or
        a budget that the card does not have or that holds nothing.
    """
    mesh_sizes = request.mesh.sizes or (1,)
    machine = machines.find(
        request.hardware,
        mesh_sizes=mesh_sizes,
        mesh=request.mesh.name,
        device_kind=request.device_kind,
    )
    if request.memory_fraction:
        machine = dataclasses.replace(machine, pool_fraction=request.memory_fraction)
    return Inputs(
        workload=make_workload(config, request),
        hardware=machine,
        mesh_sizes=mesh_sizes,
        budget_bytes=budget_bytes(machine, request.memory_budget),
    )


def make_workload(config: llama_configs.LlamaConfig, request: Request) -> Workload:
    """Joins model, adapters and batch, whatever the machine.

    Raises:
      ConfigError: Target modules that the model does not have.
    """
    workload = sizing.workload(
        config,
        adapters(config, request.lora),
        name=request.name,
        rows=(request.global_batch_size, request.max_length),
        dtype=request.dtype,
        attention=request.attention,
    )
    return dataclasses.replace(workload, dropout=request.lora.lora_dropout > 0)


def adapters(
    config: llama_configs.LlamaConfig, lora_config: LoraConfig
) -> tuple[lora.AdapterSpec, ...]:
    """Which linear of which layer has an adapter of which rank."""
    return lora.resolve(
        lora_config, llama.Llama(config).linears(), num_layers=config.num_layers
    )


def budget_bytes(machine: Hardware, memory_budget: float) -> int:
    """Bytes per device that the compiled step may take.

    Args:
      machine: Whose card and pool.
      memory_budget: GiB per device; 0 for the pool less the reserve.

    Raises:
      ConfigError: Less than 64 MiB, no number, or more than the card has.
    """
    if memory_budget == 0:
        return machine.budget_bytes
    given = memory_budget * 2**30
    if not math.isfinite(given) or given < LEAST_BUDGET_BYTES:
        raise ConfigError(
            f"memory_budget={memory_budget} GiB per device: from "
            f"{sizes.gib(LEAST_BUDGET_BYTES)} ({LEAST_BUDGET_BYTES / 2**30}) on, or 0 "
            f"for {sizes.gib(machine.budget_bytes)}, the pool less the reserve"
        )
    if given > machine.memory_bytes:
        raise ConfigError(
            f"memory_budget={memory_budget} GiB per device, but {machine.device} has "
            f"{sizes.gib(machine.memory_bytes)}; lower it, or 0 for "
            f"{sizes.gib(machine.budget_bytes)}, the pool less the reserve"
        )
    return int(given)


def shape(model: str) -> llama_configs.LlamaConfig:
    """The model's shape; no weight is read and nothing is downloaded.

    Args:
      model: Name of a shape, folder with a config.json, GGUF file; empty for the
        packaged SmolLM2.

    Raises:
      ConfigError: None of these, or a model that this decoder cannot represent.
    """
    if model in llama_sizes.SIZES:
        return llama_sizes.SIZES[model]
    if model and not pathlib.Path(model).expanduser().exists():
        names = ", ".join(llama_sizes.SIZES)
        near = difflib.get_close_matches(model, llama_sizes.SIZES, n=2)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(
            f"model={model!r}: no such shape{hint}, folder or file; a folder with "
            f"config.json, a GGUF file, or one of {names}"
        )
    try:
        path = hf_import.locate(model) if model else gguf_import.packaged_smollm2()
        if path.is_file():
            return llama_configs.from_hf(gguf_import.GgufFile(path).hf_config())
        return llama_configs.from_hf(json.loads((path / "config.json").read_text()))
    except ValueError as error:
        raise ConfigError(f"model={model!r}: {error}") from error


def read_plan(name: str, workload: Workload, mesh_sizes: tuple[int, ...]) -> Plan:
    """Reads a plan's file and refuses one that was made for something else.

    Args:
      name: Of the file.
      workload: What the plan has to fit.
      mesh_sizes: Devices along each axis of the mesh it has to fit.

    Raises:
      ConfigError: No such file, no plan, one for another model or mesh, of too few
        rows, or of another dtype.
    """
    path = pathlib.Path(name)
    if not path.is_file():
        raise ConfigError(f"plan={name!r}: no such file")
    plan = plans.read(path)
    _check_model(plan, workload, name)
    if plan.mesh_sizes != mesh_sizes:
        asked, found = (
            "x".join(map(str, axes)) for axes in (mesh_sizes, plan.mesh_sizes)
        )
        raise ConfigError(
            f"plan {name} is for mesh {found}, this one is {asked}; plan again for "
            f"this mesh, or --mesh {found}"
        )
    if plan.rows < workload.global_batch_size:
        raise ConfigError(
            f"plan {name} runs {plan.rows} rows a step, the global batch is "
            f"{workload.global_batch_size}; plan again, or --global_batch_size "
            f"{plan.rows}"
        )
    if plan.weight_dtype != workload.weight_dtype:
        raise ConfigError(
            f"plan {name} is for weights in {plan.weight_dtype}, not "
            f"{workload.weight_dtype}; --dtype {plan.weight_dtype}, or plan again"
        )
    return plan


def _check_model(plan, workload, name):
    if plan.num_layers != workload.num_layers:
        raise ConfigError(
            f"plan {name} has {plan.num_layers} layers, {workload.model} "
            f"{workload.num_layers}; plan again for this model"
        )
    if plan.model not in ("", workload.shape_name):
        raise ConfigError(
            f"plan {name} is for a model of {plan.model}, {workload.model} is one of "
            f"{workload.shape_name}; plan again for this model"
        )


def search_plan(inputs: Inputs) -> reports.Report:
    """The fastest plan that fits, beside the static settings.

    Raises:
      ConfigError: No plan fits.
    """
    found = search.fastest(
        inputs.workload,
        inputs.hardware,
        mesh_sizes=inputs.mesh_sizes,
        budget_bytes=inputs.budget_bytes,
    )
    report = reports.Report(
        workload=inputs.workload,
        hardware=inputs.hardware,
        budget_bytes=inputs.budget_bytes,
        plan=found.plan,
        timeline=found.timeline,
        forecast=found.forecast,
        found=found,
    )
    return compared(report)


def price(plan: Plan, inputs: Inputs) -> reports.Report:
    """A given plan with its price; the plan has to be one for these inputs."""
    return reports.Report(
        workload=inputs.workload,
        hardware=inputs.hardware,
        budget_bytes=inputs.budget_bytes,
        plan=plan,
        timeline=timelines.replay(plan, inputs.workload, inputs.hardware),
        forecast=forecasts.forecast(plan, inputs.workload),
    )


def compared(report: reports.Report) -> reports.Report:
    """The same beside the best static settings of the same batch and budget."""
    statics = static_plans.best(
        report.workload,
        report.hardware,
        mesh_sizes=report.plan.mesh_sizes,
        budget_bytes=report.budget_bytes,
    )
    return dataclasses.replace(report, statics=statics)
