"""Seconds of a step's parts on a machine: layers, vocabulary tables, the update.

A layer costs its kernels (`kernel_times`) and the copies that a plan asks for. A
gather costs a latency and the bytes that a device receives over the slowest
axis in it. How parts add up to a step is said by `passes`.

Letters: T tokens in a row, S tokens at once, D model, F feed-forward, V vocabulary.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware.machines import Hardware, Link
from mtuner_jax.numbers import chunking
from mtuner_jax.planning.costs import forecasts, kernels
from mtuner_jax.planning.costs.forecasts import LayerBytes, StepChoices
from mtuner_jax.planning.plans import AdapterState, Saved, SegmentPlan, Table
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
      received_bytes: That a device receives.
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
      compute_s: Of the computation.
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
class Place:
    """Where a layer runs; what its treatments share is computed once.

    Attributes:
      workload: Sizes.
      hardware: The machine.
      mesh_sizes: Devices along each mesh axis, slowest link first.
      rows: Rows of a device that run at once there: the microbatch, in the tail the
        microbatch over the chunks.
      merge_gathers: Whether one collective gathers a layer.
    """

    workload: Workload
    hardware: Hardware
    mesh_sizes: tuple[int, ...]
    rows: int
    merge_gathers: bool

    def memory(self, segment: SegmentPlan) -> LayerBytes:
        """Bytes of one layer of a segment."""
        return forecasts.layer_bytes(
            self.workload,
            segment,
            mesh_sizes=self.mesh_sizes,
            rows=self.rows,
            merge_gathers=self.merge_gathers,
        )

    @functools.cached_property
    def kernels_s(self) -> dict[Saved, tuple[float, float]]:
        """(forward, backward) seconds of a layer's kernels."""
        return {
            saved: kernels.layer(self.workload, self.hardware, saved, rows=self.rows)
            for saved in Saved
        }

    @functools.cached_property
    def gathers(self) -> dict[tuple[int, int], Collective]:
        """The gather of a layer from one number of axes to a larger one."""
        stages = itertools.combinations(range(len(self.mesh_sizes) + 1), 2)
        return {
            stage: self._gather(*stage)
            for stage in stages
            if math.prod(self.mesh_sizes[slice(*stage)]) > 1
        }

    def _gather(self, first: int, end: int) -> Collective:
        output = forecasts.held_bytes(self.workload, self.mesh_sizes, end)
        received = output - output // math.prod(self.mesh_sizes[first:end])
        over = link(self.hardware, self.mesh_sizes, first)
        count = 1 if self.merge_gathers else len(self.workload.linears)
        return Collective(
            kind="weights",
            axes=(first, end),
            received_bytes=received,
            seconds=count * over.latency_s + received / over.bytes_per_s,
        )


def layer(place: Place, segment: SegmentPlan, memory: LayerBytes) -> LayerTimes:
    """Seconds of one layer of a segment.

    Args:
      place: Where it runs.
      segment: Its treatment.
      memory: What `place.memory` says of it.
    """
    bytes_per_s = place.hardware.memory_bytes_per_s
    moved = 2 * (memory.saved + memory.layer_input + memory.fwd_copy + memory.bwd_copy)
    carried = 2 * place.workload.layer_weight_bytes if segment.prefetch else 0
    host = _to_host(place) if segment.saved is Saved.LAYER_INPUT_ON_HOST else None
    keeps = segment.bwd_keep_axes, segment.fwd_keep_axes
    phases = []
    for kernels_s, held, stop in zip(
        place.kernels_s[segment.saved], keeps, reversed(keeps), strict=True
    ):
        stages = _stages(held, stop, len(place.mesh_sizes))
        gathers = tuple(place.gathers[s] for s in stages if s in place.gathers)
        phases.append(
            Phase(
                compute_s=kernels_s + moved / bytes_per_s,
                collectives=gathers,
                carry_s=carried / bytes_per_s if gathers else 0.0,
                host=host,
            )
        )
    return LayerTimes(forward=phases[0], backward=phases[1])


