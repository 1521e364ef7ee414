"""Measures the training step on random weights and tokens: tokens/s and memory.

python scripts/bench.py --model llama2-7b --random_init --max_length 4096 --microbatch 4
python scripts/bench.py --random_init --cases cases.txt --output results.jsonl

A file of cases has one configuration a line: flags that are added to the command's.
All run in one process, one after the other, so that only the first pays for the start;
what a case used is freed before the next.
"""

import argparse
import dataclasses
import gc
import json
import logging
import pathlib
import platform as python_platform
import shlex
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from models import llama, llama_configs
from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError, LoraConfig, OptimizerConfig, Platform
from mtuner_jax.devices import detection, meshes, platforms
from mtuner_jax.engines import compiling, flops, profile_guided
from mtuner_jax.engines.elastic import steps
from mtuner_jax.numbers import sizes
from mtuner_jax.ops import attention
from mtuner_jax.planning import plans, reports
from mtuner_jax.protocols.states import Batch
from mtuner_jax.training import optimizers
from mtuner_jax.weights import layouts, random_weights
from scripts import planning_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where cases run.

    Attributes:
      mesh: The devices.
      asked: The mesh as the user named it.
      on_gpu: Whether they are GPUs.
      memory_fraction: Share of a GPU's memory in XLA's pool; 0 on CPUs.
    """

    mesh: jax.sharding.Mesh
    asked: meshes.MeshSpec
    on_gpu: bool
    memory_fraction: float


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Reads the command line, or the flags of a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama2-7b", help="shape, or its folder")
    parser.add_argument("--random_init", action="store_true", required=True)
    parser.add_argument("--mesh", default="auto")
    parser.add_argument("--platform", default=Platform.AUTO, type=Platform)
    parser.add_argument("--plan", default="fsdp", help="auto, fsdp, replicated, file")
    parser.add_argument("--hardware", default="auto", help="preset, name or file")
    parser.add_argument("--memory_budget", type=float, default=0.0, help="GiB, of auto")
    parser.add_argument("--global_batch_size", type=int, default=0, help="of auto")
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
    parser.add_argument("--cases", type=pathlib.Path, help="flags of a case on a line")
    return parser.parse_args(argv)


def read_cases(argv: list[str]) -> list[list[str]]:
    """The command lines to run: the one given, or one for each case of its file."""
    path = parse_args(argv).cases
    if path is None:
        return [argv]
    lines = path.read_text().splitlines()
    return [
        [*argv, *shlex.split(line)]
        for line in lines
        if line.strip() and not line.startswith("#")
    ]


def implementation_of(args: argparse.Namespace, place: Place) -> str:
    """How attention is computed."""
    return attention.choose(
        args.attention, on_gpu=place.on_gpu, packing=args.packing, dtype=args.dtype
    )


def asked(
    args: argparse.Namespace, model: llama.Llama, place: Place
) -> tuple[llama_configs.LlamaConfig, planning_inputs.Request]:
    """What `planning_inputs` makes workloads and inputs of."""
    product = args.microbatch * args.accumulation * place.mesh.size
    request = planning_inputs.Request(
        name=args.model,
        mesh=place.asked,
        global_batch_size=args.global_batch_size or product,
        max_length=args.max_length,
        lora=LoraConfig(r=args.r, lora_dropout=args.lora_dropout),
        dtype=args.dtype,
        attention=implementation_of(args, place),
        hardware=args.hardware,
        memory_budget=args.memory_budget,
        memory_fraction=place.memory_fraction,
        device_kind=place.mesh.devices.flat[0].device_kind if place.on_gpu else "",
    )
    return model.config, request


def predict(
    args: argparse.Namespace, spec: steps.StepSpec, place: Place
) -> dict[str, Any]:
    """What the cost model says of the step; nothing for machines without figures."""
    assert isinstance(spec.model, llama.Llama)
    automatic = args.hardware == "auto"
    if automatic and not place.on_gpu:
        print("no prediction: virtual CPU devices have no preset; --hardware names one")
        return {}
    try:
        inputs = planning_inputs.make(*asked(args, spec.model, place))
    except ConfigError as error:
        if not automatic or args.memory_budget:
            raise
        print(f"no prediction: {error}")
        return {}
    report = planning_inputs.price(spec.plan, inputs)
    return {
        "hardware": inputs.hardware.name,
        "predicted_ms": round(1e3 * report.timeline.step_s, 2),
        "predicted_gib": round(report.forecast.total_bytes / 2**30, 2),
    }


def make_plan(args: argparse.Namespace, model: llama.Llama, place: Place) -> plans.Plan:
    """The plan that was searched, by name, by flags, or from a file."""
    mesh = place.mesh
    workload = planning_inputs.make_workload(*asked(args, model, place))
    mesh_sizes = tuple(mesh.devices.shape)
    if args.plan.endswith(".json"):
        return planning_inputs.read_plan(args.plan, workload, mesh_sizes)
    if args.plan == "auto":
        inputs = planning_inputs.make(*asked(args, model, place))
        report = planning_inputs.search_plan(inputs)
        print(reports.text(report), flush=True)
        return report.plan
    plan = plans.static(
        name=args.plan,
        num_layers=model.num_layers,
        mesh_sizes=mesh_sizes,
        rows=(args.microbatch, args.accumulation),
        saved=plans.Saved(args.saved),
        prefetch=mesh.size > 1 and not args.no_prefetch,
        merge_gathers=args.merge_gathers,
        embedding=args.embedding,
        head=args.head,
        weight_dtype=args.dtype,
        model=workload.shape_name,
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


def start(args: argparse.Namespace) -> Place:
    """Starts JAX on the devices asked for."""
    found = detection.look()
    on_cpu = platforms.runs_on_cpu(args.platform, found)
    spec = meshes.parse(args.mesh, num_devices=0 if on_cpu else found.num_visible)
    prepared = platforms.prepare(args.platform, spec.num_devices, mesh=spec.name)
    print(prepared.line)
    return Place(
        mesh=meshes.make(spec, platforms.start(prepared)),
        asked=spec,
        on_gpu=not on_cpu,
        memory_fraction=prepared.memory_fraction,
    )


def main(argv: list[str]) -> None:
    """Runs the configurations and prints one JSON object for each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cases = read_cases(argv)
    place = start(parse_args(cases[0]))
    for case in cases:
        args = parse_args(case)
        result = measure(args, place)
        line = json.dumps({"arguments": " ".join(case), **result}, sort_keys=True)
        print(line, flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(line + "\n")
        jax.clear_caches()
        gc.collect()


def make_spec(args: argparse.Namespace, place: Place) -> steps.StepSpec:
    """The step of a configuration."""
    config = planning_inputs.shape(args.model)
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers)
    model = llama.Llama(config, attention_implementation=implementation_of(args, place))
    return steps.StepSpec(
        model=model,
        plan=make_plan(args, model, place),
        mesh=place.mesh,
        adapters=lora.resolve(
            LoraConfig(r=args.r), model.linears(), num_layers=model.num_layers
        ),
        dropout_rate=args.lora_dropout,
    )


