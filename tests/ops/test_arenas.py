import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.ops import arenas


def test_what_was_written_is_read_again():
    values = [jnp.arange(6.0).reshape(2, 3), jnp.ones((4,))]
    arena = arenas.write(jnp.zeros((5, 4)), 1, values)
    got, _ = arenas.take(arena, 1, [value.shape for value in values])
    for array, want in zip(got, values, strict=True):
        np.testing.assert_array_equal(array, want)


def test_an_array_of_another_dtype_is_refused_not_cast():
    text = r"an array of int8 \(2, 3\) can't be put into an arena of float32"
    with pytest.raises(TypeError, match=text):
        arenas.write(jnp.zeros((5, 4)), 0, [jnp.zeros((2, 3), jnp.int8)])
