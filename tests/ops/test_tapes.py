import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.ops import tapes
from tests import comparing

SIZE = 5
NAMES = ("hidden", "pair")


@jax.custom_vjp
def squares(x):
    """An operation with an output and an extra: x * x and 2 x."""
    return x * x, 2.0 * x


squares.defvjp(
    lambda x: (squares(x), 2.0 * x), lambda extra, grads: (grads[0] * extra,)
)


@jax.custom_vjp
def squares_saved(x, output, extra):
    """The value of a saved output, with the gradient of `squares`."""
    del x, extra
    return output


squares_saved.defvjp(
    lambda x, output, extra: (output, extra),
    lambda extra, grad: (grad * extra, jnp.zeros_like(grad), jnp.zeros_like(extra)),
)


def layer(weights, x, tape):
    """Three products with two places where a value may be kept."""
    hidden = tape.keep("hidden", x @ weights[0])
    between = jnp.tanh(hidden) @ weights[1]
    output = tape.keep_pair(
        "pair",
        lambda: squares(between),
        lambda output, extra: squares_saved(between, output, extra),
    )
    return jnp.tanh(output @ weights[2])


def inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(3, SIZE, SIZE)).astype(dtype), rng.normal(
        size=(4, SIZE)
    ).astype(dtype)


def forward(names, weights, x):
    tape = tapes.Tape(names)
    return layer(weights, x, tape), tape.recorded


def backward(names, saved, weights, x, cotangent):
    def run(weights, x):
        return layer(weights, x, tapes.Tape(names, saved=saved))

    return jax.vjp(run, weights, x)[1](cotangent)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("names", [(), ("hidden",), ("pair",), NAMES])
def test_gradients_do_not_depend_on_what_is_kept(names):
    weights, x = inputs()

    def replayed(weights, x):
        output, saved = forward(names, weights, x)
        return output, backward(names, saved, weights, x, output)

    def plain(weights, x):
        output, pullback = jax.vjp(lambda w, x: layer(w, x, tapes.Tape()), weights, x)
        return output, pullback(output)

    got, want = jax.jit(replayed)(weights, x), jax.jit(plain)(weights, x)
    comparing.assert_trees_close(got, want)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ((), set()),
        (("hidden",), {"hidden"}),
        (("pair",), {"pair", "pair_extra"}),
        (("unknown",), set()),
    ],
)
def test_exactly_the_named_tensors_are_recorded(names, kept):
    weights, x = inputs(np.float32)
    output, recorded = jax.eval_shape(functools.partial(forward, names), weights, x)
    assert recorded.keys() == kept
    assert all(leaf.size == output.size for leaf in recorded.values())


@pytest.mark.parametrize(
    ("names", "recomputed"), [((), 3), (("hidden",), 2), (("pair",), 2), (NAMES, 1)]
)
def test_what_is_saved_is_not_computed_again(names, recomputed):
    weights, x = inputs(np.float32)
    output, saved = jax.eval_shape(functools.partial(forward, names), weights, x)
    run = jax.jit(functools.partial(backward, names))
    text = run.lower(saved, weights, x, output).as_text()
    gradients = 2 * len(weights)
    assert text.count("stablehlo.dot_general") == gradients + recomputed


def test_saved_values_win_over_computed_ones():
    saved = {"hidden": np.full((4, SIZE), 0.5, np.float32)}
    weights, x = inputs(np.float32)
    tape = tapes.Tape(("hidden",), saved=saved)
    got = layer(weights, x, tape)
    want = layer(weights, 9.0 * x, tape)
    np.testing.assert_array_equal(got, want)
    assert not tape.recorded
