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
import jax.numpy as jnp
import opening
from jax.sharding import Mesh

from models import llama, llama_hf_names
from mtuner_jax import accelerators, meshes, platforms, sizes
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_export, hf_import, metas, step_dirs, store
from mtuner_jax.configs import ConfigError, Platform, RunConfig
from mtuner_jax.engines import (
    base_weights,
    compiling,
    elastic_step,
    flops,
    profile_guided,
)
from mtuner_jax.engines.states import Params, TrainState
from mtuner_jax.ops import attention
from mtuner_jax.planning import plans
from mtuner_jax.training import (
    cli,
    logs,
    loops,
    metrics,
    optimizers,
    peak_flops,
    reports,
    run_dirs,
)
from mtuner_jax.training.data import loading

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
    mesh, on_gpu, lines = make_mesh(config)
    resume = step_dirs.find(
        config.resume_from_checkpoint, pathlib.Path(config.output_dir)
    )
    run = run_dirs.claim(config.output_dir, resume_from=resume)
    with logs.to_file(run.log):
        run_dirs.write_config(run, config)
        run_dirs.write_info(run, argv)
        for line in lines:
            _logger.info("%s", line)
        opened = opening.open_model(config)
        check_size(config, opened, on_gpu=on_gpu)
        rows = rows_per_step(config, mesh.size)
        data = loading.load(config, opened.tokenizer, global_batch_size=rows)
        total_steps = loops.num_steps(
            config, steps_per_epoch=data.train.steps_per_epoch
        )
        spec = make_spec(config, opened, mesh, rows=rows, on_gpu=on_gpu)
        run.plan.write_text(plans.to_json(spec.plan))
        learning_rate = optimizers.schedule(config, num_steps=total_steps)
        optimizer = optimizers.adamw(config, learning_rate)
        weights = load_weights(config, opened, spec, on_gpu=on_gpu)
        state = elastic_step.init_state(spec, optimizer)
        keeper = loops.Keeper(
            checkpoints=store.Store(
                run.checkpoints, save_total_limit=config.save_total_limit
            ),
            meta=metas.RunMeta(
                base_model=opened.identity,
                data=data.train.fingerprint(),
                lora=dataclasses.asdict(config.lora),
                seed=config.seed,
                rng="threefry2x32 keyed by seed, module, layer, step, sample, position",
            ),
            write_adapter=adapter_writer(config, opened, spec),
        )
        with keeper.checkpoints:
            state = restore(state, keeper, data, resume)
            if int(state.step) >= total_steps:
                _logger.info(
                    "%s is finished: step %d of %d. Raise --max_steps to go on, or "
                    "choose another --output_dir",
                    run.root,
                    int(state.step),
                    total_steps,
                )
            else:
                programs = make_programs(config, spec, optimizer, learning_rate)
                loop = loops.Loop(
                    config,
                    programs,
                    weights=weights,
                    arenas=elastic_step.init_arenas(
                        spec, weights, max_length=config.max_length
                    ),
                    data=data,
                    keeper=keeper,
                )
                reporter = reports.Reporter(
                    run,
                    config,
                    rates=make_rates(config, spec, opened),
                    total_steps=total_steps,
                    start_step=int(state.step),
                )
                with reporter:
                    state = loop.run(state, reporter, total_steps=total_steps)
        keeper.write_adapter(jax.device_get(state.adapters), run.adapter)
        summarize(run, config)


def make_mesh(config: RunConfig) -> tuple[Mesh, bool, list[str]]:
    """Prepares the platform, starts JAX and arranges the devices.

    Returns:
      The mesh, whether it is one of GPUs, and what to log about it.
    """
    found = accelerators.look()
    on_cpu = platforms.runs_on_cpu(config.platform, found)
    spec = meshes.parse(config.mesh, num_devices=0 if on_cpu else found.num_visible)
    prepared = platforms.prepare(
        config.platform,
        spec.num_devices,
        mesh=spec.name,
        deterministic=config.deterministic,
    )
    mesh = meshes.make(spec, platforms.start(prepared))
    return mesh, not on_cpu, [prepared.line, spec.describe()]


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


