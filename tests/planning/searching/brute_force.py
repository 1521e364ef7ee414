"""All plans of a small step and their scores, for what a search is held against."""

import dataclasses
import itertools
import math
import random

from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans, sites
from mtuner_jax.planning.axes import Axes
from mtuner_jax.planning.costs import durations, forecasts, passes
from mtuner_jax.planning.searching import frames, options, search
from mtuner_jax.planning.searching.allowed import MAX_SEGMENTS
from mtuner_jax.planning.sites import Site
from tests import small_plans

MACHINES = {(1,): "h200x1", (2,): "h200x2-pcie", (2, 2): "pcie8"}


def random_workload(seed, *, mesh_sizes, num_layers, rows):
    chosen = random.Random(seed)
    width, wide = 128 * chosen.randint(2, 12), 128 * chosen.randint(4, 40)
    rank = chosen.choice((4, 16))
    return small_plans.decoder(
        model=f"random-{seed}",
        num_layers=num_layers,
        widths=(width, wide),
        heads=(width // 128, width // 128),
        ranks=rank,
        vocab_size=1000 * chosen.randint(1, 32),
        tied_embeddings=chosen.random() < 0.5,
        rows=(rows * math.prod(mesh_sizes), 128 * chosen.randint(1, 16)),
    )


def sequences(num_layers, treatments, at_most):
    """All ways to fill layers with so many segments, no treatment twice."""
    if not num_layers:
        yield ()
    for number in range(1, min(at_most, num_layers) + 1):
        for cut in itertools.combinations(range(1, num_layers), number - 1):
            ends = (0, *cut, num_layers)
            counts = [b - a for a, b in itertools.pairwise(ends)]
            for order in itertools.permutations(treatments, number):
                yield tuple(
                    dataclasses.replace(one, num_layers=count)
                    for one, count in zip(order, counts, strict=True)
                )


def heads(workload, mesh_sizes):
    """Everything of a plan but its segments, the tail's length included."""
    devices = math.prod(mesh_sizes)
    merged = (False, True) if devices > 1 else (False,)
    for cut in frames.cuts(workload.global_batch_size, devices):
        for chunks in frames.chunkings(cut[0]):
            tails = range(1, workload.num_layers + 1) if chunks > 1 else (0,)
            chosen = frames.choices(workload, Axes(data=mesh_sizes), cut, chunks)
            for step, tail, merge in itertools.product(chosen, tails, merged):
                yield {**vars(step), "tail_layers": tail, "merge_gathers": merge}


def all_plans(workload, mesh_sizes, chosen):
    """All plans with these choices besides the segments."""
    treatments = list(options.treatments(Axes(data=mesh_sizes)))
    for head in chosen:
        main_layers = workload.num_layers - head["tail_layers"]
        main = sequences(main_layers, treatments, MAX_SEGMENTS)
        tail = list(sequences(head["tail_layers"], treatments, 1))
        for before, after in itertools.product(main, tail):
            yield plans.Plan(segments=before + after, **head)


class Scores:
    """Scores of plans, one layer of each treatment priced once."""

    def __init__(self, workload, machine, mesh_sizes):
        self.workload, self.machine, self.mesh_sizes = workload, machine, mesh_sizes
        self.clocks, self.layers, self.steps = {}, {}, {}

    def layer(self, segment, rows, merge_gathers):
        key = (dataclasses.replace(segment, num_layers=1), rows, merge_gathers)
        if key not in self.layers:
            site = Site(
                workload=self.workload,
                axes=Axes(data=self.mesh_sizes),
                rows=rows,
                merge_gathers=merge_gathers,
            )
            clock = self.clocks.setdefault(
                site, durations.Clock(site=site, hardware=self.machine)
            )
            memory = forecasts.layer_bytes(site, segment)
            self.layers[key] = clock.layer(segment, memory)
        return self.layers[key]

    def part_s(self, segments, rows, merge_gathers):
        """Forward and backward through consecutive segments."""
        shared = passes.overlap(self.machine, merge_gathers=merge_gathers)
        found = [(s, self.layer(s, rows, merge_gathers)) for s in segments]
        ahead, back = (
            [
                passes.EqualLayers(
                    phase=getattr(times, name),
                    count=segment.num_layers,
                    prefetch=segment.prefetch,
                )
                for segment, times in found
            ]
            for name in ("forward", "backward")
        )
        return passes.over_layers(ahead, shared) + passes.over_layers(
            back[::-1], shared, backward=True
        )

    def step(self, chosen):
        if chosen not in self.steps:
            self.steps[chosen] = durations.step(self.workload, self.machine, chosen)
        return self.steps[chosen]

    def score(self, plan):
        """What the search compares: seconds, and the price of further segments."""
        fixed = self.step(plan.choices)
        start, rows = plan.tail_start, plan.microbatch // plan.tail_chunks
        tail_s = self.part_s(plan.segments[start:], rows, plan.merge_gathers)
        chunks_s = plan.tail_chunks * (tail_s + fixed.loss.total_s)
        main = plan.segments[:start], plan.microbatch, plan.merge_gathers
        each_s = fixed.each_microbatch_s + self.part_s(*main) + chunks_s
        seconds = fixed.once_s + plan.accumulation * each_s
        return seconds * (1 + search.SEGMENT_SHARE * (len(plan.segments) - 1))


def num_bytes(plan, workload):
    return forecasts.forecast(plan, workload).total_bytes


def price_heads(chosen, found, scores):
    """(score, bytes) of plans without a tail, with each of these choices.

    The segments of `found` have merged gathers or not; so do those of `chosen` used.
    """
    workload, known = scores.workload, {}
    for head in chosen:
        plan = plans.Plan(segments=found[0].segments, **head)
        choice = plan.choices
        static, fixed = (
            forecasts.static_bytes(workload, choice),
            scores.step(choice),
        )
        known[choice] = static, fixed
    for plan in found:
        own = forecasts.forecast(plan, workload)
        least = forecasts.static_bytes(workload, plan.choices)
        transient = max(
            forecasts.layer_bytes(sites.main(plan, workload), segment).transient
            for segment in plan.segments
        )
        layers_s = scores.part_s(plan.segments, plan.microbatch, plan.merge_gathers)
        price = 1 + search.SEGMENT_SHARE * (len(plan.segments) - 1)
        bare = own.total_bytes - own.transient - least.total_bytes
        for choice, (static, fixed) in known.items():
            if choice.merge_gathers != plan.merge_gathers:
                continue
            each_s = fixed.each_microbatch_s + fixed.loss.total_s + layers_s
            seconds = fixed.once_s + choice.accumulation * each_s
            taken = bare + static.total_bytes + max(transient, static.loss_transient)
            yield price * seconds, taken


def fastest(scores, budget_bytes):
    return search.fastest(
        scores.workload,
        scores.machine,
        mesh_sizes=scores.mesh_sizes,
        budget_bytes=budget_bytes,
    )


def budgets(prices, seed, number):
    """The least that any plan takes, then random ones up to the most."""
    chosen = random.Random(seed)
    least, most = (f(taken for _, taken in prices) for f in (min, max))
    ratios = [0.0, *(chosen.random() for _ in range(number - 1))]
    return [math.ceil(least * (most / least) ** ratio) for ratio in ratios]


def scores_of(seed, mesh_sizes, **settings):
    workload = random_workload(seed, mesh_sizes=mesh_sizes, **settings)
    machine = machines.fitted(machines.preset(MACHINES[mesh_sizes]), mesh_sizes)
    return Scores(workload, machine, mesh_sizes)


def random_segments(num_layers, treatments, at_most, chosen):
    number = chosen.randint(1, min(at_most, num_layers)) if num_layers else 0
    cut = sorted(chosen.sample(range(1, num_layers), number - 1)) if number else []
    ends = (0, *cut, num_layers)
    return tuple(
        dataclasses.replace(one, num_layers=b - a)
        for one, (a, b) in zip(
            chosen.sample(treatments, number), itertools.pairwise(ends), strict=False
        )
    )


def random_plan(workload, mesh_sizes, treatments, chosen):
    head = chosen.choice(list(heads(workload, mesh_sizes)))
    main_layers = workload.num_layers - head["tail_layers"]
    main = random_segments(main_layers, treatments, MAX_SEGMENTS, chosen)
    tail = random_segments(head["tail_layers"], treatments, 1, chosen)
    return plans.Plan(segments=main + tail, **head)


def neighbours(plan, workload, treatments):
    """Another treatment or border of a segment, or other choices besides them."""
    segments = plan.segments
    for index, segment in enumerate(segments):
        for one in treatments:
            other = dataclasses.replace(one, num_layers=segment.num_layers)
            moved = (*segments[:index], other, *segments[index + 1 :])
            yield dataclasses.replace(plan, segments=moved)
    for index, both in enumerate(itertools.pairwise(segments[: plan.tail_start])):
        total = sum(segment.num_layers for segment in both)
        for count in range(1, total):
            moved = [
                dataclasses.replace(segment, num_layers=layers)
                for segment, layers in zip(both, (count, total - count), strict=True)
            ]
            moved = (*segments[:index], *moved, *segments[index + 2 :])
            yield dataclasses.replace(plan, segments=moved)
    for head in heads(workload, plan.mesh_sizes):
        if head["tail_layers"] == plan.tail_layers:
            yield plans.Plan(segments=segments, **head)