def step(workload: Workload, hardware: Hardware, chosen: StepChoices) -> StepTimes:
    """Seconds of what is not layers."""
    rows = chosen.microbatch // chosen.tail_chunks
    adapters = workload.num_adapter_weights
    split = chosen.adapters is AdapterState.SHARDED
    devices = math.prod(chosen.mesh_sizes)
    updated = -(-adapters // devices) if split else adapters
    moved = updated * _UPDATE_BYTES / hardware.memory_bytes_per_s
    shared = adapters * _WIDE_BYTES
    gathered = _over_all(hardware, chosen, "adapters", shared if split else 0)
    reduced = _over_all(hardware, chosen, "gradients", shared * (1 if split else 2))
    return StepTimes(
        embed=_embed(workload, hardware, chosen),
        head=Phase(compute_s=0.0, collectives=_table(workload, hardware, chosen)),
        loss=_loss(workload, hardware, chosen, rows=rows),
        start=Phase(compute_s=0.0, collectives=gathered),
        update=Phase(
            compute_s=moved + 4 * len(workload.linears) * hardware.kernel_s,
            collectives=reduced,
        ),
    )


def link(hardware: Hardware, mesh_sizes: Sequence[int], first: int) -> Link:
    """The link of the first axis with several devices from axis `first` on.

    Raises:
      ConfigError: The hardware does not say what links that axis.
    """
    # Axes of one device have no link; `hardware.fitted` leaves them out.
    index = sum(size > 1 for size in mesh_sizes[:first])
    if index < len(hardware.links):
        return hardware.links[index]
    raise ConfigError(
        f"hardware {hardware.name} describes {len(hardware.links)} links, mesh "
        f"{'x'.join(map(str, mesh_sizes))} has {len(mesh_sizes)} axes; choose another "
        "hardware or mesh, or calibrate on this machine"
    )


def _to_host(place):
    workload = place.workload
    features = place.rows * workload.max_length * workload.hidden_size
    moved = features * workload.element_bytes
    return Collective(
        kind="layer_input",
        axes=(0, 0),
        received_bytes=moved,
        seconds=moved / place.hardware.host_bytes_per_s,
    )


def _stages(held: int, stop: int, whole: int) -> list[tuple[int, int]]:
    """Gathers from `held` axes to all, with a stop where a copy is kept."""
    marks = [held, *([stop] if held < stop < whole else []), whole]
    return [(a, b) for a, b in itertools.pairwise(marks) if a < b]


def _over_all(hardware, chosen, kind, shared_bytes):
    """A collective over all devices in which a device receives its foreign part."""
    devices = math.prod(chosen.mesh_sizes)
    if devices == 1 or not shared_bytes:
        return ()
    received = shared_bytes - shared_bytes // devices
    over = link(hardware, chosen.mesh_sizes, 0)
    return (
        Collective(
            kind=kind,
            axes=(0, len(chosen.mesh_sizes)),
            received_bytes=received,
            seconds=over.latency_s + received / over.bytes_per_s,
        ),
    )


def _embed(workload, hardware, chosen):
    tokens = chosen.microbatch * workload.max_length
    devices = math.prod(chosen.mesh_sizes)
    stream_bytes = tokens * workload.hidden_size * workload.element_bytes
    if chosen.embedding is Table.SPLIT:
        # Each device looks all tokens up, then vectors are summed to their owners.
        moved, collectives = (
            4 * devices * stream_bytes,
            _over_all(hardware, chosen, "ids", devices * tokens * _WIDE_BYTES)
            + _over_all(hardware, chosen, "embedding", devices * stream_bytes),
        )
    else:
        gathered = chosen.embedding is Table.GATHERED
        table = workload.table_bytes if gathered else 0
        moved = 2 * stream_bytes
        collectives = _over_all(hardware, chosen, "embedding", table)
    return Phase(
        compute_s=moved / hardware.memory_bytes_per_s + 4 * hardware.kernel_s,
        collectives=collectives,
    )


def _table(workload, hardware, chosen):
    gathered = chosen.head is Table.GATHERED
    return _over_all(hardware, chosen, "head", workload.table_bytes if gathered else 0)


def _loss(workload, hardware, chosen, *, rows):
    tokens = rows * workload.max_length
    devices = math.prod(chosen.mesh_sizes)
    split = chosen.head is Table.SPLIT
    table_rows = -(-workload.vocab_size // (devices if split else 1))
    size = chunking.loss_tokens(tokens, table_rows)
    at_once = size * devices if split else size
    logits = tokens * workload.vocab_size
    stream_bytes = tokens * workload.hidden_size * workload.element_bytes
    compute_s = (
        4 * logits * workload.hidden_size / kernels.matmul_rate(hardware, at_once)
        + (logits * _LOGIT_BYTES + 10 * stream_bytes) / hardware.memory_bytes_per_s
        + 10 * (tokens // size) * hardware.kernel_s
    )
    if not split:
        return Phase(compute_s=compute_s)
    one = (
        _over_all(hardware, chosen, "head", size * devices * 2 * _WIDE_BYTES)
        + _over_all(
            hardware, chosen, "head", 2 * devices * stream_bytes * size // tokens
        )
        + 3 * _over_all(hardware, chosen, "head", 2 * size * devices * _WIDE_BYTES)
    )
    return Phase(compute_s=compute_s, collectives=(tokens // size) * one)
