import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.ops import dropout

FEATURES = 7


def key(number=3):
    return dropout.fold_in(dropout.key(42), number)


def places(sample_ids, positions):
    as_int = [np.asarray(value, np.int32) for value in (sample_ids, positions)]
    return dropout.Places(*as_int)


def mask(sample_ids, positions, *, keys=None, rate=0.5):
    keys = key() if keys is None else keys
    where = places(sample_ids, positions)
    keep = dropout.keep_mask(keys, where, num_features=FEATURES, rate=rate)
    return np.asarray(keep)


def test_hash_is_the_threefry_of_jax():
    rng = np.random.default_rng(0)
    words, counts = rng.integers(0, 2**32, (2, 2, 64), np.uint32)
    for pair in words.T[:4]:
        got = dropout.threefry_2x32(dropout.Key(*pair), counts[0], counts[1])
        want = jax.extend.random.threefry_2x32(
            (jnp.uint32(pair[0]), jnp.uint32(pair[1])), counts.reshape(-1)
        )
        np.testing.assert_array_equal(np.concatenate(got), want)


def test_a_mask_is_the_16_bit_parts_of_hashes_of_13_rounds():
    """The first hash that Random123 publishes for 13 rounds, then by its definition."""
    zero = dropout.Key(jnp.uint32(0), jnp.uint32(0))
    first = dropout.threefry_2x32(zero, jnp.uint32(0), jnp.uint32(0), rounds=13)
    assert [int(word) for word in first] == [0x9D1C5EC6, 0x8BD50731]
    keep = mask([[5]], [[2]], rate=0.25)[0, 0]
    for feature in range(FEATURES):
        group, lane = divmod(feature, 4)
        words = dropout.threefry_2x32(
            key(), jnp.uint32(5), jnp.uint32(2 * 2 + group), rounds=13
        )
        bits = int(words[lane // 2]) >> 16 * (lane % 2) & 0xFFFF
        assert keep[feature] == (bits >= 2**14)


def test_seeds_of_64_bits_count_in_full():
    assert jax.device_get(dropout.key(2**32 + 5)) == (1, 5)
    assert jax.device_get(dropout.key(-1)) == (2**32 - 1, 2**32 - 1)


def test_names_hash_to_the_published_fnv_1a_values():
    assert dropout.stable_hash("") == 0x811C9DC5
    assert dropout.stable_hash("foobar") == 0xBF9CF968


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements_is_the_rate(rate):
    samples, positions = np.divmod(np.arange(8 * 2000).reshape(8, 2000), 100)
    keep = mask(samples, positions, rate=rate)
    error = 6 * np.sqrt(rate * (1 - rate) / keep.size)
    assert abs(keep.mean() - (1 - rate)) <= error
    by_feature = keep.mean(axis=(0, 1))
    assert np.all(abs(by_feature - (1 - rate)) <= error * np.sqrt(FEATURES))


def test_neighbouring_features_positions_and_samples_are_independent():
    keep = mask(*np.indices((60, 60)), rate=0.5) - 0.5
    for axis in range(3):
        first, second = np.delete(keep, -1, axis), np.delete(keep, 0, axis)
        agreement = 4 * (first * second).mean()
        assert abs(agreement) < 6 / np.sqrt(first.size)
    # Every feature with every one of the next token: no counter is used twice.
    here, after = keep[:, :-1].reshape(-1, FEATURES), keep[:, 1:].reshape(-1, FEATURES)
    agreements = 4 * here.T @ after / len(here)
    assert np.all(abs(agreements) < 6 / np.sqrt(len(here)))


def test_a_token_has_the_same_mask_in_every_packing_and_batch_shape():
    alone = mask([[5] * 6], [range(6)])[0]
    packed = mask(
        [[2, 2, 2, 5, 5, 5, 5, 5, 5, 8], [1] * 10], [[0, 1, 2, *range(6), 0], range(10)]
    )
    np.testing.assert_array_equal(packed[0, 3:9], alone)
    chunks = mask([[5] * 3, [5] * 3], [range(3), range(3, 6)])
    np.testing.assert_array_equal(chunks.reshape(alone.shape), alone)


def test_modules_layers_steps_and_seeds_draw_different_masks():
    def folded(seed, *numbers):
        keys = dropout.key(seed)
        for number in numbers:
            keys = dropout.fold_in(keys, number)
        return mask(*np.indices((20, 20)), keys=keys)

    modules = [dropout.stable_hash(name) for name in ("mlp.up_proj", "mlp.gate_proj")]
    masks = [
        folded(0, 1, 2, modules[0]),
        folded(0, 1, 2, modules[1]),
        folded(0, 1, 3, modules[0]),
        folded(0, 2, 2, modules[0]),
        folded(0, 2, 1, modules[0]),
        folded(1, 1, 2, modules[0]),
    ]
    for index, one in enumerate(masks):
        for other in masks[:index]:
            assert abs((one == other).mean() - 0.5) < 6 / (2 * np.sqrt(one.size))


def test_traced_numbers_fold_as_python_ones():
    got = jax.jit(lambda number: dropout.fold_in(dropout.key(1), number))(jnp.int32(9))
    assert jax.device_get(got) == jax.device_get(dropout.fold_in(dropout.key(1), 9))


def test_survivors_are_scaled_up_and_the_dtype_stays():
    x_BTD = np.ones((2, 5, FEATURES), np.float32)
    samples, positions = np.indices((2, 5))
    got = dropout.apply(x_BTD, key(), places(samples, positions), rate=0.2)
    keep = mask(samples, positions, rate=0.2)
    np.testing.assert_array_equal(got, np.where(keep, np.float32(1 / 0.8), 0))
    half = jax.eval_shape(
        lambda x: dropout.apply(x, key(), places(samples, positions), rate=0.2),
        x_BTD.astype(jnp.bfloat16),
    )
    assert half.dtype == jnp.bfloat16
