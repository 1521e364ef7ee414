"""Plans a training step for a machine that need not be there, and prices it.

python scripts/plan.py --model llama2-70b --mesh pcie8 --max_length 4096 \
    --global_batch_size 32 --output plan.json
python scripts/plan.py --model llama2-70b --mesh pcie8 --max_length 4096 \
    --global_batch_size 32 --plan plan.json --verify

Exit codes: 0 the plan fits; 2 something asked for cannot be; 3 it does not fit.
"""

import dataclasses
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax.numpy as jnp
import pynvml

from models import llama, llama_configs
from mtuner_jax.configs import ConfigError, LoraConfig, OptimizerConfig, Platform
from mtuner_jax.devices import detection, meshes, platforms
from mtuner_jax.engines.elastic import steps
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.inspection import compile_only
from mtuner_jax.ops.attention import api as attention
from mtuner_jax.planning import plans, reports
from mtuner_jax.plots import plan_pictures, plan_plots
from mtuner_jax.settings import cli
from mtuner_jax.training import executors, logs, optimizers
from scripts import planning_inputs

BAD_INPUT = 2
DOES_NOT_FIT = 3
_CUDNN_WHEELS = "nvidia-cudnn-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvrtc-cu12"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A step to be planned; settings have the names they have in train.py.

    Attributes:
      model: Shape by name (`llama2-70b`), local Hugging Face folder or GGUF file;
        empty for train.py's default model. No weight is read.
      mesh: Preset (`pcie8`, `nvlink8`, ...), `auto`, or sizes such as `2x2x2`.
      hardware: Figures of a machine: a preset's name, a calibrated name, a JSON file,
        or `auto` for those of the mesh, or of the GPUs found here.
      max_length: Tokens in a row.
      global_batch_size: Rows in an optimizer step; 0 means one for each device.
      memory_budget: GiB per device that the compiled step may take; 0 for the pool of
        XLA's allocator less a reserve.
      lora: The adapters.
      dtype: `bfloat16` or `float32`, of frozen weights and activations.
      attention: `auto` (cuDNN unless rows are packed), `xla` or `cudnn`.
      packing: Whether rows hold several samples, which cuDNN attention cannot do.
      plan: `auto` searches; a plan's JSON file is priced instead.
      output: Where to write the plan for `train.py --plan`; empty for nowhere.
      json: Where to write plan, price and comparisons; `-` prints them instead of the
        tables.
      plot: PNG to draw: memory over the step, ratios of the layers, the two streams.
      verify: Compile the step for the machine's GPUs, which need not be there, and
        compare what XLA allocates with what was predicted.
    """

    model: str = ""
    mesh: str = "auto"
    hardware: str = "auto"
    max_length: int = 1024
    global_batch_size: int = 0
    memory_budget: float = 0.0
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dtype: str = "bfloat16"
    attention: str = "auto"
    packing: bool = False
    plan: str = "auto"
    output: str = ""
    json: str = ""
    plot: str = ""
    verify: bool = False

    def __post_init__(self):
        for name in ("global_batch_size", "memory_budget"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: at least 0")
        if self.plan != "auto" and not self.plan.endswith(".json"):
            raise ConfigError(
                f"plan={self.plan!r}: auto, or a plan's .json file; what the static "
                "plans cost is always part of the table"
            )
        if self.attention not in ("auto", "xla", "cudnn"):
            raise ConfigError(f"attention={self.attention!r}: auto, xla or cudnn")


def main(argv: list[str]) -> int:
    """Plans, prints and writes; returns the exit code."""
    try:
        config = cli.parse(argv, PlanConfig, prog="plan.py", description=__doc__ or "")
        with logs.to_console():
            return run(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def run(config: PlanConfig) -> int:
    """Plans or prices, prints, writes, verifies; returns the exit code."""
    implementation = attention.choose(
        config.attention, on_gpu=True, packing=config.packing, dtype=config.dtype
    )
    shape = planning_inputs.shape(config.model)
    inputs = planning_inputs.make(shape, make_request(config, implementation))
    if config.verify:
        prepare_verify(inputs.hardware, implementation)  # before it takes any time
    report = make_report(config, inputs)
    say = (lambda text: None) if config.json == "-" else print
    say(reports.text(report))
    compiled = None
    if config.verify:
        compiled = compile_step(config, shape, report, implementation)
        say("\n" + reports.compiled_text(compiled, report))
    for _ in range(executors.MAX_REPLANS if config.plan == "auto" else 0):
        over_bytes = compiled.total_bytes - inputs.budget_bytes if compiled else 0
        if over_bytes <= 0:
            break
        say("\nplanned again with that much less, as train.py does\n")
        report = search_less(inputs, report.forecast.total_bytes - over_bytes)
        say(reports.text(report))
        compiled = compile_step(config, shape, report, implementation)
        say("\n" + reports.compiled_text(compiled, report))
    return finish(config, report, compiled)


def finish(
    config: PlanConfig, report: reports.Report, compiled: reports.Compiled | None
) -> int:
    """Writes what was asked for; returns the exit code."""
    if config.output:
        write(config.output, plans.to_json(report.plan))
    if config.plot:
        draw(pathlib.Path(config.plot), report)
    data, fits = reports.to_data(report), report.fits
    if compiled is not None:
        data["compiled"] = dataclasses.asdict(compiled)
        fits = compiled.total_bytes <= report.budget_bytes
    if config.json:
        write(config.json, json.dumps(data, sort_keys=True, indent=1) + "\n")
    return 0 if fits else DOES_NOT_FIT


def make_report(config: PlanConfig, inputs: planning_inputs.Inputs) -> reports.Report:
    """Searches, or prices the plan of a file."""
    if config.plan == "auto":
        return planning_inputs.search_plan(inputs)
    plan = planning_inputs.read_plan(config.plan, inputs.workload, inputs.mesh_sizes)
    return planning_inputs.compared(planning_inputs.price(plan, inputs))


def search_less(inputs: planning_inputs.Inputs, limit_bytes: int) -> reports.Report:
    """Searches for a plan whose forecast is within a limit below the budget."""
    less = dataclasses.replace(inputs, budget_bytes=limit_bytes)
    report = planning_inputs.search_plan(less)
    return dataclasses.replace(report, budget_bytes=inputs.budget_bytes)


def draw(path: pathlib.Path, report: reports.Report) -> None:
    """Memory over the step, ratios of the layers and streams, as a PNG."""
    plan_plots.write(
        path,
        plan_pictures.picture(report.plan, report.timeline),
        title=plan_pictures.headline(
            report.workload.model, report.plan, report.timeline
        ),
        limits={
            "budget": report.budget_bytes,
            "allocated": report.forecast.total_bytes,
        },
    )


def write(name: str, text: str) -> None:
    """To a file, or to the standard output for `-`."""
    if name == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(name).write_text(text, encoding="utf-8")


def make_request(config: PlanConfig, implementation: str) -> planning_inputs.Request:
    """The step that the settings ask for; GPUs of this machine count for `auto`."""
    found = detection.look()
    here = 0 if platforms.runs_on_cpu(Platform.AUTO, found) else found.num_visible
    mesh = meshes.parse(config.mesh, num_devices=here)
    return planning_inputs.Request(
        name=config.model or "SmolLM2-135M-Instruct",
        mesh=mesh,
        global_batch_size=config.global_batch_size or mesh.num_devices,
        max_length=config.max_length,
        lora=config.lora,
        dtype=config.dtype,
        attention=implementation,
        hardware=config.hardware,
        memory_budget=config.memory_budget,
        device_kind=card_name() if here and mesh.name not in meshes.PRESETS else "",
    )


def card_name() -> str:
    """What the driver calls the first GPU, as JAX would; JAX is not started.

    Raises:
      ConfigError: The driver cannot be asked.
    """
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ConfigError(
            f"hardware=auto: the driver does not say which GPUs these are ({error}); "
            "give --hardware, or --mesh one of the presets"
        ) from error
    return name if isinstance(name, str) else name.decode()


def prepare_verify(hardware: Hardware, implementation: str) -> None:
    """Makes sure that a step can be compiled for the machine's cards.

    Raises:
      ConfigError: A card that XLA was not told about, or wheels that are missing.
    """
    compile_only.target_of(hardware.device)
    platforms.prepare_cpu(1)
    reason = compile_only.unavailable_reason()
    if reason:
        raise ConfigError(f"verify: {reason}")
    if implementation == "cudnn" and not compile_only.has_cudnn():
        raise ConfigError(
            "verify: tracing cuDNN attention asks the library for its version; pip "
            f"install --no-deps {_CUDNN_WHEELS}, or --attention xla"
        )


def compile_step(
    config: PlanConfig,
    shape: llama_configs.LlamaConfig,
    report: reports.Report,
    implementation: str,
) -> reports.Compiled:
    """Compiles the plan's step for the machine's GPUs without having them."""
    target = compile_only.target_of(report.hardware.device)
    plan = report.plan
    spec = steps.StepSpec(
        model=llama.Llama(shape, attention_implementation=implementation),
        plan=plan,
        mesh=compile_only.topology_mesh(target, plan.mesh_sizes),
        adapters=planning_inputs.adapters(shape, config.lora),
        dropout_rate=config.lora.lora_dropout,
    )
    result = compile_only.compile_train(
        spec,
        optimizers.adamw(OptimizerConfig(), lambda step: 1e-4),
        max_length=config.max_length,
        dtype=jnp.dtype(plan.weight_dtype),
    )
    return reports.Compiled(
        device=target.device,
        inputs=result.allocated.arguments,
        outputs=result.allocated.outputs,
        temporaries=result.allocated.temporaries,
        cudnn_workspace=result.cudnn_workspace_bytes,
        compile_s=result.compile_s,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
