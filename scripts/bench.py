"""Measures the training step on random weights and tokens: tokens/s and memory.

python scripts/bench.py --model llama2-7b --random_init --max_length 4096 --microbatch 4
"""

import argparse
import dataclasses
import json
import logging
import pathlib
import platform as python_platform
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from models import llama, llama_sizes
from mtuner_jax import accelerators, meshes, platforms, sizes
from mtuner_jax.adapters import lora
from mtuner_jax.configs import LoraConfig, OptimizerConfig, Platform
from mtuner_jax.engines import (
    base_weights,
    compiling,
    elastic_step,
    flops,
    profile_guided,
)
from mtuner_jax.engines.states import Batch
from mtuner_jax.ops import attention
from mtuner_jax.planning import plans
from mtuner_jax.training import optimizers


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b", choices=llama_sizes.SIZES)
    parser.add_argument("--random_init", action="store_true", required=True)
    parser.add_argument("--mesh", default="auto")
    parser.add_argument("--platform", default=Platform.AUTO, type=Platform)
    parser.add_argument("--plan", default="fsdp", help="fsdp, replicated or a file")
    parser.add_argument("--saved", default=plans.Saved.ATTENTION_AND_GATES)
    parser.add_argument("--microbatch", type=int, default=1, help="rows per device")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rest_axes", type=int, default=0)
    parser.add_argument("--fwd_keep_axes", type=int, default=0)
    parser.add_argument("--bwd_keep_axes", type=int, default=0)
    parser.add_argument(
        "--kept_layers", type=int, default=0, help="first layers the keeps hold for"
    )
    parser.add_argument("--no_prefetch", action="store_true")
    parser.add_argument("--merge_gathers", action="store_true")
    parser.add_argument("--tail_layers", type=int, default=0)
    parser.add_argument("--tail_chunks", type=int, default=1)
    parser.add_argument("--embedding", default="gathered", type=plans.Table)
    parser.add_argument("--head", default="gathered", type=plans.Table)
    parser.add_argument("--no_profile", action="store_true", help="no guided compile")
    parser.add_argument(
        "--xla", action="append", default=[], help="option=value for the compiler"
    )
    parser.add_argument("--trace", action="store_true", help="exposed communication")
    parser.add_argument("--max_length", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--lora_dropout", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of timed steps")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for tests")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to append to")
    return parser.parse_args()


def make_plan(args: argparse.Namespace, model: llama.Llama, mesh) -> plans.Plan:
    """The plan by name, by flags, or from a file."""
    if args.plan.endswith(".json"):
        return plans.read(pathlib.Path(args.plan))
    settings = {
        "saved": plans.Saved(args.saved),
        "prefetch": mesh.size > 1 and not args.no_prefetch,
        "merge_gathers": args.merge_gathers,
        "embedding": args.embedding,
        "head": args.head,
        "weight_dtype": args.dtype,
    }
    plan = plans.static(
        name=args.plan,
        num_layers=model.num_layers,
        mesh_sizes=tuple(mesh.devices.shape),
        rows=(args.microbatch, args.accumulation),
        **settings,
    )
    kept = args.kept_layers or model.num_layers
    (plain,) = plan.segments
    first = dataclasses.replace(
        plain,
        num_layers=kept,
        rest_axes=max(plain.rest_axes, args.rest_axes),
        fwd_keep_axes=max(plain.fwd_keep_axes, args.fwd_keep_axes, args.rest_axes),
        bwd_keep_axes=max(plain.bwd_keep_axes, args.bwd_keep_axes, args.rest_axes),
    )
    counts = sorted({kept, model.num_layers - args.tail_layers, model.num_layers})
    parts, start = [], 0
    for end in counts:
        if end > start:
            part = first if start < kept else plain
            parts.append(dataclasses.replace(part, num_layers=end - start))
            start = end
    return dataclasses.replace(
        plan,
        segments=tuple(parts),
        tail_layers=args.tail_layers,
        tail_chunks=args.tail_chunks,
    )


def random_batch(plan: plans.Plan, *, max_length: int, vocab_size: int) -> Batch:
    """Rows of one full document each, every token trained."""
    shape = (plan.rows, max_length)
    ids = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    ones = np.ones(shape, np.int32)
    return Batch(
        input_ids=ids,
        targets=np.roll(ids, -1, axis=1),
        weights=ones.astype(np.float32),
        segment_ids=ones,
        positions=np.broadcast_to(np.arange(max_length, dtype=np.int32), shape),
        sample_ids=np.broadcast_to(
            np.arange(plan.rows, dtype=np.int32)[:, None], shape
        ),
    )


def timed(step, state, inputs, *, seconds: float) -> tuple[list[float], float, tuple]:
    """Step times in seconds, each ended by its metrics, and the last loss."""
    weights, batch, arenas = inputs
    times: list[float] = []
    loss = float("nan")
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        settled = step.settled
        state, metrics, arenas = step(state, weights, batch, arenas)
        loss = float(metrics.loss)
        if settled:
            times.append(time.perf_counter() - start)
    return times, loss, (state, weights, batch, arenas)


