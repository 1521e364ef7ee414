import itertools
import json

import numpy as np
import pytest

from mtuner_jax.scheduling import filling

MEANS = (596, 846, 1669, 995)


def lengths(rng, mean, size, most=4096):
    """Synthetic log-normal lengths."""
    drawn = rng.lognormal(np.log(mean) - 0.125, 0.5, size)
    return np.clip(drawn, 1, most).astype(int).tolist()


def runs(seed, *, samples=4, num_batches=12, means=MEANS):
    rng = np.random.default_rng(seed)
    return {
        f"a{number}": [
            lengths(rng, mean, samples) for _ in range(num_batches - 3 * (number == 1))
        ]
        for number, mean in enumerate(means)
    }


def steps_of(batches, *, rows=2, capacity=4096, multiple=128):
    filler = filling.StepFiller(rows=rows, capacity=capacity, multiple=multiple)
    return filling.simulate(batches, filler)


def padded(row, multiple):
    tokens = {}
    for piece in row:
        tokens[piece.adapter] = tokens.get(piece.adapter, 0) + piece.length
    return sum(-(-n // multiple) * multiple for n in tokens.values())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("multiple", [1, 128])
def test_every_sample_runs_once_in_the_order_of_batches_within_capacity(seed, multiple):
    batches = runs(seed)
    at = dict.fromkeys(batches, 0)
    seen = {name: set() for name in batches}
    for step in steps_of(batches, multiple=multiple):
        for row in step.rows:
            assert padded(row, multiple) <= 4096
            names = [piece.adapter for piece in row]
            changes = sum(a != b for a, b in itertools.pairwise(names))
            assert changes == max(0, len(set(names)) - 1)
            for piece in row:
                batch = batches[piece.adapter][at[piece.adapter]]
                assert batch[piece.sample] == piece.length
                assert piece.sample not in seen[piece.adapter]
                seen[piece.adapter].add(piece.sample)
        for name, own in batches.items():
            complete = at[name] < len(own) and len(seen[name]) == len(own[at[name]])
            assert complete == (name in step.ends)
            if complete:
                at[name], seen[name] = at[name] + 1, set()
    assert at == {name: len(own) for name, own in batches.items()}


def test_small_batches_of_several_adapters_fill_rows_that_one_leaves_empty():
    for seed in range(5):
        batches = runs(seed)
        together = steps_of(batches)
        alone = [step for name in batches for step in steps_of({name: batches[name]})]
        share, alone_share = (
            filling.filled_share(steps, rows=2, capacity=4096)
            for steps in (together, alone)
        )
        assert share > 0.85
        assert share > 1.2 * alone_share


def test_state_goes_on_where_it_was():
    batches = runs(3)
    filler = filling.StepFiller(rows=2, capacity=4096, multiple=128)
    for name, own in batches.items():
        filler.feed(name, own[0], later_batches=3)
    filler.next_step()
    other = filling.StepFiller(rows=2, capacity=4096, multiple=128)
    other.set_state(json.loads(json.dumps(filler.get_state())))
    while (step := filler.next_step()) is not None:
        assert other.next_step() == step
    assert other.next_step() is None


def test_adapter_that_is_removed_runs_no_more():
    filler = filling.StepFiller(rows=1, capacity=10)
    filler.feed("a", [6, 6, 6], later_batches=0)
    filler.feed("b", [4, 4], later_batches=0)
    first = filler.next_step()
    assert {piece.adapter for piece in first.rows[0]} == {"a", "b"}
    filler.remove("a")
    assert filler.waits_for("a")
    second = filler.next_step()
    assert [piece.adapter for piece in second.rows[0]] == ["b"]
    assert second.ends == {"b"}
    assert filler.next_step() is None


def test_rows_are_the_most_that_are_still_filled():
    full = {name: [[64] * 8] * 4 for name in "abcd"}
    choose = {"capacity": 256, "multiple": 1, "choices": (1, 2, 4, 8, 16)}
    assert filling.rows_per_step(full, **choose) == 8
    assert filling.rows_per_step({"a": [[64]] * 4}, **choose) == 1
