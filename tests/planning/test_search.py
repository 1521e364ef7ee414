import dataclasses
import itertools
import math
import os
import pathlib
import random
import subprocess
import sys

import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import (
    frames,
    hardware,
    knapsack,
    memory_model,
    options,
    passes,
    plans,
    search,
    shortages,
    time_model,
)
from mtuner_jax.planning.workloads import Linear, Workload

SAME = 1e-9
MACHINES = {(1,): "h200x1", (2,): "h200x2-pcie", (2, 2): "pcie8"}


def random_workload(seed, *, mesh_sizes, num_layers, rows, adapted=True):
    chosen = random.Random(seed)
    width, wide = 128 * chosen.randint(2, 12), 128 * chosen.randint(4, 40)
    rank = chosen.choice((4, 16)) if adapted else 0
    dims = [(name, width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    dims += [("gate_proj", width, wide), ("up_proj", width, wide)]
    dims += [("down_proj", wide, width)]
    return Workload(
        model=f"random-{seed}",
        num_layers=num_layers,
        hidden_size=width,
        num_heads=width // 128,
        num_kv_heads=width // 128,
        head_dim=128,
        vocab_size=1000 * chosen.randint(1, 32),
        tied_embeddings=chosen.random() < 0.5,
        linears=tuple(
            Linear(name=name, in_dim=ins, out_dim=outs, rank=rank)
            for name, ins, outs in dims
        ),
        replicated_layer_weights=2 * width,
        max_length=128 * chosen.randint(1, 16),
        global_batch_size=rows * math.prod(mesh_sizes),
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
            chosen = frames.choices(workload, mesh_sizes, cut, chunks)
            for step, tail, merge in itertools.product(chosen, tails, merged):
                fields = {f.name: getattr(step, f.name) for f in step_fields()}
                yield {**fields, "tail_layers": tail, "merge_gathers": merge}


def step_fields():
    return dataclasses.fields(memory_model.StepChoices)


def all_plans(workload, mesh_sizes, chosen):
    """All plans with these choices besides the segments."""
    treatments = list(options.treatments(mesh_sizes))
    for head in chosen:
        main_layers = workload.num_layers - head["tail_layers"]
        main = sequences(main_layers, treatments, knapsack.MAX_SEGMENTS)
        tail = list(sequences(head["tail_layers"], treatments, 1))
        for before, after in itertools.product(main, tail):
            yield plans.Plan(segments=before + after, **head)


class Scores:
    """Scores of plans, one layer of each treatment priced once."""

    def __init__(self, workload, machine, mesh_sizes):
        self.workload, self.machine, self.mesh_sizes = workload, machine, mesh_sizes
        self.places, self.layers, self.steps = {}, {}, {}

    def layer(self, segment, rows, merge_gathers):
        key = (dataclasses.replace(segment, num_layers=1), rows, merge_gathers)
        if key not in self.layers:
            place = self.places.setdefault(
                key[1:],
                time_model.Place(
                    workload=self.workload,
                    hardware=self.machine,
                    mesh_sizes=self.mesh_sizes,
                    rows=rows,
                    merge_gathers=merge_gathers,
                ),
            )
            self.layers[key] = time_model.layer(place, segment, place.memory(segment))
        return self.layers[key]

    def part_s(self, segments, rows, merge_gathers):
        """Forward and backward through consecutive segments."""
        shared = passes.overlap(self.machine, merge_gathers=merge_gathers)
        found = [(s, self.layer(s, rows, merge_gathers)) for s in segments]
        ahead, back = (
            [
                passes.Run(
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
            self.steps[chosen] = time_model.step(self.workload, self.machine, chosen)
        return self.steps[chosen]

    def score(self, plan):
        """What the search compares: seconds, and the price of further segments."""
        fixed = self.step(memory_model.choices(plan))
        start, rows = plan.tail_start, plan.microbatch // plan.tail_chunks
        tail_s = self.part_s(plan.segments[start:], rows, plan.merge_gathers)
        chunks_s = plan.tail_chunks * (tail_s + fixed.loss.total_s)
        main = plan.segments[:start], plan.microbatch, plan.merge_gathers
        each_s = fixed.each_microbatch_s + self.part_s(*main) + chunks_s
        seconds = fixed.once_s + plan.accumulation * each_s
        return seconds * (1 + search.SEGMENT_SHARE * (len(plan.segments) - 1))


def num_bytes(plan, workload):
    return memory_model.forecast(plan, workload).total_bytes


def price_heads(chosen, found, scores):
    """(score, bytes) of plans without a tail, with each of these choices.

    The segments of `found` have merged gathers or not; so do those of `chosen` used.
    """
    workload, known = scores.workload, {}
    for head in chosen:
        plan = plans.Plan(segments=found[0].segments, **head)
        choice = memory_model.choices(plan)
        static, fixed = (
            memory_model.static_bytes(workload, choice),
            scores.step(choice),
        )
        known[choice, plan.merge_gathers] = static, fixed
    for plan in found:
        own = memory_model.forecast(plan, workload)
        least = memory_model.static_bytes(workload, memory_model.choices(plan))
        transient = max(
            memory_model.layer_bytes(
                workload,
                segment,
                mesh_sizes=plan.mesh_sizes,
                rows=plan.microbatch,
                merge_gathers=plan.merge_gathers,
            ).transient
            for segment in plan.segments
        )
        layers_s = scores.part_s(plan.segments, plan.microbatch, plan.merge_gathers)
        price = 1 + search.SEGMENT_SHARE * (len(plan.segments) - 1)
        bare = own.total_bytes - own.transient - least.total_bytes
        for (choice, merged), (static, fixed) in known.items():
            if merged != plan.merge_gathers:
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
    machine = hardware.fitted(hardware.preset(MACHINES[mesh_sizes]), mesh_sizes)
    return Scores(workload, machine, mesh_sizes)


def check_best(scores, prices, budget_bytes):
    """The plan found is the best of all that fit."""
    found = fastest(scores, budget_bytes)
    plan = found.plan
    assert num_bytes(plan, scores.workload) <= budget_bytes
    assert found.forecast.total_bytes == num_bytes(plan, scores.workload)
    seconds = passes.step_s(plan, scores.workload, scores.machine)
    share = 1 + search.SEGMENT_SHARE * (len(plan.segments) - 1)
    want = min(one for one, taken in prices if taken <= budget_bytes)
    assert seconds * share == pytest.approx(want, rel=SAME)


@pytest.mark.parametrize("seed", range(14))
def test_on_one_device_nothing_within_the_limits_is_better(seed):
    layers = 2 + seed % 3
    rows = 1 + min(seed // 3 % 3, 5 - layers)
    scores = scores_of(seed, (1,), num_layers=layers, rows=rows)
    workload = scores.workload
    found = all_plans(workload, (1,), heads(workload, (1,)))
    prices = [(scores.score(plan), num_bytes(plan, workload)) for plan in found]
    for budget_bytes in budgets(prices, seed, 4):
        check_best(scores, prices, budget_bytes)


@pytest.mark.parametrize("seed", (0, 1))
def test_on_two_devices_nothing_within_the_limits_is_better(seed):
    scores = scores_of(seed, (2,), num_layers=2, rows=1)
    chosen = list(heads(scores.workload, (2,)))
    one_of_each = {head["merge_gathers"]: head for head in chosen}.values()
    found = list(all_plans(scores.workload, (2,), one_of_each))
    prices = list(price_heads(chosen, found, scores))
    for budget_bytes in budgets(prices, seed, 6):
        check_best(scores, prices, budget_bytes)


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
    main = random_segments(main_layers, treatments, knapsack.MAX_SEGMENTS, chosen)
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


@pytest.mark.parametrize("seed", (*range(8), 9, 10))
def test_no_random_plan_and_no_neighbour_is_better(seed):
    mesh_sizes = ((2,), (2, 2))[seed % 2]
    layers, rows = 2 + seed % 3, 1 + seed // 2 % 3
    scores = scores_of(seed, mesh_sizes, num_layers=layers, rows=rows)
    workload, chosen = scores.workload, random.Random(seed)
    treatments = list(options.treatments(mesh_sizes))
    sampled = [
        random_plan(workload, mesh_sizes, treatments, chosen) for _ in range(150)
    ]
    prices = [(scores.score(plan), num_bytes(plan, workload)) for plan in sampled]
    for budget_bytes in budgets(prices, seed, 3):
        plan = fastest(scores, budget_bytes).plan
        near = [
            (scores.score(other), num_bytes(other, workload))
            for other in neighbours(plan, workload, treatments)
        ]
        assert len(near) > len(treatments)
        check_best_known(scores, plan, near + prices, budget_bytes)


def check_best_known(scores, plan, prices, budget_bytes):
    """None of these plans that fits is better than this one."""
    assert num_bytes(plan, scores.workload) <= budget_bytes
    assert plan.rows >= scores.workload.global_batch_size
    fitting = [one for one, taken in prices if taken <= budget_bytes]
    assert scores.score(plan) <= min(fitting) * (1 + SAME)


def test_scores_of_these_tests_are_those_of_the_models():
    scores, chosen = scores_of(3, (2, 2), num_layers=4, rows=2), random.Random(3)
    treatments = list(options.treatments((2, 2)))
    for _ in range(20):
        plan = random_plan(scores.workload, (2, 2), treatments, chosen)
        seconds = passes.step_s(plan, scores.workload, scores.machine)
        further = search.SEGMENT_SHARE * (len(plan.segments) - 1)
        want = seconds * (1 + further)
        assert scores.score(plan) == pytest.approx(want, rel=1e-12)


def test_more_memory_is_never_slower():
    scores = scores_of(5, (2, 2), num_layers=6, rows=2)
    machine, workload = scores.machine, scores.workload
    least = shortages.least_bytes(workload, machine, (2, 2))
    searcher = search.Searcher(workload, machine, (2, 2))
    found = [searcher.best(least + least * step // 8) for step in range(20)]
    times = [one.score_s for one in found]
    for before, after in itertools.pairwise(times):
        assert after <= before * (1 + SAME)
    assert times[-1] < times[0]


def test_the_same_plan_to_the_byte_in_every_process():
    scores = scores_of(7, (2, 2), num_layers=4, rows=2)
    machine, workload = scores.machine, scores.workload
    budget_bytes = shortages.least_bytes(workload, machine, (2, 2)) * 5 // 4
    want = plans.to_json(fastest(scores, budget_bytes).plan)
    assert plans.to_json(fastest(scores, budget_bytes).plan) == want
    program = "\n".join(
        (
            "from mtuner_jax.planning import hardware, plans, search",
            "from mtuner_jax.planning.workloads import Linear, Workload",
            f"workload = {workload!r}",
            f"machine = hardware.fitted(hardware.preset({machine.name!r}), (2, 2))",
            "found = search.fastest(workload, machine, mesh_sizes=(2, 2), "
            f"budget_bytes={budget_bytes})",
            "print(plans.to_json(found.plan), end='')",
        )
    )
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=pathlib.Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == want


@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_the_global_batch_is_covered_and_not_one_microbatch_more(rows):
    scores = scores_of(11, (2,), num_layers=3, rows=1)
    workload = dataclasses.replace(scores.workload, global_batch_size=rows)
    scores = Scores(workload, scores.machine, (2,))
    plan = fastest(scores, 2**40).plan
    assert 0 <= plan.rows - rows < 2 * plan.microbatch


def test_a_step_that_computes_all_the_time_has_one_segment_and_says_so():
    made = random_workload(2, mesh_sizes=(2,), num_layers=4, rows=64)
    workload = dataclasses.replace(made, max_length=4096)
    machine = hardware.fitted(hardware.preset("h200x2"), (2,))
    found = fastest(Scores(workload, machine, (2,)), 2**40)
    assert found.binds is search.Binds.COMPUTE
    assert found.reason.startswith("computation is")
    assert len(found.plan.segments) == 1


def test_a_budget_below_the_least_names_the_least_and_what_lowers_it():
    scores = scores_of(4, (2, 2), num_layers=4, rows=2)
    least = shortages.least_bytes(scores.workload, scores.machine, (2, 2))
    fitting = fastest(scores, least).plan
    assert num_bytes(fitting, scores.workload) <= least
    half = scores.workload.max_length // 2
    match = (
        f"no plan fits.* needs at least {least:,} bytes.*the budget is {least - 1:,} "
        f".*raise memory_budget, or .*lower max_length to {half} "
    )
    with pytest.raises(ConfigError, match=match):
        fastest(scores, least - 1)


def test_no_axes_are_one_device():
    scores = scores_of(6, (1,), num_layers=3, rows=2)
    one = fastest(scores, 2**40).plan
    none = fastest(Scores(scores.workload, scores.machine, ()), 2**40).plan
    assert none == one
    assert one.mesh_sizes == (1,)
    assert {segment.rest_axes for segment in one.segments} == {1}
