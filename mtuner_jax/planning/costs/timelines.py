"""A step played on three streams: what computes, gathers and waits when.

`replay` goes through the step in the engine's order (`elastic.microbatches`): for each
microbatch the main part forward, the tail's chunks, the main part backward, each layer
beside the gather of the next one. It arrives at the seconds of `passes.step_s`, which
adds up what is played here.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.planning.costs import durations, forecasts, passes
from mtuner_jax.planning.costs.durations import Collective, LayerTimes, Phase
from mtuner_jax.planning.costs.forecasts import LayerBytes
from mtuner_jax.planning.plans import Plan, SegmentPlan
from mtuner_jax.planning.workloads import Workload

VERSION = 1
COMPUTE, LINK, HOST = "compute", "link", "host"
NO_LAYER = -1
_DIGITS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that occupies a stream.

    Attributes:
      stream: `compute`, `link` or `host`.
      kind: `forward`, `backward`, `copies`, `loss`, ..., or what is moved.
      layer: Of the model; -1 for none.
      start_s: Seconds from the step's start.
      end_s: Likewise.
      num_bytes: That a device receives; 0 for computation.
      axes: Mesh axes of a collective, from the first to before the second.
    """

    stream: str
    kind: str
    layer: int
    start_s: float
    end_s: float
    num_bytes: int = 0
    axes: tuple[int, int] = (0, 0)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instant:
    """What is alive from a time on, until the next instant.

    Attributes:
      time_s: Seconds from the step's start.
      num_bytes: By kind, on a device. The most of a step is what
        `forecasts.forecast` says XLA allocates, less what belongs to no instant:
        results, arenas while they are not full, and what segments cost beside their
        layers.
    """

    time_s: float
    num_bytes: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A whole step.

    Attributes:
      step_s: Its seconds.
      compute_s: In which something computes.
      communication_s: In which collectives run.
      exposed_s: In which nothing computes: the rest of the step.
      tokens_per_s: Of all devices; padding does not count.
      events: In the order of their start.
      memory: In the order of time.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    tokens_per_s: float
    events: tuple[Event, ...]
    memory: tuple[Instant, ...]


def replay(plan: Plan, workload: Workload, hardware: Hardware) -> Timeline:
    """Plays a step of a plan.

    Args:
      plan: What is played.
      workload: Sizes and batch.
      hardware: The machine; its links those of the plan's mesh axes.
    """
    player = _Player(plan, workload, hardware)
    player.step()
    step_s = player.clock_s
    compute_s = sum(e.seconds for e in player.events if e.stream == COMPUTE)
    tokens = workload.global_batch_size * workload.max_length
    return Timeline(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=sum(e.seconds for e in player.events if e.stream == LINK),
        exposed_s=max(step_s - compute_s, 0.0),
        tokens_per_s=tokens / step_s,
        events=tuple(sorted(player.events, key=lambda event: event.start_s)),
        memory=tuple(player.instants),
    )


def to_json(timeline: Timeline) -> str:
    """Byte for byte the same for equal timelines; seconds to the nanosecond."""
    rounded = {
        field.name: round(getattr(timeline, field.name), _DIGITS)
        for field in dataclasses.fields(timeline)
        if field.type is float
    }
    events = [
        {
            **dataclasses.asdict(event),
            "start_s": round(event.start_s, _DIGITS),
            "end_s": round(event.end_s, _DIGITS),
        }
        for event in timeline.events
    ]
    memory = [
        {"time_s": round(instant.time_s, _DIGITS), "num_bytes": instant.num_bytes}
        for instant in timeline.memory
    ]
    content = {"version": VERSION, **rounded, "events": events, "memory": memory}
    return json.dumps(content, sort_keys=True) + "\n"


def from_json(text: str) -> Timeline:
    """Reads what `to_json` wrote.

    Raises:
      ConfigError: No JSON, another version, or fields that are missing or unknown.
    """
    try:
        content: dict[str, Any] = json.loads(text)
        version = content.pop("version", None)
        if version != VERSION:
            raise ConfigError(
                f"timeline version {version} is not {VERSION}; plan again"
            )
        events = tuple(
            Event(axes=tuple(event.pop("axes")), **event)
            for event in content.pop("events")
        )
        memory = tuple(Instant(**instant) for instant in content.pop("memory"))
        return Timeline(events=events, memory=memory, **content)
    except (json.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"no timeline: {error}") from error