def measure(args: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Runs one configuration."""
    spec = make_spec(args, place)
    plan, model, mesh, on_gpu = spec.plan, spec.model, spec.mesh, place.on_gpu
    optimizer = optimizers.adamw(OptimizerConfig(), lambda step: 1e-4)
    table = layouts.table(model, plan, mesh, dtype=args.dtype)
    weights = random_weights.draw(table, mesh, jax.random.key(0))
    state = steps.init_state(spec, optimizer)
    rows = random_batch(plan, max_length=args.max_length, vocab_size=model.vocab_size)
    batch = steps.put(steps.cut(rows, plan), mesh)
    arenas = steps.init_arenas(spec, weights, max_length=args.max_length)
    guided = on_gpu and mesh.size > 1 and not args.no_profile
    options = compiling.options(on_gpu=on_gpu, merge_gathers=plan.merge_gathers)
    options |= dict(option.split("=", 1) for option in args.xla)
    step = profile_guided.GuidedStep(
        steps.build_train(spec, optimizer),
        compiler_options=options,
        profile_directory=pathlib.Path(tempfile.mkdtemp()) if guided else None,
    )
    predicted = predict(args, spec, place)
    print(plans.table(plan), flush=True)
    start = time.perf_counter()
    compiled = step.compile(state, weights, batch, arenas)
    compile_s = time.perf_counter() - start
    times, loss, arguments = timed(
        step, state, (weights, batch, arenas), seconds=args.seconds
    )
    allocated = compiling.compiled_bytes(step.compiled or compiled)
    print(f"{allocated.describe()}, {compile_s:.1f} s", flush=True)
    extra = exposed(step, arguments) if args.trace else {}
    return (
        summary(args, spec, times)
        | predicted
        | {
            "compiled_gib": round(allocated.total / 2**30, 2),
            "compile_s": round(compile_s, 1),
            "loss": round(loss, 4),
            **extra,
        }
    )


def summary(
    args: argparse.Namespace, spec: steps.StepSpec, times: list[float]
) -> dict[str, Any]:
    """Speed and memory of the timed steps.

    `peak_gib` is the highest of the process so far, of all its cases.
    """
    model, mesh = spec.model, spec.mesh
    assert isinstance(model, llama.Llama)
    tokens = spec.plan.rows * args.max_length
    median_s = statistics.median(times)
    useful = flops.per_token(
        model,
        attention_width=model.config.num_heads * model.config.head_dim,
        num_adapter_weights=lora.num_parameters(spec.adapters),
        tokens=args.max_length,
    )
    stats = mesh.devices.flat[0].memory_stats() or {}
    peak_bytes = stats.get("peak_bytes_in_use", 0)
    print(
        f"{tokens / median_s:,.0f} tokens/s, {1e3 * median_s:.2f} ms "
        f"(median of {len(times)}), peak {sizes.gib(peak_bytes)}"
    )
    return {
        "device": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "versions": f"jax {jax.__version__}, python {python_platform.python_version()}",
        "tokens_per_s": round(tokens / median_s, 1),
        "step_ms": round(1e3 * median_s, 2),
        "step_ms_min_max": [round(1e3 * min(times), 2), round(1e3 * max(times), 2)],
        "steps": len(times),
        "tflops_per_device": round(useful * tokens / median_s / mesh.size / 1e12, 1),
        "peak_gib": round(peak_bytes / 2**30, 2),
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as problem:
        sys.exit(f"error: {problem}")
