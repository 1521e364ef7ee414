"""The arena's layout, checked by playing the loops of `elastic.passes`."""

import dataclasses
import itertools

import numpy as np
import pytest

from mtuner_jax.planning.costs import arena_layouts

NUM_RANDOM = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Layers, what they put into the arena, and whether they look ahead."""

    layers: range
    input_size: int
    copy_size: int
    prefetch: bool


class Rows:
    """The arena's rows by what they hold; a live one must not be overwritten."""

    def __init__(self, layout):
        self.layout = layout
        self.owners = [None] * layout.rows

    def _span(self, kind, layer):
        start = getattr(self.layout, f"{kind}_starts")[layer]
        size = getattr(self.layout, f"{kind}_rows")[layer]
        assert start >= 0
        assert start + size <= self.layout.rows or not size
        return range(start, start + size)

    def write(self, kind, layer):
        """Needs its rows free; they hold it afterwards."""
        for row in self._span(kind, layer):
            assert self.owners[row] is None, (kind, layer, self.owners[row])
            self.owners[row] = (kind, layer)

    def take(self, kind, layer):
        """Needs its rows intact; they are free afterwards."""
        for row in self._span(kind, layer):
            assert self.owners[row] == (kind, layer)
            self.owners[row] = None

    def holds(self, kind):
        """That all of one kind are there and nothing else is."""
        sizes = getattr(self.layout, f"{kind}_rows")
        want = {(kind, layer) for layer, size in enumerate(sizes) if size}
        assert set(self.owners) - {None} == want


def play(segments, layout, *, rounds=2):
    """Runs microbatches, each read and write in the order of the engine's loops."""
    rows, last = Rows(layout), len(layout.input_rows) - 1
    # Layers whose weights are raised while their neighbour runs, and not by itself.
    ahead = {
        layer for segment in segments if segment.prefetch for layer in segment.layers
    }
    firsts = {segment.layers[0] for segment in segments}
    lasts = {segment.layers[-1] for segment in segments}
    for layer in range(last + 1):
        rows.write("copy", layer)
    for _ in range(rounds):
        rows.holds("copy")
        for layer in range(last + 1):
            if layer not in ahead or (layer in firsts and layer - 1 not in ahead):
                rows.take("copy", layer)
            if layer in ahead and layer + 1 in ahead:
                rows.take("copy", layer + 1)
            rows.write("input", layer)
        rows.holds("input")
        for layer in reversed(range(last + 1)):
            if layer in ahead and layer in lasts and layer + 1 not in ahead:
                rows.write("copy", layer)
            rows.take("input", layer)
            if layer not in ahead:
                rows.write("copy", layer)
            elif layer - 1 in ahead:
                rows.write("copy", layer - 1)


def random_segments(rng):
    """Up to four segments of up to three layers; no size where nothing is kept."""
    segments, start = [], 0
    for _ in range(rng.integers(1, 5)):
        count = int(rng.integers(1, 4))
        size = int(rng.choice([0, 64, 640, rng.integers(1, 2000)]))
        segments.append(
            Segment(
                layers=range(start, start + count),
                input_size=size,
                copy_size=int(rng.choice([0, 64, 640, rng.integers(1, 4000)])),
                prefetch=size > 0 and bool(rng.integers(2)),
            )
        )
        start += count
    return segments


def layout_of(segments):
    inputs, copies = [], []
    for segment in segments:
        inputs += len(segment.layers) * [segment.input_size]
        copies += len(segment.layers) * [segment.copy_size]
    return arena_layouts.layout(inputs, copies)


def shifted(layout, rows):
    """The layout with its copies some rows further to the front."""
    starts = tuple(start - rows for start in layout.copy_starts)
    return dataclasses.replace(layout, copy_starts=starts)


def test_no_live_row_is_overwritten():
    rng = np.random.default_rng(0)
    for _ in range(NUM_RANDOM):
        segments = random_segments(rng)
        play(segments, layout_of(segments))


def test_copies_one_row_further_to_the_front_overwrite_an_input():
    """The shift is the smallest one for loops that look ahead where they may."""
    rng = np.random.default_rng(1)
    caught = 0
    for _ in range(NUM_RANDOM):
        segments = [
            dataclasses.replace(segment, prefetch=segment.input_size > 0)
            for segment in random_segments(rng)
        ]
        layout = layout_of(segments)
        if layout.has_copies and layout.copy_starts[0]:
            with pytest.raises(AssertionError):
                play(segments, shifted(layout, 1))
            caught += 1
    assert caught > NUM_RANDOM / 4


def test_rows_end_with_the_last_input_or_copy():
    rng = np.random.default_rng(2)
    for _ in range(NUM_RANDOM):
        layout = layout_of(random_segments(rng))
        ends = [
            start + size
            for kind in ("input", "copy")
            for start, size in zip(
                getattr(layout, f"{kind}_starts"),
                getattr(layout, f"{kind}_rows"),
                strict=True,
            )
            if size
        ]
        assert layout.rows == max(ends, default=1)


def test_sizes_fill_their_rows():
    rng = np.random.default_rng(3)
    for _ in range(NUM_RANDOM):
        segments = random_segments(rng)
        layout = layout_of(segments)
        for segment in segments:
            for layer in segment.layers:
                for size, rows in (
                    (segment.input_size, layout.input_rows[layer]),
                    (segment.copy_size, layout.copy_rows[layer]),
                ):
                    assert (rows - 1) * layout.width < size <= rows * layout.width


def test_without_copies_the_arena_is_the_inputs():
    layout = arena_layouts.layout([640, 640, 0, 65], [0, 0, 0, 0])
    assert (layout.width, layout.rows) == (64, 22)
    assert layout.input_rows == (10, 10, 0, 2)
    assert layout.input_starts == (0, 10, 20, 20)
    assert not layout.has_copies


def test_without_inputs_the_arena_is_the_copies():
    layout = arena_layouts.layout([0, 0, 0], [128, 64, 0])
    assert layout.rows == 3
    assert layout.copy_starts[:2] == (0, 2)
    assert layout.has_copies


def test_equal_inputs_and_copies_cost_one_row_block_more_than_either():
    layout = arena_layouts.layout(5 * [640], 5 * [640])
    assert layout.rows == 6 * 10
    assert layout.copy_starts == tuple(range(10, 60, 10))


def test_large_arrays_have_wide_rows():
    layout = arena_layouts.layout(3 * [2**20], 3 * [2**20 + 1])
    assert layout.width == arena_layouts.WIDTH
    assert layout.input_rows == (16, 16, 16)
    assert layout.copy_rows == (17, 17, 17)
    ends = itertools.accumulate(layout.copy_rows, initial=layout.copy_starts[0])
    assert layout.rows == list(ends)[-1]


def test_a_plan_without_anything_to_hold_still_has_a_row():
    assert arena_layouts.layout([], []).rows == arena_layouts.layout([0], [0]).rows == 1
