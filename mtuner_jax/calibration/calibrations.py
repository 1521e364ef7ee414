"""What becomes of measurements: a machine's figures, files, and a table to read."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mtuner_jax.calibration import layers, sections
from mtuner_jax.calibration.benches import Bench, Section
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import boxes, cards, machines
from mtuner_jax.hardware.machines import Hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """A machine to be measured.

    Attributes:
      bench: Where and how.
      name: What the machine is called.
      path: File of its figures.
      base: The preset of its card, for what is not measured; None without one.
      stamp: When and with what it is measured.
    """

    bench: Bench
    name: str
    path: pathlib.Path
    base: Hardware | None
    stamp: str

    @property
    def raw_path(self) -> pathlib.Path:
        """File of the single measurements."""
        return self.path.with_suffix(".raw.json")


def prepare(bench: Bench, *, name: str = "", output: str = "") -> Calibration:
    """Finds out what the machine is called, and makes the folder of its file.

    Without `name` it is that of its preset, or made of card and number; without
    `output` the file lies where `--hardware` looks for the name.

    Raises:
      ConfigError: The name belongs to a preset of another card.
    """
    device, num_devices = bench.device_kind, bench.mesh.size
    name = name or machines.name_for(device, num_devices)
    card = boxes.BOXES[name].card.device if name in boxes.BOXES else device
    if card != device:
        raise ConfigError(
            f"--name {name} is the preset of {card}, this is {device}; choose another "
            "name"
        )
    fitting = boxes.with_axes(len(bench.axes), device=device)
    base = name if name in fitting else next(iter(fitting), None)
    calibration = Calibration(
        bench=bench,
        name=name,
        path=pathlib.Path(output or machines.default_directory() / f"{name}.json"),
        base=machines.preset(base) if base else None,
        stamp=(
            f"{datetime.date.today()}, {num_devices} x {device}, jax {jax.__version__}"
        ),
    )
    calibration.path.parent.mkdir(parents=True, exist_ok=True)
    return calibration


def calibrate(calibration: Calibration, *, say: Callable[[str], None]) -> list[str]:
    """Measures section by section, tells the user and writes the machine's figures.

    Returns:
      Names of the sections that failed.

    Raises:
      ConfigError: A figure that was neither measured nor is known of the card.
    """
    results = []
    for section in sections.measure(calibration.bench):
        results.append(section)
        state = f"FAILED: {section.error}" if section.error else "done"
        say(f"{section.name:12} {section.seconds:6.1f} s  {state}")
        _record(calibration, results)
    say(f"single measurements: {calibration.raw_path}")
    machine = describe(calibration, results)
    machines.write(calibration.path, machine)
    say(table(calibration, machine))
    for section in results:
        if section.name == "layer" and not section.error:
            say(layers.compared(calibration.bench, machine, section))
    return [section.name for section in results if section.error]


def _record(calibration: Calibration, results: Sequence[Section]) -> None:
    """Writes single measurements down while others still run."""
    record = {
        "name": calibration.name,
        "device": calibration.bench.device_kind,
        "stamp": calibration.stamp,
        "sections": {found.name: dataclasses.asdict(found) for found in results},
    }
    text = json.dumps(record, sort_keys=True, indent=1) + "\n"
    calibration.raw_path.write_text(text, encoding="utf-8")


def describe(calibration: Calibration, results: Sequence[Section]) -> Hardware:
    """Joins what was measured into a machine's figures.

    What was not measured is taken from the card's preset, and its source says so.

    Raises:
      ConfigError: A figure that was neither measured nor is known of the card.
    """
    bench, base = calibration.bench, calibration.base
    mesh_sizes = tuple(bench.mesh.shape[axis] for axis in bench.axes)
    reserve = cards.COMMON["reserve_bytes"]
    figures: dict[str, Any] = {"reserve_bytes": reserve.value}
    sources = {"reserve_bytes": reserve.source}
    for section in results:
        figures |= section.figures
        measured = f"measured: {calibration.stamp}"
        sources |= dict.fromkeys(section.figures, measured)
    missing = sorted(set(machines.FIGURES) - set(figures))
    if missing and base is None:
        raise ConfigError(
            f"{bench.device_kind} was not measured in {', '.join(missing)} and no "
            "preset knows it; see why these sections failed and calibrate again"
        )
    if base is not None:
        preset = machines.fitted(base, mesh_sizes)
        for field in missing:
            figures[field] = getattr(preset, field)
            known = base.sources[field]
            sources[field] = f"assumed: not measured, as in {base.name} ({known})"
    return Hardware(
        name=calibration.name,
        device=bench.device_kind,
        mesh_sizes=mesh_sizes,
        sources=sources,
        **figures,
    )


def table(calibration: Calibration, machine: Hardware) -> str:
    """Each figure, beside the preset's where there is one."""
    lines = [f"{'figure':24} {'here':>12} {'preset':>12}  source"]
    base = calibration.base
    known = _rows(machines.fitted(base, machine.mesh_sizes)) if base else {}
    for (field, label), value in _rows(machine).items():
        preset = known.get((field, label))
        text = "" if preset is None else f"{preset:.4g}"
        source = machine.sources[field].partition(":")[0]
        lines.append(f"{label:24} {value:12.4g} {text:>12}  {source}")
    return "\n".join(lines)


def _rows(machine: Hardware) -> dict[tuple[str, str], float]:
    """{(field, label): figure}, those of links and products apart."""
    rows = {}
    for field in machines.FIGURES:
        if field == "links":
            for axis, link in zip(meshes.AXES, machine.links, strict=False):
                rows[field, f"{axis} bytes_per_s"] = link.bytes_per_s
                rows[field, f"{axis} latency_s"] = link.latency_s
        elif field == "matmul_flops_per_s":
            for tokens, rate in machine.matmul_flops_per_s:
                rows[field, f"matmul at {tokens}"] = rate
        else:
            rows[field, field] = getattr(machine, field)
    return rows
