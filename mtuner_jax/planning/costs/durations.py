"""Seconds of a step's parts on a machine: layers, vocabulary tables, the update.

A layer costs its kernels (`kernels`) and the copies that a plan asks for. A
gather costs a latency and the bytes that a device receives over the slowest
axis in it. How parts add up to a step is said by `passes`.

Letters: T tokens in a row, S tokens at once, D model, F feed-forward, V vocabulary.
"""

import dataclasses
import functools
import itertools

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware.machines import Hardware, Link
from mtuner_jax.numbers import chunking
from mtuner_jax.planning import sites
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import forecasts, kernels
from mtuner_jax.planning.costs.forecasts import LayerBytes
from mtuner_jax.planning.plans import (
    AdapterState,
    Saved,
    SegmentPlan,
    StepChoices,
    Table,
)
from mtuner_jax.planning.sites import Site
from mtuner_jax.planning.workloads import Workload

_LOGIT_BYTES = 20  # moved for each logit, forward and backward
_UPDATE_BYTES = 40  # moved for each adapter weight: AdamW, clipping, the mean
_WIDE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective, or a transfer to or from the host.

    Attributes:
      kind: What it moves, such as `weights`.
      axes: Mesh axes from the first to before the second; equal ones for the host.
      received_bytes: Bytes that a device receives.
      seconds: If nothing else uses the link.
    """

    kind: str
    axes: tuple[int, int]
    received_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Computation, and what has to be received for it.

    Attributes:
      compute_s: Seconds of the computation.
      collectives: Before it, one after the other.
      carry_s: Copies that wait for both: what is gathered ahead moves through the
        loop.
      host: A transfer of the layer's input, forward to the host, backward from it.
    """

    compute_s: float
    collectives: tuple[Collective, ...] = ()
    carry_s: float = 0.0
    host: Collective | None = None

    @property
    def link_s(self) -> float:
        """Seconds of the collectives."""
        return sum(collective.seconds for collective in self.collectives)

    @property
    def host_s(self) -> float:
        """Seconds of the transfer to or from the host."""
        return self.host.seconds if self.host else 0.0

    @property
    def total_s(self) -> float:
        """Seconds if nothing overlaps."""
        return self.link_s + self.host_s + self.compute_s + self.carry_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """One layer, as its segment's plan runs it."""

    forward: Phase
    backward: Phase

    def phase(self, *, backward: bool) -> Phase:
        """The one of a direction."""
        return self.backward if backward else self.forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What is not layers; nothing of it overlaps with anything.

    Attributes:
      embed: Once for each microbatch.
      head: The output table's gather, once for each microbatch.
      loss: Final norm, loss and their gradients, once for each chunk of the tail.
      start: Adapters made whole, once a step.
      update: Reduction of gradients and the optimizer, once a step.
    """

    embed: Phase
    head: Phase
    loss: Phase
    start: Phase
    update: Phase

    @property
    def each_microbatch_s(self) -> float:
        """Seconds of a microbatch, without the loss."""
        return self.embed.total_s + self.head.total_s

    @property
    def once_s(self) -> float:
        """Seconds of a step, whatever its microbatches."""
        return self.start.total_s + self.update.total_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clock:
    """Times layers at a site; what its treatments share is computed once.

    Attributes:
      site: Where and what runs.
      hardware: The machine; its links those of the mesh's axes.
    """

    site: Site
    hardware: Hardware

    def layer(self, segment: SegmentPlan, memory: LayerBytes) -> LayerTimes:
        """Seconds of one layer of a segment.

        Args:
          segment: Its treatment.
          memory: What `forecasts.layer_bytes` says of it.
        """
        copied = memory.saved + memory.layer_input + memory.fwd_copy + memory.bwd_copy
        copied_s = 2 * copied / self.hardware.memory_bytes_per_s
        carried = 2 * self.site.workload.layer_weight_bytes if segment.prefetch else 0
        keeps = segment.bwd_keep_axes, segment.fwd_keep_axes
        phases = []
        for kernels_s, held, stop in zip(
            self._kernels_s[segment.saved], keeps, reversed(keeps), strict=True
        ):
            stages = _stages(held, stop, self.site.axes.whole)
            gathers = tuple(self._gathers[s] for s in stages if s in self._gathers)
            carry_s = carried / self.hardware.memory_bytes_per_s if gathers else 0.0
            phases.append(
                Phase(
                    compute_s=kernels_s + copied_s,
                    collectives=gathers,
                    carry_s=carry_s,
                    host=self._to_host(memory.host) if memory.host else None,
                )
            )
        return LayerTimes(forward=phases[0], backward=phases[1])

    @functools.cached_property
    def _kernels_s(self) -> dict[Saved, tuple[float, float]]:
        """(forward, backward) seconds of a layer's kernels."""
        return {
            saved: kernels.layer(self.site, self.hardware, saved) for saved in Saved
        }

    @functools.cached_property
    def _gathers(self) -> dict[tuple[int, int], Collective]:
        """The gather of a layer from one number of axes to a larger one."""
        axes = self.site.axes
        return {
            (first, end): self._gather(first, end)
            for first, end in itertools.combinations(range(axes.whole + 1), 2)
            if axes.gathering(first, end) > 1
        }

    def _gather(self, first: int, end: int) -> Collective:
        output = forecasts.held_bytes(self.site, end)
        received = output - output // self.site.axes.gathering(first, end)
        over = link(self.hardware, self.site.axes, first)
        count = 1 if self.site.merge_gathers else len(self.site.workload.linears)
        return Collective(
            kind="weights",
            axes=(first, end),
            received_bytes=received,
            seconds=count * over.latency_s + received / over.bytes_per_s,
        )

    def _to_host(self, moved: int) -> Collective:
        return Collective(
            kind="layer_input",
            axes=(0, 0),
            received_bytes=moved,
            seconds=moved / self.hardware.host_bytes_per_s,
        )


