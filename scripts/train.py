"""Fine-tunes a Llama-family model with LoRA on a device mesh.

python scripts/train.py --mesh pcie8
python scripts/train.py --config run.yaml --learning_rate 1e-4 --lora.r 16
"""

import dataclasses
import logging
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
from jax.sharding import Mesh

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_export, metas, step_dirs, store
from mtuner_jax.configs import ConfigError, Platform, RunConfig
from mtuner_jax.data import loading
from mtuner_jax.devices import detection, meshes, platforms
from mtuner_jax.engines import flops
from mtuner_jax.engines.elastic import steps
from mtuner_jax.hardware import cards
from mtuner_jax.protocols.states import Params, TrainState
from mtuner_jax.settings import cli
from mtuner_jax.training import logs, loops, metrics, optimizers, reporters, run_dirs
from scripts import opening, setups

RECIPE = pathlib.Path(__file__).resolve().parent.parent / "examples/default.yaml"
_MAX_CPU_PARAMETERS = 1_000_000_000
_logger = logging.getLogger("scripts.train")


def main(argv: list[str]) -> int:
    """Runs one training run; returns the exit code."""
    try:
        config = read_config(argv)
        with logs.to_console():
            train(config, argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except metrics.NonFiniteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_config(argv: list[str]) -> RunConfig:
    """Flags and YAML; with neither model nor data, the shipped recipe."""

    def parse(arguments: list[str]) -> RunConfig:
        return cli.parse(
            arguments, RunConfig, prog="train.py", description=str(__doc__)
        )

    if any(arg.startswith(("--config", "--help", "-h")) for arg in argv):
        return parse(argv)
    plain = [arg for arg in argv if not arg.startswith("--print")]
    config = parse(plain)
    if config.model or config.dataset.path:
        return parse(argv)
    return parse(["--config", str(RECIPE), *argv])


def train(config: RunConfig, argv: list[str]) -> None:
    """Sets everything up, trains, and writes adapter and summary."""
    place = make_mesh(config)
    resume = step_dirs.find(
        config.resume_from_checkpoint, pathlib.Path(config.output_dir)
    )
    run = run_dirs.claim(config.output_dir, resume_from=resume)
    with logs.to_file(run.log):
        run_dirs.write_config(run, config)
        run_dirs.write_info(run, argv)
        for line in place.lines:
            _logger.info("%s", line)
        opened = opening.open_model(config)
        check_size(config, opened, on_gpu=place.on_gpu)
        rows = rows_per_step(config, place.mesh.size)
        data = loading.load(config, opened.tokenizer, global_batch_size=rows)
        total_steps = loops.num_steps(
            config, steps_per_epoch=data.train.steps_per_epoch
        )
        learning_rate = optimizers.schedule(config, num_steps=total_steps)
        builder = setups.Builder(
            setups.Job(
                config=config,
                opened=opened,
                mesh=place.mesh,
                mesh_spec=place.spec,
                memory_fraction=place.memory_fraction,
                rows=rows,
                optimizer=optimizers.adamw(config, learning_rate),
                learning_rate=learning_rate,
                run=run,
            )
        )
        adapters = run_steps(builder, data, resume, total_steps=total_steps)
        adapter_writer(builder)(jax.device_get(adapters), run.adapter)
        summarize(builder)


def run_steps(
    builder: setups.Builder,
    data: loading.RunData,
    resume: pathlib.Path | None,
    *,
    total_steps: int,
) -> Params:
    """Runs the steps that are left and returns the adapters."""
    job, config = builder.job, builder.job.config
    keeper = loops.Keeper(
        checkpoints=store.Store(
            job.run.checkpoints, save_total_limit=config.save_total_limit
        ),
        meta=metas.RunMeta(
            base_model=job.opened.identity,
            data=data.train.fingerprint(),
            lora=dataclasses.asdict(config.lora),
            seed=config.seed,
            rng="threefry2x32 keyed by seed, module, layer, step, sample, position",
        ),
        write_adapter=adapter_writer(builder),
    )
    with keeper.checkpoints:
        setup = builder.build()
        spec = setup.programs.spec
        state = steps.init_state(spec, job.optimizer)
        state = restore(state, keeper, data, resume)
        if int(state.step) >= total_steps:
            _logger.info(
                "%s is finished: step %d of %d. Raise --max_steps to go on, or "
                "choose another --output_dir",
                job.run.root,
                int(state.step),
                total_steps,
            )
            return state.adapters
        reporter = reporters.Reporter(
            job.run,
            config,
            rates=make_rates(config, spec, job.opened),
            total_steps=total_steps,
            start_step=int(state.step),
        )
        with reporter:
            loop = loops.Loop(config, builder.executor(setup), data=data, keeper=keeper)
            state = loop.run(state, reporter, total_steps=total_steps)
        return state.adapters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where the run executes.

    Attributes:
      mesh: The devices.
      spec: Their mesh by name.
      on_gpu: Whether they are GPUs.
      memory_fraction: Share of a card's memory in XLA's pool; 0 on CPUs.
      lines: What to log.
    """

    mesh: Mesh
    spec: meshes.MeshSpec
    on_gpu: bool
    memory_fraction: float
    lines: tuple[str, ...]


def make_mesh(config: RunConfig) -> Place:
    """Prepares the platform, starts JAX and arranges the devices."""
    found = detection.look()
    on_cpu = platforms.runs_on_cpu(config.platform, found)
    spec = meshes.parse(config.mesh, num_devices=0 if on_cpu else found.num_visible)
    prepared = platforms.prepare(
        config.platform,
        spec.num_devices,
        mesh=spec.name,
        deterministic=config.deterministic,
    )
    return Place(
        mesh=meshes.make(spec, platforms.start(prepared)),
        spec=spec,
        on_gpu=not on_cpu,
        memory_fraction=prepared.memory_fraction,
        lines=(prepared.line, spec.describe()),
    )


def check_size(config: RunConfig, opened: opening.Opened, *, on_gpu: bool) -> None:
    """Refuses a model that a CPU cannot train, unless it was asked for."""
    size = opened.config.num_parameters
    if on_gpu or config.platform is Platform.CPU or size <= _MAX_CPU_PARAMETERS:
        return
    raise ConfigError(
        f"{opened.name} has {size:,} parameters and no accelerator was found; virtual "
        f"CPU devices are for up to {_MAX_CPU_PARAMETERS:,}. Install "
        "`pip install 'mtuner-jax[cuda12]'` on a machine with NVIDIA GPUs, or insist "
        "with --platform cpu"
    )


def rows_per_step(config: RunConfig, num_devices: int) -> int:
    """The global batch in rows; of the three factors only the product counts."""
    product = (
        config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * num_devices
    )
    return config.global_batch_size or product


def adapter_writer(builder: setups.Builder) -> Any:
    """(adapters, folder) -> writes the adapter as PEFT reads it."""
    opened = builder.job.opened
    options = hf_export.AdapterOptions(
        base_name=opened.name, tokenizer=opened.tokenizer
    )

    def write(adapters: Params, folder: pathlib.Path) -> None:
        hf_export.write_adapter(
            folder,
            adapters,
            builder.adapters,
            builder.job.config.lora,
            options=options,
        )

    return write


def restore(
    state: TrainState,
    keeper: loops.Keeper,
    data: loading.RunData,
    path: pathlib.Path | None,
) -> TrainState:
    """The state and data position of a checkpoint, or the fresh ones."""
    if path is None:
        return state
    restored = keeper.checkpoints.restore(
        path, store.abstract_like(state), meta=keeper.meta
    )
    data.train.set_state(restored.data)
    _logger.info("resumed from %s: step %d", path, restored.step)
    return restored.state


def make_rates(
    config: RunConfig, spec: steps.StepSpec, opened: opening.Opened
) -> metrics.Rates:
    """What turns tokens and seconds into speed and MFU."""
    shape = opened.config
    return metrics.Rates(
        num_devices=spec.mesh.size,
        flops_per_token=flops.per_token(
            spec.model,
            attention_width=shape.num_heads * shape.head_dim,
            num_adapter_weights=lora.num_parameters(spec.adapters),
            tokens=config.max_length,
        ),
        peak_flops_per_s=cards.peak_flops_per_s(spec.mesh.devices.flat[0].device_kind),
    )


def summarize(builder: setups.Builder) -> None:
    """The run in a few lines: what came out and where it lies."""
    run, config = builder.job.run, builder.job.config
    records = metrics.read(run.metrics)
    summary = metrics.summarize(records)
    evals = [record["eval_loss"] for record in records if "eval_loss" in record]
    lines = [
        f"{summary.steps} steps, loss {summary.first_loss:.4f} -> "
        f"{summary.last_loss:.4f}"
    ]
    if evals:
        lines[0] += f", eval loss {evals[0]:.4f} -> {evals[-1]:.4f}"
    lines += [
        f"{summary.tokens_per_sec:,.0f} tokens/s",
        f"plan: {run.plan}, {builder.describe()}",
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
