"""Measures what a machine can do, in the figures that `hardware.machines` wants."""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtuner_jax.calibration import layers, links, products
from mtuner_jax.calibration.benches import Bench, Figures, MeasurementError, Section
from mtuner_jax.hardware import cards

_CGROUP_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")


def measure(bench: Bench, names: Sequence[str] = ()) -> Iterator[Section]:
    """Measures section by section; one that fails does not end the others.

    Args:
      bench: Where and how.
      names: Which sections, in this order; all if empty.
    """
    found: dict[str, Any] = {}
    peak = cards.peak_flops_per_s(bench.device_kind)
    for name in names or SECTIONS:
        start = time.perf_counter()
        try:
            section = SECTIONS[name](bench, found)
            _check_rates(section, peak)
        # XLA's errors (no memory, a program that it refuses), JAX's about libraries
        # that are missing, and MeasurementError. Anything else is a bug of ours.
        except RuntimeError as error:
            section = Section(error=f"{type(error).__name__}: {error}")
        found |= section.figures
        seconds = time.perf_counter() - start
        yield dataclasses.replace(section, name=name, seconds=seconds)


def host_bytes(*, limit: pathlib.Path = _CGROUP_LIMIT) -> int:
    """Memory of this host, or what its container may take of it.

    Args:
      limit: File with the container's limit in bytes, or `max`.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(pages, int(text)) if text.isdecimal() else pages


def _memory(bench: Bench, _: Figures) -> Section:
    """The card's memory, the pool's share of it, and the host's."""
    stats = bench.mesh.devices.flat[0].memory_stats() or {}
    pool = stats.get("bytes_limit", 0)
    total, fraction = host_bytes() // bench.mesh.size, 1.0
    if bench.on_gpu:
        fraction = bench.memory_fraction
        if not pool or not fraction:
            raise MeasurementError(
                f"memory_stats() of the GPU gives no bytes_limit: {stats}"
            )
        total = round(pool / fraction)
    figures = {"memory_bytes": total, "pool_fraction": fraction}
    details = {key: int(value) for key, value in stats.items()}
    return Section({**figures, "host_memory_bytes": host_bytes()}, details)


def _check_rates(section: Section, peak: float | None) -> None:
    """Refuses rates that no such card can reach: the clock or the loop was wrong."""
    rates = [rate for _, rate in section.figures.get("matmul_flops_per_s", ())]
    highest = max((*rates, section.figures.get("attention_flops_per_s", 0.0)))
    if peak and highest > peak:
        raise MeasurementError(f"{highest:.3g} FLOP/s, the card's peak is {peak:.3g}")


SECTIONS: dict[str, Callable[[Bench, Figures], Section]] = {
    "memory": _memory,
    "matmul": products.matmul,
    "elementwise": products.elementwise,
    "kernel": products.kernel,
    "host": links.host,
    "links": links.gathers,
    "overlap": links.overlap,
    "attention": products.attention,
    "layer": layers.measure,
}
