import json

import numpy as np
import pytest

from mtuner_jax.data import errors, packing, pipelines, samples

MAX_LENGTH = 16
PRINT = {"dataset": "d" * 64, "max_length": MAX_LENGTH, "global_batch_size": 4}


def build_samples(num=20, *, seed=0):
    rng = np.random.default_rng(seed)
    builder = samples.SamplesBuilder()
    for index in range(num):
        length = int(rng.integers(2, 12))
        ids = rng.integers(1, 99, length).astype(np.int32)
        builder.add(3 * index + 1, ids, np.arange(length) > 0)
    return builder.build()


def train_data(num=20, *, batch_size=4, seed=7, packed=True, fingerprint=PRINT):
    data = build_samples(num)
    every = np.arange(num)
    if packed:
        rows = packing.best_fit(every, data.lengths, max_length=MAX_LENGTH)
    else:
        rows = packing.one_per_row(every)
    return pipelines.TrainData(
        data,
        rows,
        global_batch_size=batch_size,
        max_length=MAX_LENGTH,
        seed=seed,
        fingerprint=fingerprint,
    )


def ids_of(batch):
    """The documents of a batch, in order."""
    starts = (batch.segment_ids > 0) & (batch.positions == 0)
    return batch.sample_ids[starts].tolist()


def take(data, num):
    return [ids_of(next(data)) for _ in range(num)]


@pytest.mark.parametrize("packed", [True, False])
def test_every_sample_is_seen_once_in_every_epoch(packed):
    data = train_data(packed=packed)
    epochs = [
        [i for batch in take(data, data.steps_per_epoch) for i in batch]
        for _ in range(3)
    ]
    for epoch in epochs:
        assert sorted(epoch) == data.samples.sample_ids.tolist()
    assert epochs[0] != epochs[1] != epochs[2]
    assert data.epoch == 3.0
    assert data.samples_seen == 60


def test_the_last_batch_of_an_epoch_is_padded():
    data = train_data(18, packed=False)
    shapes = set()
    for step in range(10):
        batch = next(data)
        shapes.update(array.shape for array in batch[:6])
        if step % 5 == 4:
            assert batch.weights[:2].any(axis=1).all()
            assert not batch.weights[2:].any()
            assert not batch.segment_ids[2:].any()
        assert data.epoch == pytest.approx((step + 1) / 5)
    assert shapes == {(4, MAX_LENGTH)}


def test_data_smaller_than_a_batch_still_makes_a_step():
    data = train_data(3, batch_size=8)
    assert data.steps_per_epoch == 1
    assert [sorted(ids) for ids in take(data, 2)] == [[1, 4, 7]] * 2


def test_seeds_give_orders_and_the_same_seed_the_same():
    assert take(train_data(), 9) == take(train_data(), 9)
    assert take(train_data(), 9) != take(train_data(seed=8), 9)


@pytest.mark.parametrize("packed", [True, False])
def test_another_iterator_goes_on_where_the_first_one_stopped(packed):
    data, other = train_data(packed=packed), train_data(packed=packed)
    take(data, data.steps_per_epoch + 3)
    other.set_state(json.loads(json.dumps(data.get_state())))
    assert take(data, 12) == take(other, 12)
    assert (data.epoch, data.samples_seen) == (other.epoch, other.samples_seen)


def test_a_far_position_is_reached_without_replay():
    data = train_data()
    state = data.get_state()
    state["iterator"]["next_index"] = 10**9
    data.set_state(state)
    assert ids_of(next(data))
    assert data.steps == 10**9 + 1


def test_taking_a_state_does_not_move():
    data, other = train_data(), train_data()
    for _ in range(7):
        data.get_state()
        assert ids_of(next(data)) == ids_of(next(other))


def test_a_position_in_other_data_is_refused_by_name():
    state = train_data().get_state()
    changed = {**PRINT, "global_batch_size": 8, "dataset": "e" * 64}
    with pytest.raises(
        errors.DataError,
        match=r"dataset was d{12}\.\.\., is e{12}\.\.\.; global_batch_size was 4, is 8",
    ):
        train_data(fingerprint=changed).set_state(state)
    with pytest.raises(errors.DataError, match="has version None, this program reads"):
        train_data().set_state({})


@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_evaluation_shows_every_token_once_whatever_the_batch(batch_size):
    data = build_samples(13)
    rows = packing.best_fit(np.arange(13), data.lengths, max_length=MAX_LENGTH)
    evaluation = pipelines.EvalData(
        samples=data, rows=rows, batch_size=batch_size, max_length=MAX_LENGTH
    )
    first, second = list(evaluation), list(evaluation)
    assert len(first) == len(evaluation) == -(-len(rows) // batch_size)
    ids = [i for batch in first for i in ids_of(batch)]
    assert sorted(ids) == data.sample_ids.tolist()
    assert sum(batch.weights.sum() for batch in first) == data.num_trained.sum()
    assert {batch.input_ids.shape for batch in first} == {(batch_size, MAX_LENGTH)}
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.input_ids, two.input_ids)


@pytest.mark.parametrize(("val_size", "num"), [(0.2, 4), (0.001, 1), (3, 3), (1, 1)])
def test_split_by_share_or_number(val_size, num):
    kept, held_out = pipelines.split(20, val_size=val_size, seed=1)
    assert len(held_out) == num
    assert sorted([*kept, *held_out]) == list(range(20))
    again = pipelines.split(20, val_size=val_size, seed=1)[1]
    np.testing.assert_array_equal(held_out, again)


def test_split_depends_on_the_seed_and_can_be_nothing():
    splits = {tuple(pipelines.split(50, val_size=5, seed=s)[1]) for s in range(5)}
    assert len(splits) == 5
    kept, held_out = pipelines.split(5, val_size=0, seed=1)
    assert (len(kept), len(held_out)) == (5, 0)


def test_split_refuses_what_leaves_nothing():
    with pytest.raises(
        errors.DataError, match="holds out 5 of 5 samples and leaves no"
    ):
        pipelines.split(5, val_size=5, seed=1)
    with pytest.raises(errors.DataError, match=r"val_size=1\.5: a whole number"):
        pipelines.split(5, val_size=1.5, seed=1)
    with pytest.raises(errors.DataError, match="leaves none"):
        pipelines.split(1, val_size=0.1, seed=1)
