"""Plans a step for a machine that need not be there: priced, written, verified."""

import dataclasses
import json
import pathlib
from collections.abc import Callable

import pynvml

from mtuner_jax.checkpoints import folders
from mtuner_jax.configs import ConfigError, OptimizerConfig, PlanConfig, Platform
from mtuner_jax.devices import detection, meshes, platforms
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.hardware import boxes, cards, machines
from mtuner_jax.inspection import compile_only
from mtuner_jax.numbers.documents import RowDocuments
from mtuner_jax.ops.attention import api as attention
from mtuner_jax.planning import plans, reports
from mtuner_jax.plots import plan_pictures, plan_plots
from mtuner_jax.runs import planned, pricing, requests, shapes
from mtuner_jax.runs.families import Family
from mtuner_jax.training import optimizers

_CUDNN_WHEELS = "nvidia-cudnn-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvrtc-cu12"
# JAX takes a machine without GPUs for one of before Hopper.
_TRACEABLE_HEAD_DIM = 128


def plan(config: PlanConfig, family: Family, *, say: Callable[[str], None]) -> bool:
    """Plans or prices a step, tells it, writes and verifies what was asked for.

    Args:
      config: The step, and what to do with its plan.
      family: Of the model.
      say: Takes text to be shown.

    Returns:
      Whether the plan fits: the compiled step if it is verified, else the forecast.

    Raises:
      ConfigError: Something that was asked for cannot be, or no plan fits.
    """
    for name in ("output", "json", "plot"):
        folders.check_file(getattr(config, name), name=name)
    shape = shapes.shape(family, config.model)
    request = _request(config, head_dim=shape.head_dim)
    model = requests.resolve(shape, request)
    inputs = requests.priced(model.workload, request)
    if config.verify:
        _prepare_verify(
            inputs.hardware.device, request.attention, head_dim=shape.head_dim
        )
    show = (lambda text: None) if config.json == "-" else say

    def build(report: reports.Report) -> reports.Compiled | None:
        show(reports.text(report))
        compiled = _compile(config, model, report) if config.verify else None
        if compiled:
            show("\n" + reports.compiled_text(compiled, report))
        return compiled

    if config.plan == "auto":
        planner = planned.Planner(inputs)
        planner.fastest()
        compiled, _ = planner.settle(
            build,
            over_bytes=lambda done: (
                done.total_bytes - inputs.budget_bytes if done else 0
            ),
            tell=lambda _: show(
                "\nplanned again with that much less, as train.py does\n"
            ),
        )
        report = planner.report
    else:
        given = pricing.read_plan(config.plan, inputs.workload, inputs.mesh_sizes)
        report = pricing.compared(pricing.price(given, inputs))
        compiled = build(report)
    return _finish(config, report, compiled, say=say)


def _finish(
    config: PlanConfig,
    report: reports.Report,
    compiled: reports.Compiled | None,
    *,
    say: Callable[[str], None],
) -> bool:
    """Writes what was asked for; whether the plan fits."""
    if config.output:
        _write(config.output, plans.to_json(report.plan), say)
    if config.plot:
        _draw(pathlib.Path(config.plot), report)
    data, fits = reports.to_data(report), report.fits
    if compiled is not None:
        data["compiled"] = dataclasses.asdict(compiled)
        fits = compiled.total_bytes <= report.budget_bytes
    if config.json:
        _write(config.json, json.dumps(data, sort_keys=True, indent=1) + "\n", say)
    return fits


def _draw(path: pathlib.Path, report: reports.Report) -> None:
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


def _write(name: str, text: str, say: Callable[[str], None]) -> None:
    """To a file, or to the standard output for `-`."""
    if name == "-":
        say(text.removesuffix("\n"))
    else:
        pathlib.Path(name).write_text(text, encoding="utf-8")


def _request(config: PlanConfig, *, head_dim: int) -> requests.StepRequest:
    """The step that the settings ask for; GPUs of this machine count for `auto`."""
    found = detection.look()
    here = 0 if platforms.why_cpu(Platform.AUTO, found) else found.num_visible
    mesh = meshes.parse(config.mesh, num_devices=here)
    dtype = requests.dtype_of(config.dtype, on_gpu=True)
    card = _card_name() if here and mesh.name not in meshes.PRESETS else ""
    return requests.StepRequest(
        name=config.model or "SmolLM2-135M-Instruct",
        mesh=mesh,
        global_batch_size=config.global_batch_size or mesh.num_devices,
        max_length=config.max_length,
        lora=config.lora,
        dtype=dtype,
        attention=attention.choose(
            config.attention,
            device=attention.Device(
                on_gpu=True,
                capability=_capability(config.hardware, mesh.name, card),
                elsewhere=not card,
            ),
            packing=config.packing,
            dtype=dtype,
            head_dim=head_dim,
        ),
        # Lengths are not known here: as long as rows, the most that attention costs.
        documents=RowDocuments(most=1),
        hardware=config.hardware,
        memory_budget=config.memory_budget,
        device_kind=card,
    )


def _capability(hardware: str, mesh: str, card: str) -> float:
    """Compute capability of the cards that the step is planned for; 0 if not known."""
    name = mesh if hardware == "auto" else hardware
    if name in boxes.BOXES:
        card = boxes.BOXES[name].card.device
    elif name.endswith(".json"):
        card = machines.read(pathlib.Path(name)).device
    return cards.capability(card)


def _card_name() -> str:
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


def _prepare_verify(device: str, implementation: str, *, head_dim: int) -> None:
    """Makes sure that a step can be compiled for a card, before it takes any time.

    Raises:
      ConfigError: A card that XLA was not told about, or wheels that are missing.
    """
    compile_only.target_of(device)
    platforms.prepare_cpu(1)
    reason = compile_only.unavailable_reason()
    if reason:
        raise ConfigError(f"verify: {reason}")
    if implementation == "flash":
        raise ConfigError(
            "verify: FlashAttention's kernels cannot be compiled without their GPU; "
            "--attention xla gives a bound that is a little higher"
        )
    if implementation == "cudnn" and not compile_only.has_cudnn():
        raise ConfigError(
            "verify: tracing cuDNN attention asks the library for its version; pip "
            f"install --no-deps {_CUDNN_WHEELS}, or --attention xla"
        )
    if implementation == "cudnn" and head_dim > _TRACEABLE_HEAD_DIM:
        raise ConfigError(
            f"verify: without a GPU, cuDNN attention is traced up to head_dim "
            f"{_TRACEABLE_HEAD_DIM}, this model has {head_dim}; --attention xla"
        )


def _compile(
    config: PlanConfig, model: requests.ResolvedModel, report: reports.Report
) -> reports.Compiled:
    """Compiles the plan's step for the machine's GPUs without having them."""
    target = compile_only.target_of(report.hardware.device)
    spec = StepSpec(
        model=model.decoder,
        plan=report.plan,
        mesh=compile_only.topology_mesh(target, report.plan.mesh_sizes),
        adapters=model.adapters,
        dropout_rate=config.lora.lora_dropout,
    )
    result = compile_only.compile_train(
        spec,
        optimizers.adamw(OptimizerConfig(), lambda step: 1e-4),
        max_length=config.max_length,
    )
    return reports.Compiled(
        device=target.device,
        inputs=result.allocated.arguments,
        outputs=result.allocated.outputs,
        temporaries=result.allocated.temporaries,
        cudnn_workspace=result.cudnn_workspace_bytes,
        compile_s=result.compile_s,
    )
