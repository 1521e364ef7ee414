"""One LoRA run from its configuration to its adapter."""

import dataclasses
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_export, metas, step_dirs, store
from mtuner_jax.configs import ConfigError, Platform, RunConfig
from mtuner_jax.data import loading
from mtuner_jax.devices import starting
from mtuner_jax.engines import flops
from mtuner_jax.hardware import cards
from mtuner_jax.protocols.states import Params
from mtuner_jax.runs import opening, pricing, requests
from mtuner_jax.runs.families import Family
from mtuner_jax.runs.lora_engines import EngineBuilder, LoraJob
from mtuner_jax.training import logs, loops, metrics, optimizers, reporters, run_dirs

_MAX_CPU_PARAMETERS = 1_000_000_000
_logger = logging.getLogger(__name__)


def train(config: RunConfig, family: Family, *, argv: Sequence[str] = ()) -> None:
    """Sets everything up, trains, and writes adapter and summary.

    Args:
      config: The run.
      family: Of the model.
      argv: The command line, for `run_info.json`.

    Raises:
      ConfigError: A setting that cannot be, or memory that does not suffice.
      NonFiniteError: A loss or gradient is NaN or infinite.
    """
    devices = starting.start(
        config.mesh, config.platform, deterministic=config.deterministic
    )
    resume = step_dirs.find(
        config.resume_from_checkpoint, pathlib.Path(config.output_dir)
    )
    run = run_dirs.claim(config.output_dir, resume_from=resume)
    with logs.to_file(run.log):
        run_dirs.write_config(run, config)
        run_dirs.write_info(run, argv)
        for line in devices.lines:
            _logger.info("%s", line)
        opened = opening.open_model(family, config)
        pricing.check_named(config, devices.spec, device_kind=devices.gpu_kind)
        _check_size(config, opened, on_gpu=devices.on_gpu)
        rows = _rows_per_step(config, devices.mesh.size)
        data = loading.load(config, opened.tokenizer, global_batch_size=rows)
        total_steps = loops.num_steps(
            config, steps_per_epoch=data.train.steps_per_epoch
        )
        num_devices = devices.mesh.size
        requests.check_rows(rows, len(data.train.rows), num_devices=num_devices)
        learning_rate = optimizers.schedule(config, num_steps=total_steps)
        job = LoraJob(
            config=config,
            opened=opened,
            devices=devices,
            rows=rows,
            optimizer=optimizers.adamw(config, learning_rate),
            learning_rate=learning_rate,
            run=run,
        )
        builder = EngineBuilder(job)
        _run_steps(builder, data, resume, total_steps=total_steps)
        _summarize(builder)


def _run_steps(
    builder: EngineBuilder,
    data: loading.RunData,
    resume: pathlib.Path | None,
    *,
    total_steps: int,
) -> None:
    """Runs the steps that are left and writes the adapter."""
    job, keeper = builder.job, _keeper(builder, data)
    with keeper.checkpoints:
        engine = builder.build()
        executor = builder.executor(engine)
        state = engine.init()
        if resume is not None:
            restored = keeper.checkpoints.restore(
                resume, engine.abstract_state(), meta=keeper.meta
            )
            data.train.set_state(restored.data)
            _logger.info("resumed from %s: step %d", resume, restored.step)
            state = restored.state
        start_step = int(state.step)
        if start_step >= total_steps:
            _logger.info(
                "%s is finished: step %d of %d. Raise --max_steps to go on, or "
                "choose another --output_dir",
                job.run.root,
                start_step,
                total_steps,
            )
        else:
            reporter = reporters.Reporter(
                job.run,
                job.config,
                rates=_rates(builder),
                total_steps=total_steps,
                start_step=start_step,
            )
            loop = loops.Loop(
                job.config,
                executor,
                data=data,
                keeper=keeper,
                learning_rate=job.learning_rate,
            )
            with reporter:
                state = loop.run(state, reporter, total_steps=total_steps)
        adapters = executor.engine.export(state)
    keeper.write_adapter(adapters, job.run.adapter)


def _keeper(builder: EngineBuilder, data: loading.RunData) -> loops.Keeper:
    """Where the run is kept, and as what."""
    config, opened = builder.job.config, builder.job.opened
    options = hf_export.AdapterOptions(
        base_name=opened.name, tokenizer=opened.tokenizer
    )

    def write(adapters: Params, folder: pathlib.Path) -> None:
        hf_export.write_adapter(
            folder, adapters, builder.model.adapters, config.lora, options=options
        )

    return loops.Keeper(
        checkpoints=store.Store(
            builder.job.run.checkpoints, save_total_limit=config.save_total_limit
        ),
        meta=metas.RunMeta(
            base_model=opened.identity,
            data=data.train.fingerprint(),
            lora=dataclasses.asdict(config.lora),
            seed=config.seed,
            rng="threefry2x32 keyed by seed, module, layer, step, sample, position",
        ),
        write_adapter=write,
    )


def _check_size(
    config: RunConfig, opened: opening.OpenedModel, *, on_gpu: bool
) -> None:
    """Refuses a model that a CPU cannot train, unless it was asked for."""
    size = opened.shape.num_parameters
    if on_gpu or config.platform is Platform.CPU or size <= _MAX_CPU_PARAMETERS:
        return
    raise ConfigError(
        f"{opened.name} has {size:,} parameters and no accelerator was found; virtual "
        f"CPU devices are for up to {_MAX_CPU_PARAMETERS:,}. Install "
        "`pip install 'mtuner-jax[cuda12]'` on a machine with NVIDIA GPUs, or insist "
        "with --platform cpu"
    )


def _rows_per_step(config: RunConfig, num_devices: int) -> int:
    """The global batch in rows; of the three factors only the product counts."""
    product = (
        config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * num_devices
    )
    return config.global_batch_size or product


def _rates(builder: EngineBuilder) -> metrics.Rates:
    """What turns tokens and seconds into speed and MFU."""
    model, devices = builder.model, builder.job.devices
    return metrics.Rates(
        num_devices=devices.mesh.size,
        flops_per_token=flops.per_token(
            model.decoder,
            attention_width=model.workload.num_heads * model.workload.head_dim,
            num_adapter_weights=lora.num_parameters(model.adapters),
            tokens=builder.job.config.max_length,
        ),
        peak_flops_per_s=cards.peak_flops_per_s(devices.device_kind),
    )


def _summarize(builder: EngineBuilder) -> None:
    """The run in a few lines: what came out and where it lies."""
    run, config = builder.job.run, builder.job.config
    records = metrics.read(run.metrics)
    summary = metrics.summarize(records)
    evals: list[Any] = [r["eval_loss"] for r in records if "eval_loss" in r]
    first = (
        f"{summary.steps} steps, loss {summary.first_loss:.4f} -> "
        f"{summary.last_loss:.4f}"
    )
    if evals:
        first += f", eval loss {evals[0]:.4f} -> {evals[-1]:.4f}"
    lines = [
        first,
        f"{summary.tokens_per_sec:,.0f} tokens/s",
        f"plan: {run.plan}, {builder.expected}",
        f"adapter: {run.adapter} (loads with PEFT)",
        f"checkpoints: {run.checkpoints}",
    ]
    if config.plan == "auto" and config.memory_budget:
        lines.append(
            f"planned under memory_budget={config.memory_budget} GiB per device; "
            "0 lets a plan use all of a card's pool"
        )
    if config.plot_loss:
        lines.append(f"loss plot: {run.loss_plot}")
    for line in lines:
        _logger.info("%s", line)
