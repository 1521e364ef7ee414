import hypothesis
import numpy as np
from hypothesis import strategies as st

from mtuner_jax.data import packing


def pack(lengths, max_length):
    lengths = np.asarray(lengths, np.int64)
    return packing.best_fit(np.arange(len(lengths)), lengths, max_length=max_length)


@hypothesis.given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths):
    rows = pack(lengths, 50)
    assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
    for row in range(len(rows)):
        assert 0 < sum(lengths[i] for i in rows[row].tolist()) <= 50


@hypothesis.given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_it_is_best_fit_decreasing(lengths):
    room, want = [], []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [r for r in range(len(room)) if room[r] >= lengths[sample]]
        if fits:
            row = min(fits, key=lambda r: room[r])
        else:
            row = len(room)
            room.append(50)
            want.append([])
        room[row] -= lengths[sample]
        want[row].append(sample)
    got = pack(lengths, 50)
    assert len(got) == len(want)
    fills = sorted(sum(lengths[i] for i in got[r].tolist()) for r in range(len(got)))
    assert fills == sorted(50 - r for r in room)


def test_packing_a_part_keeps_the_samples_indices():
    lengths = np.asarray([5, 6, 7, 8, 9])
    rows = packing.best_fit(np.asarray([1, 3]), lengths, max_length=20)
    assert [rows[i].tolist() for i in range(len(rows))] == [[3, 1]]


def test_realistic_lengths_fill_the_rows():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 0.8, 5000).astype(int), 1, 1024)
    rows = pack(lengths, 1024)
    assert lengths.sum() / (len(rows) * 1024) > 0.98


def test_one_per_row():
    rows = packing.one_per_row(np.asarray([4, 2, 7]))
    assert [rows[i].tolist() for i in range(len(rows))] == [[4], [2], [7]]