def step(workload: Workload, hardware: Hardware, choices: StepChoices) -> StepTimes:
    """Seconds of what is not layers."""
    adapters = workload.num_adapter_weights
    split = choices.adapters is AdapterState.SHARDED
    updated = -(-adapters // choices.num_devices) if split else adapters
    moved = updated * _UPDATE_BYTES / hardware.memory_bytes_per_s
    shared = adapters * _WIDE_BYTES
    everywhere = _Everywhere(hardware=hardware, axes=choices.axes)
    gathered = everywhere.collective("adapters", shared if split else 0)
    reduced = everywhere.collective("gradients", shared * (1 if split else 2))
    head = workload.table_bytes if choices.head is Table.GATHERED else 0
    return StepTimes(
        embed=_embed(sites.main(choices, workload), choices.embedding, everywhere),
        head=Phase(compute_s=0.0, collectives=everywhere.collective("head", head)),
        loss=_loss(sites.tail(choices, workload), choices.head, everywhere),
        start=Phase(compute_s=0.0, collectives=gathered),
        update=Phase(
            compute_s=moved + 4 * len(workload.linears) * hardware.kernel_s,
            collectives=reduced,
        ),
    )


def link(hardware: Hardware, axes: Axes, first: int) -> Link:
    """The link of the first axis with several devices from axis `first` on.

    Raises:
      ConfigError: The hardware does not say what links that axis.
    """
    # Axes of one device have no link; `hardware.fitted` leaves them out.
    index = sum(size > 1 for size in axes.data[:first])
    if index < len(hardware.links):
        return hardware.links[index]
    raise ConfigError(
        f"hardware {hardware.name} describes {len(hardware.links)} links, mesh "
        f"{'x'.join(map(str, axes.data))} has {len(axes.data)} axes; choose another "
        "hardware or mesh, or calibrate on this machine"
    )


def _stages(held: int, stop: int, whole: int) -> list[tuple[int, int]]:
    """Gathers from `held` axes to all, with a stop where a copy is kept."""
    marks = [held, *([stop] if held < stop < whole else []), whole]
    return [(a, b) for a, b in itertools.pairwise(marks) if a < b]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Everywhere:
    """Collectives over all devices."""

    hardware: Hardware
    axes: Axes

    def collective(self, kind: str, shared_bytes: int) -> tuple[Collective, ...]:
        """One in which a device receives its foreign part; none on one device."""
        devices = self.axes.num_devices
        if devices == 1 or not shared_bytes:
            return ()
        received = shared_bytes - shared_bytes // devices
        over = link(self.hardware, self.axes, 0)
        return (
            Collective(
                kind=kind,
                axes=(0, self.axes.whole),
                received_bytes=received,
                seconds=over.latency_s + received / over.bytes_per_s,
            ),
        )


def _embed(site: Site, table: Table, everywhere: _Everywhere) -> Phase:
    hardware, devices = everywhere.hardware, site.axes.num_devices
    stream_bytes = forecasts.stream_bytes(site)
    if table is Table.SPLIT:
        # Each device looks all tokens up, then vectors are summed to their owners.
        moved = 4 * devices * stream_bytes
        ids = everywhere.collective("ids", devices * site.tokens * _WIDE_BYTES)
        collectives = ids + everywhere.collective("embedding", devices * stream_bytes)
    else:
        gathered = site.workload.table_bytes if table is Table.GATHERED else 0
        moved = 2 * stream_bytes
        collectives = everywhere.collective("embedding", gathered)
    return Phase(
        compute_s=moved / hardware.memory_bytes_per_s + 4 * hardware.kernel_s,
        collectives=collectives,
    )


def _loss(site: Site, head: Table, everywhere: _Everywhere) -> Phase:
    workload, hardware, tokens = site.workload, everywhere.hardware, site.tokens
    devices = site.axes.num_devices
    split = head is Table.SPLIT
    table_rows = -(-workload.vocab_size // (devices if split else 1))
    size = chunking.loss_tokens(tokens, table_rows)
    at_once = size * devices if split else size
    logits = tokens * workload.vocab_size
    stream_bytes = forecasts.stream_bytes(site)
    compute_s = (
        4 * logits * workload.hidden_size / kernels.matmul_rate(hardware, at_once)
        + (logits * _LOGIT_BYTES + 10 * stream_bytes) / hardware.memory_bytes_per_s
        + 10 * (tokens // size) * hardware.kernel_s
    )
    if not split:
        return Phase(compute_s=compute_s)
    # Ids and losses; vectors to all and their gradients back; maxima, sums, targets.
    vectors = 2 * devices * stream_bytes * size // tokens
    one = (
        everywhere.collective("head", size * devices * 2 * _WIDE_BYTES)
        + everywhere.collective("head", vectors)
        + 3 * everywhere.collective("head", 2 * size * devices * _WIDE_BYTES)
    )
    return Phase(compute_s=compute_s, collectives=(tokens // size) * one)
