"""A step played on three streams: what computes, gathers and waits when.

`replay` goes through the step in the engine's order (`elastic.microbatches`): for each
microbatch the main part forward, the tail's chunks, the main part backward, each layer
beside the gather of the next one. It arrives at the seconds of `passes.step_s`, which
adds up what is played here.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from mtuner_jax.configs import ConfigError
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.numbers.records import Format
from mtuner_jax.planning import sites
from mtuner_jax.planning.costs import durations, forecasts, passes
from mtuner_jax.planning.costs.durations import Collective, LayerTimes, Phase
from mtuner_jax.planning.costs.forecasts import LayerBytes, StaticBytes
from mtuner_jax.planning.plans import Plan, SegmentPlan
from mtuner_jax.planning.workloads import Workload

FORMAT = Format(what="timeline", version=1, again="plan again")
COMPUTE, LINK, HOST = "compute", "link", "host"
NO_LAYER = -1
_DIGITS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that occupies a stream.

    Attributes:
      stream: `compute`, `link` or `host`.
      kind: `forward`, `backward`, `copies`, `loss`, ..., or what is moved.
      layer: Number of the model's layer; -1 for none.
      start_s: Seconds from the step's start to its own.
      end_s: Seconds from the step's start to its end.
      num_bytes: Bytes that a device receives; 0 for computation.
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
      tokens_per_s: Tokens of all devices; padding does not count.
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
    step_s, events = player.streams.clock_s, player.streams.events
    compute_s = sum(event.seconds for event in events if event.stream == COMPUTE)
    tokens = workload.global_batch_size * workload.max_length
    return Timeline(
        step_s=step_s,
        compute_s=compute_s,
        communication_s=sum(event.seconds for event in events if event.stream == LINK),
        exposed_s=max(step_s - compute_s, 0.0),
        tokens_per_s=tokens / step_s,
        events=tuple(sorted(events, key=lambda event: event.start_s)),
        memory=tuple(player.memory.instants),
    )


def to_json(timeline: Timeline) -> str:
    """Byte for byte the same for equal timelines; seconds to the nanosecond."""
    return FORMAT.to_json(timeline, indent=None, digits=_DIGITS)


def from_json(text: str) -> Timeline:
    """Reads what `to_json` wrote.

    Raises:
      ConfigError: No JSON, another version, or fields that are missing or unknown.
    """
    return FORMAT.from_json(text, Timeline)


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


class _Streams:
    """What occupies the streams; `clock_s` is where computation stands."""

    def __init__(self, slowdown: float):
        self.slowdown = slowdown
        self.clock_s = 0.0
        self.events: list[Event] = []

    def send(self, stream: str, moved: Sequence[Collective], layer: int) -> float:
        """Puts collectives or transfers on a stream from now on; returns their end."""
        now_s = self.clock_s
        for one in moved:
            end_s = now_s + one.seconds
            self._add(
                Event(
                    stream=stream,
                    kind=one.kind,
                    layer=layer,
                    start_s=now_s,
                    end_s=end_s,
                    num_bytes=one.received_bytes,
                    axes=one.axes,
                )
            )
            now_s = end_s
        return now_s

    def fetch(self, layer: _Layer, *, backward: bool) -> float:
        """Starts what a layer waits for; returns when it is there."""
        phase = layer.times.phase(backward=backward)
        ready_s = self.send(LINK, phase.collectives, layer.number)
        if backward:
            ready_s = max(ready_s, self.send(HOST, _transfers(phase), layer.number))
        return ready_s

    def compute(
        self, kind: str, layer: int, seconds: float, slow_until_s: float = 0.0
    ) -> None:
        """Computes from now on, slower as long as the link is busy."""
        if not seconds:
            return
        start_s = self.clock_s
        slow_s = max(slow_until_s - start_s, 0.0)
        end_s = start_s + seconds * self.slowdown
        if end_s > start_s + slow_s:
            end_s = start_s + seconds + slow_s * (1.0 - 1.0 / self.slowdown)
        self._add(
            Event(stream=COMPUTE, kind=kind, layer=layer, start_s=start_s, end_s=end_s)
        )
        self.clock_s = end_s

    def wait(self, until_s: float) -> None:
        """Computation stands still until then."""
        self.clock_s = max(self.clock_s, until_s)

    def alone(self, phase: Phase, kind: str) -> None:
        """What overlaps with nothing."""
        self.clock_s = self.send(LINK, phase.collectives, NO_LAYER)
        self.compute(kind, NO_LAYER, phase.compute_s)

    def _add(self, event: Event) -> None:
        """Records an event; one without a duration is none."""
        if event.end_s > event.start_s:
            self.events.append(event)


class _Memory:
    """What is alive when, by kind."""

    def __init__(self, layers: Sequence[_Layer], static: StaticBytes, allocated: int):
        self.allocated = allocated
        self.instants: list[Instant] = []
        self.held = {
            "weights": sum(layer.memory.rest for layer in layers),
            "tables": static.tables,
            "adapters": static.adapters + static.gradients,
            "batch": static.batch,
            "boundary": 0,
            "kept_across_steps": sum(layer.memory.bwd_copy for layer in layers),
            "kept_for_backward": 0,
            "layer_inputs": 0,
            "saved": 0,
            "transient": 0,
        }

    def hold(self, memory: LayerBytes, *, sign: int) -> None:
        """Takes what a layer keeps for its backward pass, or gives it back."""
        self.held["layer_inputs"] += sign * memory.layer_input
        self.held["saved"] += sign * memory.saved
        self.held["kept_for_backward"] += sign * memory.fwd_copy
        self.held["kept_across_steps"] -= sign * memory.bwd_copy

    def note(self, time_s: float, transient: int = 0) -> None:
        """Records what is alive from a time on."""
        self.held["transient"] = 0
        # Outside of loops XLA needs less than the sum; the forecast knows.
        room = self.allocated - sum(self.held.values())
        self.held["transient"] = min(transient, max(room, 0))
        instant = Instant(time_s=time_s, num_bytes=dict(self.held))
        if self.instants and self.instants[-1].time_s == time_s:
            self.instants.pop()
        self.instants.append(instant)


class _Player:
    """Plays a plan's step in the engine's order."""

    def __init__(self, plan: Plan, workload: Workload, hardware: Hardware):
        self.plan = plan
        self.fixed = durations.step(workload, hardware, plan)
        self.share = passes.overlap(hardware, merge_gathers=plan.merge_gathers).share
        self.static = forecasts.static_bytes(workload, plan)
        self.main, self.tail = _parts(plan, workload, hardware)
        self.streams = _Streams(hardware.overlap_slowdown)
        self.memory = _Memory(
            [*self.main, *self.tail],
            self.static,
            forecasts.forecast(plan, workload).total_bytes,
        )

    def step(self) -> None:
        self.note()
        self.streams.alone(self.fixed.start, "start")
        for _ in range(self.plan.accumulation):
            self.microbatch()
        self.streams.alone(self.fixed.update, "update")
        self.note()

    def microbatch(self) -> None:
        # A tail's boundary is a part of what the loss needs.
        boundary = self.static.boundary
        loss = self.static.loss_transient - boundary
        self.streams.alone(self.fixed.embed, "embed")
        self.over(self.main, backward=False)
        self.memory.held["boundary"] = boundary
        self.note()
        self.streams.alone(self.fixed.head, "head")
        for _ in range(self.plan.tail_chunks):
            self.over(self.tail, backward=False)
            self.note(transient=loss)
            self.streams.alone(self.fixed.loss, "loss")
            self.over(self.tail, backward=True)
        self.memory.held["boundary"] = 0
        self.over(self.main, backward=True)

    def over(self, layers: Sequence[_Layer], *, backward: bool) -> None:
        """A pass over layers, each beside the gathers of the next one."""
        streams = self.streams
        order = layers[::-1] if backward else layers
        ready = False
        for layer, following in zip(order, [*order[1:], None], strict=False):
            if not backward:
                self.memory.hold(layer.memory, sign=1)
            self.note(transient=layer.memory.transient)
            if not layer.plan.prefetch:
                self.by_itself(layer, backward=backward)
                ready = False
            else:
                if not ready:
                    streams.clock_s = streams.fetch(layer, backward=backward)
                ready = following is not None and following.plan.prefetch
                self.beside(layer, following if ready else None, backward=backward)
            if backward:
                self.memory.hold(layer.memory, sign=-1)
            self.note()

    def beside(
        self, layer: _Layer, following: _Layer | None, *, backward: bool
    ) -> None:
        """A layer, while what the one after it waits for arrives."""
        streams, phase = self.streams, layer.times.phase(backward=backward)
        start_s = ready_s = link_s = streams.clock_s
        if following is not None:
            link_s += following.times.phase(backward=backward).link_s
            ready_s = streams.fetch(following, backward=backward)
        if not backward:
            sent_s = streams.send(HOST, _transfers(phase), layer.number)
            ready_s = max(ready_s, sent_s)
        kind = "backward" if backward else "forward"
        share = self.share if link_s > start_s else 1.0
        streams.compute(
            kind, layer.number, share * phase.compute_s, slow_until_s=link_s
        )
        streams.wait(link_s)
        streams.compute(kind, layer.number, (1.0 - share) * phase.compute_s)
        streams.wait(ready_s)
        streams.compute("copies", layer.number, phase.carry_s)

    def by_itself(self, layer: _Layer, *, backward: bool) -> None:
        """A layer after what it waits for."""
        streams, phase = self.streams, layer.times.phase(backward=backward)
        streams.clock_s = sent_s = streams.fetch(layer, backward=backward)
        if not backward:
            sent_s = streams.send(HOST, _transfers(phase), layer.number)
        kind = "backward" if backward else "forward"
        streams.compute(kind, layer.number, phase.compute_s)
        streams.wait(sent_s)
        streams.compute("copies", layer.number, phase.carry_s)

    def note(self, transient: int = 0) -> None:
        """Records what is alive from now on."""
        self.memory.note(self.streams.clock_s, transient)


def _parts(
    plan: Plan, workload: Workload, hardware: Hardware
) -> tuple[list[_Layer], list[_Layer]]:
    """Layers of the main part and of the tail."""
    times = passes.segments(plan, workload, hardware)
    layers = [
        _Layer(
            number=start + within,
            plan=segment,
            times=times[index],
            memory=forecasts.layer_bytes(site, segment),
        )
        for index, (start, segment, site) in enumerate(
            zip(
                plan.starts,
                plan.segments,
                sites.of_segments(plan, workload),
                strict=True,
            )
        )
        for within in range(segment.num_layers)
    ]
    border = plan.num_layers - plan.tail_layers
    return layers[:border], layers[border:]


def _transfers(phase: Phase) -> tuple[Collective, ...]:
    return (phase.host,) if phase.host else ()