def make_plan(
    config: RunConfig, model: llama.Llama, mesh: Mesh, *, rows: int, on_gpu: bool
) -> plans.Plan:
    """The plan by name, or from a file."""
    if config.plan.endswith(".json"):
        plan = plans.read(pathlib.Path(config.plan))
        if plan.rows < rows:
            raise ConfigError(
                f"plan {config.plan} runs {plan.rows} rows a step, the global batch "
                f"is {rows}; plan again, or set global_batch_size={plan.rows}"
            )
        return plan
    per_device = -(-rows // mesh.size)
    microbatch = min(config.per_device_train_batch_size, per_device)
    saved = (
        plans.Saved.LAYER_INPUT
        if config.gradient_checkpointing
        else plans.Saved.ATTENTION_AND_GATES
    )
    tokens = mesh.size * microbatch * config.max_length
    on_several_gpus = on_gpu and mesh.size > 1
    return plans.static(
        name=config.plan,
        num_layers=model.num_layers,
        mesh_sizes=tuple(mesh.devices.shape),
        rows=(microbatch, -(-per_device // microbatch)),
        saved=saved,
        prefetch=on_several_gpus,
        merge_gathers=on_several_gpus,
        # Moving the tokens' vectors is cheaper than moving the table.
        embedding=(
            plans.Table.SPLIT if tokens < model.vocab_size else plans.Table.GATHERED
        ),
        weight_dtype=base_dtype(config, on_gpu=on_gpu),
    )


def make_spec(
    config: RunConfig, opened: opening.Opened, mesh: Mesh, *, rows: int, on_gpu: bool
) -> elastic_step.StepSpec:
    """Model, plan and adapters, joined; each said in a line."""
    implementation = attention.choose(
        config.attention,
        on_gpu=on_gpu,
        packing=config.packing,
        dtype=base_dtype(config, on_gpu=on_gpu),
    )
    model = llama.Llama(opened.config, attention_implementation=implementation)
    specs = lora.resolve(config.lora, model.linears(), num_layers=model.num_layers)
    plan = make_plan(config, model, mesh, rows=rows, on_gpu=on_gpu)
    _logger.info("model %s: %s", opened.name, opened.path)
    _logger.info("%s", lora.describe(specs, num_frozen=model.num_parameters))
    _logger.info("plan %s, attention %s:", config.plan, implementation)
    for line in plans.table(plan).splitlines():
        _logger.info("  %s", line)
    if plan.rows > rows:
        _logger.warning("%d rows of each step are padding", plan.rows - rows)
    return elastic_step.StepSpec(
        model=model,
        plan=plan,
        mesh=mesh,
        adapters=specs,
        dropout_rate=config.lora.lora_dropout,
        seed=config.seed,
    )


def base_dtype(config: RunConfig, *, on_gpu: bool) -> str:
    """Dtype of the frozen weights and of computation."""
    if config.dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return config.dtype


def load_weights(
    config: RunConfig,
    opened: opening.Opened,
    spec: elastic_step.StepSpec,
    *,
    on_gpu: bool,
) -> Params:
    """The frozen weights in their shardings, from disk or random."""
    dtype = jnp.dtype(base_dtype(config, on_gpu=on_gpu))
    abstract = base_weights.layout(spec.model, spec.plan, spec.mesh, dtype=dtype)
    _logger.info(
        "frozen weights: %s in %s per device",
        sizes.gib(base_weights.num_bytes(abstract)),
        dtype.name,
    )
    if config.random_init:
        return base_weights.random(abstract, spec.plan, jax.random.key(config.seed))
    names = base_weights.locate(llama_hf_names.tensors(opened.config), spec.plan)
    return hf_import.load(opened.source, names, abstract)


def adapter_writer(
    config: RunConfig, opened: opening.Opened, spec: elastic_step.StepSpec
) -> Any:
    """(adapters, folder) -> writes the adapter as PEFT reads it."""
    options = hf_export.AdapterOptions(
        base_name=opened.name, tokenizer=opened.tokenizer
    )

    def write(adapters: Params, folder: pathlib.Path) -> None:
        hf_export.write_adapter(
            folder, adapters, spec.adapters, config.lora, options=options
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


def make_programs(
    config: RunConfig, spec: elastic_step.StepSpec, optimizer: Any, learning_rate: Any
) -> loops.Programs:
    """The programs of the run; on several GPUs the step is compiled by a profile."""
    on_gpu = spec.mesh.devices.flat[0].platform != "cpu"
    options = compiling.options(on_gpu=on_gpu, merge_gathers=spec.plan.merge_gathers)
    guided = on_gpu and spec.mesh.size > 1 and config.profile_guided
    cache = accelerators.jax_option("jax_compilation_cache_dir") or ""
    directory = pathlib.Path(cache) / "profiles"
    return loops.Programs(
        spec=spec,
        train=profile_guided.GuidedStep(
            elastic_step.build_train(spec, optimizer),
            compiler_options=options,
            profile_directory=directory if guided else None,
        ),
        evaluate=elastic_step.build_eval(spec, compiler_options=options),
        learning_rate=learning_rate,
    )


def make_rates(
    config: RunConfig, spec: elastic_step.StepSpec, opened: opening.Opened
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
        peak_flops_per_s=peak_flops.peak_flops_per_s(
            spec.mesh.devices.flat[0].device_kind
        ),
    )


def summarize(run: run_dirs.RunDir, config: RunConfig) -> None:
    """The run in a few lines: what came out and where it lies."""
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
        f"adapter: {run.adapter} (loads with PEFT)",
        f"checkpoints: {run.checkpoints}",
    ]
    if config.plot_loss:
        lines.append(f"loss plot: {run.loss_plot}")
    for line in lines:
        _logger.info("%s", line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