def exposed(step, arguments) -> dict[str, float]:
    """Milliseconds of communication in a step, and of it without computation."""
    state, weights, batch, arenas = arguments
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, metrics, arenas = step(state, weights, batch, arenas)
            float(metrics.loss)
        total_s, exposed_s = profile_guided.exposed_communication_s(
            pathlib.Path(folder), is_communication=lambda name: "nccl" in name.lower()
        )
    return {
        "communication_ms": round(1e3 * total_s, 1),
        "exposed_ms": round(1e3 * exposed_s, 1),
    }


def main() -> None:
    """Builds one configuration, runs it and prints one JSON object."""
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = accelerators.look()
    on_cpu = platforms.runs_on_cpu(args.platform, found)
    mesh_spec = meshes.parse(args.mesh, num_devices=0 if on_cpu else found.num_visible)
    prepared = platforms.prepare(
        args.platform, mesh_spec.num_devices, mesh=mesh_spec.name
    )
    print(prepared.line)
    mesh = meshes.make(mesh_spec, platforms.start(prepared))
    config = llama_sizes.SIZES[args.model]
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    implementation = attention.choose(
        args.attention, on_gpu=not on_cpu, packing=args.packing, dtype=args.dtype
    )
    model = llama.Llama(config, attention_implementation=implementation)
    plan = make_plan(args, model, mesh)
    specs = lora.resolve(
        LoraConfig(r=args.r), model.linears(), num_layers=model.num_layers
    )
    spec = elastic_step.StepSpec(
        model=model,
        plan=plan,
        mesh=mesh,
        adapters=specs,
        dropout_rate=args.lora_dropout,
    )
    optimizer = optimizers.adamw(OptimizerConfig(), lambda step: 1e-4)
    abstract = base_weights.layout(model, plan, mesh, dtype=jnp.dtype(args.dtype))
    weights = base_weights.random(abstract, jax.random.key(0))
    state = elastic_step.init_state(spec, optimizer)
    rows = random_batch(plan, max_length=args.max_length, vocab_size=model.vocab_size)
    batch = elastic_step.put(elastic_step.cut(rows, plan), mesh)
    arenas = elastic_step.init_arenas(spec, weights, max_length=args.max_length)
    guided = not on_cpu and mesh.size > 1 and not args.no_profile
    options = compiling.options(on_gpu=not on_cpu, merge_gathers=plan.merge_gathers)
    options |= dict(option.split("=", 1) for option in args.xla)
    step = profile_guided.GuidedStep(
        elastic_step.build_train(spec, optimizer),
        compiler_options=options,
        profile_directory=pathlib.Path(tempfile.mkdtemp()) if guided else None,
    )
    print(plans.table(plan))
    start = time.perf_counter()
    compiled = step.compile(state, weights, batch, arenas)
    compile_s = time.perf_counter() - start
    times, loss, arguments = timed(
        step, state, (weights, batch, arenas), seconds=args.seconds
    )
    allocated = compiling.compiled_bytes(step.compiled or compiled)
    print(f"{allocated.describe()}, {compile_s:.1f} s")
    extra = exposed(step, arguments) if args.trace else {}
    report(args, mesh, plan, times, (compile_s, allocated.total, loss, extra))


def report(args, mesh, plan, times, compiled) -> None:
    """Prints the result, and appends it to the output file."""
    compile_s, allocated_bytes, loss, extra = compiled
    tokens = plan.rows * args.max_length
    median_s = statistics.median(times)
    stats = mesh.devices.flat[0].memory_stats() or {}
    model = llama.Llama(
        dataclasses.replace(
            llama_sizes.SIZES[args.model],
            num_layers=args.layers or llama_sizes.SIZES[args.model].num_layers,
        )
    )
    specs = lora.resolve(
        LoraConfig(r=args.r), model.linears(), num_layers=model.num_layers
    )
    useful = flops.per_token(
        model,
        attention_width=model.config.num_heads * model.config.head_dim,
        num_adapter_weights=lora.num_parameters(specs),
        tokens=args.max_length,
    )
    peak_bytes = stats.get("peak_bytes_in_use", 0)
    result = {
        "arguments": " ".join(sys.argv[1:]),
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": f"jax {jax.__version__}, python {python_platform.python_version()}",
        "tokens_per_s": round(tokens / median_s, 1),
        "step_ms": round(1e3 * median_s, 2),
        "step_ms_min_max": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
        "steps": len(times),
        "tflops_per_device": round(useful * tokens / median_s / mesh.size / 1e12, 1),
        "compiled_gib": round(allocated_bytes / 2**30, 2),
        "peak_gib": round(peak_bytes / 2**30, 2),
        "compile_s": round(compile_s, 1),
        "loss": round(loss, 4),
        **extra,
    }
    print(
        f"{result['tokens_per_s']:,.0f} tokens/s, {result['step_ms']} ms "
        f"(median of {len(times)}), peak {sizes.gib(peak_bytes)}"
    )
    line = json.dumps(result, sort_keys=True)
    print(line)
    if args.output:
        with args.output.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
