"""One LoRA run from its configuration to its adapter."""

import dataclasses
import logging
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import folders, hf_export, metas, step_dirs, store
from mtuner_jax.configs import ConfigError, Platform, RunConfig, UserError
from mtuner_jax.data import changes, loading
from mtuner_jax.devices import starting
from mtuner_jax.engines import flops
from mtuner_jax.hardware import cards
from mtuner_jax.protocols.engines import State
from mtuner_jax.protocols.states import Params
from mtuner_jax.runs import (
    answers,
    opening,
    pricing,
    requests,
    silent_adapters,
    warm_starts,
)
from mtuner_jax.runs.families import Family
from mtuner_jax.runs.lora_engines import EngineBuilder, LoraJob
from mtuner_jax.training import (
    executors,
    logs,
    loops,
    metrics,
    optimizers,
    progress,
    reporters,
    run_dirs,
    stopping,
)

_MAX_CPU_PARAMETERS = 1_000_000_000
_logger = logging.getLogger(__name__)


def train(config: RunConfig, family: Family, *, argv: Sequence[str] = ()) -> int:
    """Sets everything up, trains, and writes adapter and summary.

    Nothing is written before it is known that the run may start: a folder that holds
    another run stays as it is.

    Args:
      config: The run.
      family: Of the model.
      argv: The command line, for `run_info.json`.

    Returns:
      The exit code: 0 for a finished run, `stopping.STOPPED` for one that a signal
      has stopped and that goes on when it is started again.

    Raises:
      ConfigError: A setting that cannot be, or memory that does not suffice.
      SaveError: A checkpoint that could not be written.
      NonFiniteError: A loss or gradient is NaN or infinite.
    """
    with stopping.watched() as stop, logs.to_file() as log:
        try:
            session = _prepare(config, family, log, argv=argv)
            return _run_steps(session, stop)
        except UserError as error:
            _logger.error("%s", error, extra=logs.FILE_ONLY)
            raise


def shown_samples(config: RunConfig, family: Family) -> Iterator[str]:
    """The run's first `show_samples` samples as text, see `loading.show`."""
    opened = opening.open_model(family, config)
    return loading.show(config, opened.tokenizer, num_rows=opened.shape.vocab_size)


def _prepare(
    config: RunConfig, family: Family, log: logs.RunLog, *, argv: Sequence[str]
) -> "_Session":
    """Everything before the first step; writes nothing before it is accepted."""
    devices = starting.start(
        config.mesh, config.platform, deterministic=config.deterministic
    )
    resume = step_dirs.find(
        config.resume_from_checkpoint, pathlib.Path(config.output_dir)
    )
    run = run_dirs.claim(config.output_dir, resume_from=resume)
    for line in devices.lines:
        _logger.info("%s", line)
    opened = opening.open_model(family, config)
    pricing.check_named(config, devices.spec, device_kind=devices.gpu_kind)
    answers.read_prompts(config)  # refused here, not after the plan
    _check_size(config, opened, on_gpu=devices.on_gpu)
    if resume is not None:  # of all but the data, before it is read
        saved = step_dirs.read_meta(resume)["run"]
        metas.check_same_run(resume, saved, _meta(config, opened, saved["data"]))
    rows = _rows_per_step(config, devices.mesh.size)
    data = loading.load(
        config,
        opened.tokenizer,
        global_batch_size=rows,
        num_rows=opened.shape.vocab_size,
    )
    total_steps = loops.num_steps(config, steps_per_epoch=data.train.steps_per_epoch)
    num_devices = devices.mesh.size
    requests.check_rows(rows, len(data.train.rows), num_devices=num_devices)
    learning_rate = optimizers.schedule(config, num_steps=total_steps)
    job = LoraJob(
        config=config,
        opened=opened,
        devices=devices,
        rows=rows,
        documents=data.documents,
        optimizer=optimizers.adamw(config, learning_rate),
        learning_rate=learning_rate,
        run=run,
    )
    builder = EngineBuilder(job)
    keeper = _keeper(builder, data)
    if resume is not None:
        _check_same_run(resume, keeper.meta, data)
    adapters = _warm_start(builder, resume)
    engine = builder.build(lambda: _accept(job, data, log, argv=argv))
    return _Session(
        builder=builder,
        executor=builder.executor(engine),
        data=data,
        keeper=keeper,
        resume=resume,
        adapters=adapters,
        total_steps=total_steps,
    )


class _Session(NamedTuple):
    """What the steps of a run need.

    Attributes:
      builder: Of the engine.
      executor: Of the engine that was built first.
      data: The run's.
      keeper: Where the run is kept.
      resume: The checkpoint to go on from; None to start anew.
      adapters: Those to begin with; None for fresh ones.
      total_steps: The step at which the run will end.
    """

    builder: EngineBuilder
    executor: executors.Executor
    data: loading.RunData
    keeper: loops.Keeper
    resume: pathlib.Path | None
    adapters: warm_starts.Adapters | None
    total_steps: int


def _warm_start(
    builder: EngineBuilder, resume: pathlib.Path | None
) -> warm_starts.Adapters | None:
    """The adapters of `init_adapter`, unless the run has begun already."""
    config, model = builder.job.config, builder.model
    if not config.init_adapter:
        return None
    if resume is not None:
        _logger.info(
            "init_adapter=%s is not read again: the run goes on from %s",
            config.init_adapter,
            resume,
        )
        return None
    adapters = warm_starts.read(
        config.init_adapter, config.lora, model.adapters, decoder=model.decoder
    )
    _logger.info("the adapters begin as those of %s", config.init_adapter)
    return adapters