def read(path: pathlib.Path) -> Timeline:
    """Reads a timeline's file.

    Raises:
      ConfigError: No such file, or not what `to_json` writes.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer of the model, in its place."""

    number: int
    plan: SegmentPlan
    times: LayerTimes
    memory: LayerBytes

    def phase(self, *, backward: bool) -> Phase:
        return self.times.backward if backward else self.times.forward


class _Player:
    """Plays events one after the other; `clock_s` is where computation stands."""

    def __init__(self, plan: Plan, workload: Workload, hardware: Hardware):
        chosen = forecasts.choices(plan)
        self.plan = plan
        self.fixed = durations.step(workload, hardware, chosen)
        self.shared = passes.overlap(hardware, merge_gathers=plan.merge_gathers)
        self.parts = _parts(plan, workload, hardware)
        self.static = forecasts.static_bytes(workload, chosen)
        self.allocated = forecasts.forecast(plan, workload).total_bytes
        self.clock_s = 0.0
        self.events: list[Event] = []
        self.instants: list[Instant] = []
        layers = [layer for part in self.parts for layer in part]
        self.held = {
            "weights": sum(layer.memory.rest for layer in layers),
            "tables": self.static.tables,
            "adapters": self.static.adapters + self.static.gradients,
            "batch": self.static.batch,
            "boundary": 0,
            "kept_across_steps": sum(layer.memory.bwd_copy for layer in layers),
            "kept_for_backward": 0,
            "layer_inputs": 0,
            "saved": 0,
            "transient": 0,
        }

    def step(self) -> None:
        self.note()
        self.alone(self.fixed.start, "start")
        for _ in range(self.plan.accumulation):
            self.microbatch()
        self.alone(self.fixed.update, "update")
        self.note()

    def microbatch(self) -> None:
        main, tail = self.parts
        # A tail's boundary is a part of what the loss needs.
        boundary = self.static.boundary
        loss = self.static.loss_transient - boundary
        self.alone(self.fixed.embed, "embed")
        self.over(main, backward=False)
        self.held["boundary"] = boundary
        self.note()
        self.alone(self.fixed.head, "head")
        for _ in range(self.plan.tail_chunks):
            self.over(tail, backward=False)
            self.note(transient=loss)
            self.alone(self.fixed.loss, "loss")
            self.over(tail, backward=True)
        self.held["boundary"] = 0
        self.over(main, backward=True)

    def over(self, layers: Sequence[_Layer], *, backward: bool) -> None:
        """A pass over layers, each beside the gathers of the next one."""
        order = list(reversed(layers)) if backward else list(layers)
        ready = False
        for layer, following in zip(order, [*order[1:], None], strict=False):
            self.begin(layer, backward=backward)
            if not layer.plan.prefetch:
                self.by_itself(layer, backward=backward)
                ready = False
            else:
                if not ready:
                    self.clock_s = self.fetch(layer, backward=backward)
                ready = following is not None and following.plan.prefetch
                self.beside(layer, following if ready else None, backward=backward)
            self.end(layer, backward=backward)

    def fetch(self, layer: _Layer, *, backward: bool) -> float:
        """Starts what a layer waits for; returns when it is there."""
        phase = layer.phase(backward=backward)
        ready_s = self.send(LINK, phase.collectives, layer.number)
        if backward:
            ready_s = max(ready_s, self.send(HOST, _transfers(phase), layer.number))
        return ready_s

    def beside(
        self, layer: _Layer, following: _Layer | None, *, backward: bool
    ) -> None:
        """A layer, while what the one after it waits for arrives."""
        phase = layer.phase(backward=backward)
        start_s = ready_s = link_s = self.clock_s
        if following is not None:
            link_s += following.phase(backward=backward).link_s
            ready_s = self.fetch(following, backward=backward)
        if not backward:
            ready_s = max(ready_s, self.send(HOST, _transfers(phase), layer.number))
        kind = "backward" if backward else "forward"
        share = self.shared.share if link_s > start_s else 1.0
        self.compute(kind, layer.number, share * phase.compute_s, slow_until_s=link_s)
        self.clock_s = max(self.clock_s, link_s)
        self.compute(kind, layer.number, (1.0 - share) * phase.compute_s)
        self.clock_s = max(self.clock_s, ready_s)
        self.compute("copies", layer.number, phase.carry_s)

    def by_itself(self, layer: _Layer, *, backward: bool) -> None:
        """A layer after what it waits for."""
        phase = layer.phase(backward=backward)
        self.clock_s = sent_s = self.fetch(layer, backward=backward)
        if not backward:
            sent_s = self.send(HOST, _transfers(phase), layer.number)
        kind = "backward" if backward else "forward"
        self.compute(kind, layer.number, phase.compute_s)
        self.clock_s = max(self.clock_s, sent_s)
        self.compute("copies", layer.number, phase.carry_s)

    def alone(self, phase: Phase, kind: str) -> None:
        """What overlaps with nothing."""
        self.gather(phase.collectives, NO_LAYER)
        self.compute(kind, NO_LAYER, phase.compute_s)

    def gather(self, collectives: Sequence[Collective], layer: int) -> None:
        """Collectives that computation waits for."""
        self.clock_s = self.send(LINK, collectives, layer)

    def send(self, stream: str, moved: Sequence[Collective], layer: int) -> float:
        """Puts collectives or transfers on a stream from now on; returns their end."""
        now_s = self.clock_s
        for one in moved:
            self.add(stream, one.kind, layer, now_s, now_s + one.seconds, one)
            now_s += one.seconds
        return now_s

    def compute(
        self, kind: str, layer: int, seconds: float, slow_until_s: float = 0.0
    ) -> None:
        """Computes from now on, slower as long as the link is busy."""
        if not seconds:
            return
        start_s = self.clock_s
        slow_s = max(slow_until_s - start_s, 0.0)
        end_s = start_s + seconds * self.shared.slowdown
        if end_s > start_s + slow_s:
            end_s = start_s + seconds + slow_s * (1.0 - 1.0 / self.shared.slowdown)
        self.add(COMPUTE, kind, layer, start_s, end_s)
        self.clock_s = end_s

    def add(self, stream, kind, layer, start_s, end_s, moved=None) -> None:
        """Records an event; one without a duration is none."""
        if end_s > start_s:
            self.events.append(
                Event(
                    stream=stream,
                    kind=kind,
                    layer=layer,
                    start_s=start_s,
                    end_s=end_s,
                    num_bytes=moved.received_bytes if moved else 0,
                    axes=moved.axes if moved else (0, 0),
                )
            )

    def begin(self, layer: _Layer, *, backward: bool) -> None:
        """What there is from a layer's start on."""
        if not backward:
            self.hold(layer.memory, sign=1)
        self.note(transient=layer.memory.transient)

    def end(self, layer: _Layer, *, backward: bool) -> None:
        """What a layer leaves behind when it ends."""
        if backward:
            self.hold(layer.memory, sign=-1)
        self.note()

    def hold(self, memory: LayerBytes, *, sign: int) -> None:
        """Takes what a layer keeps for its backward pass, or gives it back."""
        self.held["layer_inputs"] += sign * memory.layer_input
        self.held["saved"] += sign * memory.saved
        self.held["kept_for_backward"] += sign * memory.fwd_copy
        self.held["kept_across_steps"] -= sign * memory.bwd_copy

    def note(self, transient: int = 0) -> None:
        """Records what is alive from now on."""
        self.held["transient"] = 0
        # Outside of loops XLA needs less than the sum; the forecast knows.
        room = self.allocated - sum(self.held.values())
        self.held["transient"] = min(transient, max(room, 0))
        instant = Instant(time_s=self.clock_s, num_bytes=dict(self.held))
        if self.instants and self.instants[-1].time_s == self.clock_s:
            self.instants.pop()
        self.instants.append(instant)


def _parts(plan: Plan, workload: Workload, hardware: Hardware) -> list[list[_Layer]]:
    """Layers of the main part and of the tail."""
    parts: list[list[_Layer]] = [[], []]
    times = passes.segments(plan, workload, hardware)
    for index, (segment, layer) in enumerate(zip(plan.segments, times, strict=True)):
        in_tail = index >= plan.tail_start
        memory = forecasts.layer_bytes(
            workload,
            segment,
            mesh_sizes=plan.mesh_sizes,
            rows=plan.microbatch // (plan.tail_chunks if in_tail else 1),
            merge_gathers=plan.merge_gathers,
        )
        parts[in_tail] += [
            _Layer(
                number=plan.starts[index] + within,
                plan=segment,
                times=layer,
                memory=memory,
            )
            for within in range(segment.num_layers)
        ]
    return parts


def _transfers(phase: Phase) -> tuple[Collective, ...]:
    return (phase.host,) if phase.host else ()
