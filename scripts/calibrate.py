"""Measures this machine for the planner, in about a minute.

python scripts/calibrate.py
python scripts/calibrate.py --mesh 2x4 --name mybox --output mybox.json

Writes a JSON file that `--hardware` understands by name or path; a file of the same
name as a preset replaces the preset's figures. CPUs are measured with small sizes.
"""

import argparse
import dataclasses
import datetime
import json
import logging
import math
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax

from models import llama, llama_configs
from mtuner_jax.calibration import benches, sections
from mtuner_jax.configs import ConfigError, Platform
from mtuner_jax.devices import detection, meshes, platforms
from mtuner_jax.hardware import boxes, machines, peak_flops
from mtuner_jax.planning import workloads
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import kernels
from mtuner_jax.planning.plans import Saved
from mtuner_jax.planning.sites import Site

_RANK = 16


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="auto", help="preset, auto, or 2x2x2")
    parser.add_argument("--platform", default=Platform.AUTO, type=Platform)
    parser.add_argument("--name", default="", help="default: the preset's, or by card")
    parser.add_argument(
        "--output", type=pathlib.Path, help="default: where it is found"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, for tests")
    return parser.parse_args(argv)


def make_bench(args: argparse.Namespace) -> benches.Bench:
    """Starts JAX on the devices asked for."""
    found = detection.look()
    on_cpu = platforms.runs_on_cpu(args.platform, found)
    spec = meshes.parse(args.mesh, num_devices=0 if on_cpu else found.num_visible)
    prepared = platforms.prepare(args.platform, spec.num_devices, mesh=spec.name)
    print(prepared.line)
    return bench_on(
        meshes.make(spec, platforms.start(prepared)),
        memory_fraction=prepared.memory_fraction,
        small=args.small,
    )


def bench_on(
    mesh: jax.sharding.Mesh, *, memory_fraction: float, small: bool = False
) -> benches.Bench:
    """Where and how it is measured, on devices that JAX has started; CPUs small."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    sizes = benches.SMALL if on_cpu or small else benches.FULL
    config = llama_configs.LlamaConfig(
        vocab_size=128,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=1,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
    )
    implementation = "xla" if on_cpu else "cudnn"
    return benches.Bench(
        mesh=mesh,
        sizes=sizes,
        model=llama.Llama(config, attention_implementation=implementation),
        memory_fraction=memory_fraction,
    )


def name_and_base(
    name: str, bench: benches.Bench
) -> tuple[str, machines.Hardware | None]:
    """What the machine is called, and the preset of its card if there is one.

    Raises:
      ConfigError: The name belongs to a preset of another card.
    """
    device = bench.mesh.devices.flat[0].device_kind
    presets = boxes.BOXES
    name = name or machines.name_for(device, bench.mesh.size)
    if name in presets and presets[name].card.device != device:
        raise ConfigError(
            f"--name {name} is the preset of {presets[name].card.device}, this is "
            f"{device}; choose another name"
        )
    fitting = [
        known
        for known, box in presets.items()
        if box.card.device == device and len(box.links) >= len(bench.axes)
    ]
    if name in fitting:
        return name, machines.preset(name)
    return name, machines.preset(fitting[0]) if fitting else None


def measure(
    bench: benches.Bench, record: dict[str, Any], path: pathlib.Path
) -> list[benches.Section]:
    """Runs the sections; the record on disk grows with each."""
    peak = peak_flops.peak_flops_per_s(record["device"])
    results = []
    for section in sections.sections(bench):
        rates = [rate for _, rate in section.figures.get("matmul_flops_per_s", ())]
        rates.append(section.figures.get("attention_flops_per_s", 0.0))
        if peak and max(rates) > peak:
            error = f"{max(rates):.3g} FLOP/s, the card's peak is {peak:.3g}"
            section = dataclasses.replace(section, figures={}, error=error)
        results.append(section)
        state = f"FAILED: {section.error}" if section.error else "done"
        print(f"{section.name:12} {section.seconds:6.1f} s  {state}", flush=True)
        record["sections"][section.name] = dataclasses.asdict(section)
        path.write_text(json.dumps(record, sort_keys=True, indent=1) + "\n")
    return results


def table(described: machines.Hardware, base: machines.Hardware | None) -> str:
    """Each figure, beside the preset's where there is one."""
    lines = [f"{'figure':24} {'here':>12} {'preset':>12}  source"]
    known = dict(_rows(machines.fitted(base, described.mesh_sizes)) if base else ())
    for (field, label), value in _rows(described):
        preset = known.get((field, label))
        text = f"{preset:12.4g}" if preset is not None else f"{'':12}"
        source = described.sources[field].partition(":")[0]
        lines.append(f"{label:24} {value:12.4g} {text}  {source}")
    return "\n".join(lines)


def _rows(machine: machines.Hardware):
    """((field, label), figure) one by one."""
    for field in sections.figure_names():
        if field == "links":
            for axis, link in zip(meshes.AXES, machine.links, strict=False):
                yield (field, f"{axis} bytes_per_s"), link.bytes_per_s
                yield (field, f"{axis} latency_s"), link.latency_s
        elif field == "matmul_flops_per_s":
            for tokens, rate in machine.matmul_flops_per_s:
                yield (field, f"matmul at {tokens}"), rate
        else:
            yield (field, field), getattr(machine, field)


def layer_check(
    bench: benches.Bench, described: machines.Hardware, section: benches.Section
) -> str:
    """One decoder layer as measured and as the cost model has it from the figures."""
    sizes, model = bench.sizes, bench.model
    workload = workloads.Workload(
        model="one layer",
        num_layers=1,
        hidden_size=sizes.hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        vocab_size=model.vocab_size,
        tied_embeddings=False,
        linears=tuple(
            workloads.Linear(
                name=linear.module.rpartition(".")[2],
                in_dim=linear.in_dim,
                out_dim=linear.out_dim,
                rank=_RANK,
            )
            for linear in model.linears()
        ),
        replicated_layer_weights=2 * sizes.hidden,
        max_length=sizes.row_tokens,
        global_batch_size=1,
        weight_dtype=jax.numpy.dtype(bench.dtype).name,
        activation_dtype=jax.numpy.dtype(bench.dtype).name,
        attention="cudnn" if bench.on_gpu else "xla",
    )
    site = Site(workload=workload, axes=Axes(data=(1,)), rows=1, merge_gathers=False)
    forward_s, backward_s = kernels.layer(site, described, Saved.LINEARS)
    measured = (section.details["forward_s"], section.details["forward_and_backward_s"])
    lines = (
        f"layer of {sizes.row_tokens} tokens, {what}: {1e3 * here:.3f} ms measured, "
        f"{1e3 * model_s:.3f} ms by the cost model ({model_s / here:.2f}x)"
        for what, here, model_s in zip(
            ("forward", "forward and backward"),
            measured,
            (forward_s, forward_s + backward_s),
            strict=True,
        )
    )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Measures, writes, prints; 1 if a section failed."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.output and args.output.suffix != ".json":
        raise ConfigError(f"--output {args.output}: --hardware knows files as .json")
    bench = make_bench(args)
    name, base = name_and_base(args.name, bench)
    device = bench.mesh.devices.flat[0].device_kind
    count = math.prod(bench.mesh.shape.values())
    stamp = f"{datetime.date.today()}, {count} x {device}, jax {jax.__version__}"
    path = args.output or machines.default_directory() / f"{name}.json"
    raw = path.with_suffix(".raw.json")
    raw.parent.mkdir(parents=True, exist_ok=True)
    record = {"name": name, "device": device, "stamp": stamp, "sections": {}}
    results = measure(bench, record, raw)
    failed = [section.name for section in results if section.error]
    print(f"single measurements: {raw}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    described = sections.describe(name, bench, results, base=base, stamp=stamp)
    machines.write(path, described)
    print(table(described, base))
    for section in results:
        if section.name == "layer" and not section.error:
            print(layer_check(bench, described, section))
    if bench.sizes is benches.SMALL:
        print("small sizes: these figures say nothing of a training step")
    print(f"wrote {path}: --hardware {path if args.output else name}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as problem:
        sys.exit(f"error: {problem}")