def _accept(
    job: LoraJob, data: loading.RunData, log: logs.RunLog, *, argv: Sequence[str]
) -> None:
    """The first writes into the run's folder."""
    run_dirs.accept(job.run, job.config, log, argv=argv)
    if jax.process_index() == 0:
        changes.write(job.run.rows, changes.rows_of(data.dataset))


def _check_same_run(
    resume: pathlib.Path, meta: metas.RunMeta, data: loading.RunData
) -> None:
    """Compares everything with the checkpoint, before planning and loading.

    Raises:
      CheckpointMismatch: It is another run's.
    """
    saved = step_dirs.read_meta(resume)["run"]
    before: Any = saved["data"]
    rows = ""
    if isinstance(before, dict) and before.get("dataset") != data.dataset.digest:
        earlier = run_dirs.RunDir(root=resume.absolute().parent.parent)
        rows = changes.told(changes.read(earlier.rows), data.dataset)
    metas.check_same_run(resume, saved, meta, rows=rows)


def _run_steps(session: _Session, stop: stopping.Stop) -> int:
    """Runs the steps that are left, writes the adapter, and says how it ended."""
    job, keeper, total_steps = session.builder.job, session.keeper, session.total_steps
    loop = loops.Loop(
        config=job.config,
        executor=session.executor,
        data=session.data,
        keeper=keeper,
        learning_rate=job.learning_rate,
        stop=stop,
        hooks=(
            silent_adapters.hook(session.builder.model.adapters),
            *answers.hooks(
                session.builder,
                session.data,
                lambda state: session.executor.engine.export(state),
            ),
        ),
    )
    with keeper.checkpoints:
        state = _first_state(session, loop)
        start_step = int(state.step)
        if start_step >= total_steps and not loop.owes_evaluation(
            start_step, total_steps=total_steps
        ):
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
                rates=_rates(session.builder),
                total_steps=total_steps,
                start_step=start_step,
            )
            with reporter:
                state = loop.run(state, reporter, total_steps=total_steps)
        adapters = session.executor.engine.export(state)
    step = int(state.step)
    with store.as_save_error(job.run.adapter):
        keeper.write_adapter(adapters, job.run.adapter)
        _keep_best(job, loop)
    owed = step < total_steps or loop.owes_evaluation(step, total_steps=total_steps)
    if loop.stopped and owed and not loop.stops_early:
        _logger.info(
            "stopped by %s after step %d of %d, saved in %s; the same command goes on "
            "from there",
            stop.asked or "another process",
            step,
            total_steps,
            job.run.checkpoints / str(step),
        )
        return stopping.STOPPED
    _summarize(session.builder, loop)
    if job.config.compare_answers:
        session.executor.engine.release()
        answers.log_comparison(session.builder, session.data, adapters)
    return 0


def _first_state(session: _Session, loop: loops.Loop) -> State:
    """The state to begin with: fresh, or a checkpoint's."""
    engine, keeper, resume = session.executor.engine, session.keeper, session.resume
    if resume is None:
        state = engine.init()
        adapters = session.adapters
        return warm_starts.place(adapters, state) if adapters else state
    restored = keeper.checkpoints.restore(
        resume, engine.abstract_state(), meta=keeper.meta
    )
    session.data.train.set_state(restored.data)
    found = restored.notes.get("progress", {"evaluated": restored.step})
    loop.progress = progress.from_json(found)
    _logger.info("resumed from %s: step %d", resume, restored.step)
    return restored.state


def _keep_best(job: LoraJob, loop: loops.Loop) -> None:
    """Copies the adapter of the best checkpoint to where users find it."""
    source = job.run.checkpoints / str(loop.progress.best_step) / "adapter"
    if job.config.save_best and source.is_dir() and jax.process_index() == 0:
        with folders.replaced(job.run.adapter_best, owned=("*",)) as temporary:
            shutil.copytree(source, temporary, dirs_exist_ok=True)


def _keeper(builder: EngineBuilder, data: loading.RunData) -> loops.Keeper:
    """Where the run is kept, and as what."""
    job, config, opened = builder.job, builder.job.config, builder.job.opened
    options = hf_export.AdapterOptions(
        base_name=opened.name, tokenizer=opened.tokenizer
    )

    def write(adapters: Params, folder: pathlib.Path) -> None:
        hf_export.write_adapter(
            folder, adapters, builder.model.adapters, config.lora, options=options
        )

    return loops.Keeper(
        checkpoints=store.Store(
            job.run.checkpoints, save_total_limit=config.save_total_limit
        ),
        meta=_meta(config, opened, data.train.fingerprint()),
        write_adapter=write,
    )


def _meta(
    config: RunConfig, opened: opening.OpenedModel, data: metas.Json
) -> metas.RunMeta:
    """The run's identity, with the fingerprint of its data."""
    return metas.RunMeta(
        base_model=opened.identity,
        data=data,
        lora=dataclasses.asdict(config.lora),
        seed=config.seed,
        rng="threefry2x32 keyed by seed, module, layer, step, sample, position",
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


def _summarize(builder: EngineBuilder, loop: loops.Loop) -> None:
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
    best = loop.progress
    if loop.stops_early:
        lines.append(
            f"stopped early: {best.without_gain} evaluations without a lower loss; "
            "early_stopping_patience=0 goes on"
        )
    if config.save_best and best.best_step >= 0:
        lines.append(
            f"best: step {best.best_step}, eval loss {best.best_loss:.4f}: "
            f"{run.adapter_best}"
        )
    if config.plan == "auto" and config.memory_budget:
        lines.append(
            f"planned under memory_budget={config.memory_budget} GiB per device; "
            "0 lets a plan use all of a card's pool"
        )
    if config.plot_loss:
        lines.append(f"loss plot: {run.loss_plot}")
    for line in lines:
        _logger.info("%s", line)
