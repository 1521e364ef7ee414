import hypothesis
import numpy as np
from hypothesis import strategies as st

from mtuner_jax.data import batches, samples


def build(*masks):
    builder = samples.SamplesBuilder()
    for index, mask in enumerate(masks):
        ids = np.arange(len(mask), dtype=np.int32) + 10 * (index + 1)
        builder.add(100 + index, ids, np.asarray(mask, bool))
    return builder.build()


def test_a_packed_row_by_hand():
    data = build([0, 0, 1, 1], [0, 1])
    batch = batches.assemble(
        data, [np.asarray([0, 1]), np.asarray([1])], num_rows=3, max_length=8
    )
    np.testing.assert_array_equal(
        batch.input_ids,
        [[10, 11, 12, 13, 20, 21, 0, 0], [20, 21] + [0] * 6, [0] * 8],
    )
    np.testing.assert_array_equal(
        batch.targets, [[11, 12, 13, 0, 21, 0, 0, 0], [21] + [0] * 7, [0] * 8]
    )
    np.testing.assert_array_equal(
        batch.weights, [[0, 1, 1, 0, 1, 0, 0, 0], [1] + [0] * 7, [0] * 8]
    )
    np.testing.assert_array_equal(
        batch.segment_ids, [[1, 1, 1, 1, 2, 2, 0, 0], [1, 1] + [0] * 6, [0] * 8]
    )
    np.testing.assert_array_equal(
        batch.positions, [[0, 1, 2, 3, 0, 1, 0, 0], [0, 1] + [0] * 6, [0] * 8]
    )
    np.testing.assert_array_equal(
        batch.sample_ids,
        [[100] * 4 + [101] * 2 + [0] * 2, [101] * 2 + [0] * 6, [0] * 8],
    )
    kinds = {
        name: str(array.dtype)
        for name, array in batch._asdict().items()
        if array is not None
    }
    assert kinds.pop("weights") == "float32"
    assert set(kinds.values()) == {"int32"}


def test_the_end_of_a_document_does_not_predict_the_next_ones_start():
    data = build([1, 1], [1, 1])
    row = np.asarray([0, 1])
    batch = batches.assemble(data, [row], num_rows=1, max_length=4)
    assert batch.weights.tolist() == [[1, 0, 1, 0]]


def test_a_full_row_ends_without_a_target():
    data = build([0, 1, 1, 1])
    batch = batches.assemble(data, [np.asarray([0])], num_rows=1, max_length=4)
    assert batch.targets.tolist() == [[11, 12, 13, 0]]
    assert batch.weights.tolist() == [[1, 1, 1, 0]]


masks = st.lists(st.booleans(), min_size=1, max_size=9).map(lambda m: [False, *m[1:]])


@hypothesis.given(st.lists(masks, min_size=1, max_size=5))
def test_as_many_targets_carry_loss_as_tokens_do(documents):
    data = build(*documents)
    together = [np.arange(len(documents))]
    apart = [np.asarray([i]) for i in range(len(documents))]
    want = sorted(
        int(token)
        for i in range(len(data))
        for token in data.tokens(i)[0][data.tokens(i)[1]]
    )
    for rows in (together, apart):
        batch = batches.assemble(data, rows, num_rows=5, max_length=45)
        assert batch.weights.sum() == data.num_trained.sum() == sum(map(sum, documents))
        assert sorted(batch.targets[batch.weights > 0].tolist()) == want
        assert not batch.weights[batch.segment_ids == 0].any()
