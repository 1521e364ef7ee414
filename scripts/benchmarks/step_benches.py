"""Measures one training step on random weights and tokens; see `scripts/bench.py`."""

import dataclasses
import gc
import pathlib
import platform as python_platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from models import llama_family
from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError, LoraConfig, OptimizerConfig
from mtuner_jax.devices.starting import StartedDevices
from mtuner_jax.engines import compiling, flops, profile_guided
from mtuner_jax.engines.elastic.engine import ElasticEngine
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.numbers import documents, sizes
from mtuner_jax.ops.attention import api as attention
from mtuner_jax.planning import plans, reports
from mtuner_jax.planning.plans import Plan
from mtuner_jax.protocols.states import Batch
from mtuner_jax.runs import pricing, requests, shapes
from mtuner_jax.training import optimizers
from mtuner_jax.weights import random_weights
from scripts.benchmarks.bench_configs import BenchConfig


class Timed(NamedTuple):
    """What the timed steps were, and the state after them.

    Attributes:
      seconds: Of each step, ended by its metrics.
      loss: Of the last step.
      state: After it.
    """

    seconds: list[float]
    loss: float
    state: Any


def measure(config: BenchConfig, devices: StartedDevices) -> dict[str, Any]:
    """Runs one configuration; returns what was predicted and measured."""
    shape = shapes.shape(llama_family.FAMILY, config.model)
    if config.layers:
        shape = shape.with_layers(config.layers)
    lengths = _lengths(config, num_devices=devices.mesh.size)
    request = _request(config, devices, lengths, head_dim=shape.head_dim)
    model = requests.resolve(shape, request)
    plan = _make_plan(config, model, request)
    engine = _make_engine(config, model, plan, devices)
    engine.load()
    state = engine.init()
    rows = random_batch(plan, lengths, vocab_size=model.workload.vocab_size)
    batch = engine.put(rows)
    predicted = _predict(config, model, plan, request)
    print(plans.table(plan), flush=True)
    start = time.perf_counter()
    engine.step.compile(state, engine.weights, batch, engine.arenas)
    compile_s = time.perf_counter() - start
    timed = _timed(engine, state, batch, seconds=config.seconds)
    assert engine.program is not None
    allocated = compiling.compiled_bytes(engine.program)
    print(f"{allocated.describe()}, {compile_s:.1f} s", flush=True)
    extra = _exposed(engine, timed.state, batch) if config.trace else {}
    return (
        _summary(config, model, engine, timed.seconds)
        | predicted
        | {
            "compiled_gib": round(allocated.total / 2**30, 2),
            "compile_s": round(compile_s, 1),
            "loss": round(timed.loss, 4),
            **extra,
        }
    )


def free() -> None:
    """Frees what a case used."""
    jax.clear_caches()
    gc.collect()


def random_batch(
    plan: Plan, lengths: Sequence[Sequence[int]], *, vocab_size: int
) -> Batch:
    """Full rows, every token trained; fields [rows, T].

    Args:
      plan: Whose rows.
      lengths: Of the documents of each row; taken again where the plan has more rows.
      vocab_size: Tokens there are.
    """
    rows = [lengths[row % len(lengths)] for row in range(plan.rows)]
    shape = (plan.rows, sum(rows[0]))
    ids = np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
    every = [length for row in rows for length in row]
    numbers = [number for row in rows for number in range(1, len(row) + 1)]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in every])
    return Batch(
        input_ids=ids,
        targets=np.roll(ids, -1, axis=1),
        weights=np.ones(shape, np.float32),
        segment_ids=np.repeat(np.array(numbers, np.int32), every).reshape(shape),
        positions=positions.reshape(shape),
        sample_ids=np.repeat(np.arange(len(every), dtype=np.int32), every).reshape(
            shape
        ),
    )


def row_lengths(seed: int, *, max_length: int, mean: int) -> list[int]:
    """Lengths of documents that fill a row, log-normal with sigma 1 as chats' are."""
    rng, lengths, left = np.random.default_rng(seed), [], max_length
    while left:
        lengths.append(min(left, max(int(rng.lognormal(np.log(mean) - 0.5, 1.0)), 16)))
        left -= lengths[-1]
    return lengths


def _lengths(config: BenchConfig, *, num_devices: int) -> list[list[int]]:
    """Of the documents of each row of a step."""
    product = config.microbatch * config.accumulation * num_devices
    num_rows = config.global_batch_size or product
    if not config.packing:
        return [[config.max_length]] * num_rows
    return [
        row_lengths(seed, max_length=config.max_length, mean=config.document_tokens)
        for seed in range(num_rows)
    ]


def _request(
    config: BenchConfig,
    devices: StartedDevices,
    lengths: Sequence[Sequence[int]],
    *,
    head_dim: int,
) -> requests.StepRequest:
    dtype = requests.dtype_of(config.dtype, on_gpu=devices.on_gpu)
    return requests.StepRequest(
        name=config.model,
        mesh=devices.spec,
        global_batch_size=len(lengths),
        max_length=config.max_length,
        lora=LoraConfig(r=config.r, lora_dropout=config.lora_dropout),
        dtype=dtype,
        attention=attention.choose(
            config.attention,
            device=attention.Device(
                on_gpu=devices.on_gpu, capability=devices.capability
            ),
            packing=config.packing,
            dtype=dtype,
            head_dim=head_dim,
        ),
        documents=documents.count(lengths, max_length=config.max_length),
        hardware=config.hardware,
        memory_budget=config.memory_budget,
        memory_fraction=devices.memory_fraction,
        device_kind=devices.gpu_kind,
    )


def _make_plan(
    config: BenchConfig, model: requests.ResolvedModel, request: requests.StepRequest
) -> Plan:
    """The plan that was searched, by name and flags, or from a file."""
    if config.plan == "auto":
        inputs = requests.priced(model.workload, request)
        report = pricing.search_plan(inputs)
        print(reports.text(report), flush=True)
        return report.plan
    plan = pricing.given_plan(
        config.plan,
        model.workload,
        mesh_sizes=request.mesh_sizes,
        rows=(config.microbatch, config.accumulation),
        saved=config.saved,
        prefetch=request.mesh.num_devices > 1 and not config.no_prefetch,
        merge_gathers=config.merge_gathers,
        embedding=config.embedding,
        head=config.head,
    )
    return plan if config.plan.endswith(".json") else with_keeps(plan, config)


def with_keeps(plan: Plan, config: BenchConfig) -> Plan:
    """A static plan whose first layers keep weights and whose last ones are a tail."""
    (plain,) = plan.segments
    kept = config.kept_layers or plan.num_layers
    first = dataclasses.replace(
        plain,
        rest_axes=max(plain.rest_axes, config.rest_axes),
        fwd_keep_axes=max(plain.fwd_keep_axes, config.fwd_keep_axes, config.rest_axes),
        bwd_keep_axes=max(plain.bwd_keep_axes, config.bwd_keep_axes, config.rest_axes),
    )
    segments, start = [], 0
    for end in sorted({kept, plan.num_layers - config.tail_layers, plan.num_layers}):
        if end > start:
            segment = first if start < kept else plain
            segments.append(dataclasses.replace(segment, num_layers=end - start))
            start = end
    return dataclasses.replace(
        plan,
        segments=tuple(segments),
        tail_layers=config.tail_layers,
        tail_chunks=config.tail_chunks,
    )


def _make_engine(
    config: BenchConfig,
    model: requests.ResolvedModel,
    plan: Plan,
    devices: StartedDevices,
) -> ElasticEngine:
    spec = StepSpec(
        model=model.decoder,
        plan=plan,
        mesh=devices.mesh,
        adapters=model.adapters,
        dropout_rate=config.lora_dropout,
    )
    guided = devices.on_gpu and spec.mesh.size > 1 and not config.no_profile
    return ElasticEngine(
        spec=spec,
        optimizer=optimizers.adamw(OptimizerConfig(), lambda step: 1e-4),
        max_length=config.max_length,
        load_weights=lambda: random_weights.draw(
            spec.table, spec.mesh, jax.random.key(0)
        ),
        compiler_options=dict(option.split("=", 1) for option in config.xla),
        profile_directory=pathlib.Path(tempfile.mkdtemp()) if guided else None,
    )


def _predict(
    config: BenchConfig,
    model: requests.ResolvedModel,
    plan: Plan,
    request: requests.StepRequest,
) -> dict[str, Any]:
    """What the cost model says of the step; nothing for machines without figures."""
    automatic = config.hardware == "auto"
    if automatic and not request.device_kind:
        print("no prediction: virtual CPU devices have no preset; --hardware names one")
        return {}
    try:
        inputs = requests.priced(model.workload, request)
    except ConfigError as error:
        if not automatic or config.memory_budget:
            raise
        print(f"no prediction: {error}")
        return {}
    report = pricing.price(plan, inputs)
    return {
        "hardware": inputs.hardware.name,
        "predicted_ms": round(1e3 * report.timeline.step_s, 2),
        "predicted_gib": round(report.forecast.total_bytes / 2**30, 2),
    }


def _step(engine: ElasticEngine, state: Any, batch: Batch) -> tuple[Any, float]:
    """(state, loss) after a step; waits for it."""
    state, metrics, engine.arenas = engine.step(
        state, engine.weights, batch, engine.arenas
    )
    return state, float(metrics.loss)


def _timed(engine: ElasticEngine, state: Any, batch: Batch, *, seconds: float) -> Timed:
    """Runs steps; those that compile, profile or warm up are not timed."""
    times: list[float] = []
    loss = float("nan")
    while sum(times) < seconds or len(times) < 3:
        start = time.perf_counter()
        settled = engine.step.settled
        state, loss = _step(engine, state, batch)
        if settled:
            times.append(time.perf_counter() - start)
    return Timed(times, loss, state)


def _exposed(engine: ElasticEngine, state: Any, batch: Batch) -> dict[str, float]:
    """Milliseconds of communication in a step, and of it without computation."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            _step(engine, state, batch)
        total_s, exposed_s = profile_guided.exposed_communication_s(
            pathlib.Path(folder), is_communication=lambda name: "nccl" in name.lower()
        )
    return {
        "communication_ms": round(1e3 * total_s, 1),
        "exposed_ms": round(1e3 * exposed_s, 1),
    }


def _summary(
    config: BenchConfig,
    model: requests.ResolvedModel,
    engine: ElasticEngine,
    times: list[float],
) -> dict[str, Any]:
    """Speed and memory of the timed steps.

    `peak_gib` is the highest of the process so far, of all its cases.
    """
    mesh, workload = engine.spec.mesh, model.workload
    tokens = engine.spec.plan.rows * config.max_length
    median_s = statistics.median(times)
    useful = flops.per_token(
        model.decoder,
        attention_width=workload.num_heads * workload.head_dim,
        num_adapter_weights=lora.num_parameters(model.adapters),
        tokens=config.max_length,
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
