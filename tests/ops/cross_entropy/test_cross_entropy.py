import functools
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.numbers import chunking
from mtuner_jax.ops.cross_entropy import api, reference
from mtuner_jax.ops.cross_entropy.operands import LossTokens
from tests import comparing

TOKENS, WIDTH, VOCAB = 24, 6, 40
SMALL = {"limit_bytes": 4 * VOCAB * 9}  # 9 tokens fit, so chunks of 8
SMALL_CHUNKS = types.SimpleNamespace(
    value=functools.partial(reference.value, **SMALL),
    value_and_grad=functools.partial(reference.value_and_grad, **SMALL),
)
BACK_ENDS = {**api.BACK_ENDS, "small chunks": SMALL_CHUNKS}


def inputs(*, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    x_SD = rng.normal(size=(TOKENS, WIDTH)).astype(dtype)
    table_VD = rng.normal(size=(VOCAB, WIDTH)).astype(dtype)
    targets_S = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    weights_S = rng.integers(0, 2, TOKENS).astype(np.float32)
    return x_SD, table_VD, targets_S, weights_S


def given(x_SD, table_VD, targets_S, weights_S):
    """Arguments of a back end."""
    return LossTokens(x_SD, targets_S, weights_S), table_VD


def textbook(x_SD, table_VD, targets_S, weights_S):
    """-w log softmax(x W^T)[target] and the gradient of its sum to x, in numpy."""
    logits = x_SD @ table_VD.T
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = exponentials / exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(p))
    value = -np.log(p[rows, targets_S]) * weights_S
    p[rows, targets_S] -= 1.0
    return value, (p * weights_S[:, None]) @ table_VD


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", BACK_ENDS)
def test_loss_and_gradient_equal_the_textbook(name):
    arrays, back_end = inputs(), BACK_ENDS[name]

    def run(*arrays):
        value, grad = back_end.value_and_grad(*given(*arrays))
        return value, grad, back_end.value(*given(*arrays))

    whole = jax.value_and_grad(reference.cross_entropy)
    with jax.numpy_dtype_promotion("strict"):
        value, grad, forward_only = jax.jit(run)(*arrays)
        unchunked = jax.jit(whole)(*arrays)
    want = textbook(*arrays)
    comparing.assert_trees_close((value, grad), want)
    comparing.assert_trees_close((forward_only, grad), want)
    comparing.assert_trees_close(unchunked, (want[0].sum(), want[1]))


@pytest.mark.parametrize("name", BACK_ENDS)
def test_tokens_without_weight_add_exactly_nothing(name):
    x_SD, table_VD, targets_S, weights_S = inputs(dtype=np.float32)
    weights_S[8:16] = 0.0  # a whole chunk
    ignored = weights_S == 0.0
    run = jax.jit(lambda *arrays: BACK_ENDS[name].value_and_grad(*given(*arrays)))
    value, grad = run(x_SD, table_VD, targets_S, weights_S)
    assert not np.any(np.asarray(grad)[ignored])
    changed_targets = np.where(ignored, -100, targets_S).astype(np.int32)
    changed_x = np.where(ignored[:, None], 50.0 * x_SD[::-1], x_SD)
    again = run(changed_x, table_VD, changed_targets, weights_S)
    np.testing.assert_array_equal(value, again[0])
    np.testing.assert_array_equal(grad, again[1])
    nothing = run(x_SD, table_VD, targets_S, np.zeros_like(weights_S))
    assert not np.any(nothing[0])
    assert not np.any(nothing[1])


def largest_array(jaxpr):
    """Elements of the largest array that a program computes, loops included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [var.aval.size for var in equation.outvars]
        for value in equation.params.values():
            for part in value if isinstance(value, tuple) else (value,):
                inner = getattr(part, "jaxpr", part)
                if isinstance(inner, jax.extend.core.Jaxpr):
                    sizes.append(largest_array(inner))
    return max(sizes)


@pytest.mark.parametrize("name", api.BACK_ENDS)
@pytest.mark.parametrize("run", [api.value, api.value_and_grad])
def test_logits_of_all_tokens_never_exist(run, name):
    tokens, width, vocab = 4096, 64, 128256
    shapes = ((tokens, width), (vocab, width), (tokens,), (tokens,))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.float32)
    arrays = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]
    chunk = chunking.loss_tokens(tokens, vocab)
    assert chunk == 512
    run = functools.partial(run, implementation=name)
    largest = largest_array(jax.make_jaxpr(run)(*given(*arrays)).jaxpr)
    assert largest == chunk * vocab
    whole = jax.make_jaxpr(reference.cross_entropy)(*arrays).jaxpr
    assert largest_array(whole) == tokens * vocab


@pytest.mark.parametrize(
    ("tokens", "fit", "want"), [(48, 100, 24), (32, 100, 32), (24, 9, 8), (23, 9, 1)]
)
def test_chunks_are_the_largest_divisor_that_fits(tokens, fit, want):
    got = chunking.loss_tokens(tokens, VOCAB, limit_bytes=4 * VOCAB * fit)
    assert got == want


@pytest.mark.parametrize("name", api.BACK_ENDS)
def test_16_bit_inputs_sum_in_float32(name):
    arrays = inputs(dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        value, grad = jax.eval_shape(BACK_ENDS[name].value_and_grad, *given(*arrays))
    assert (value.shape, value.dtype) == ((TOKENS,), jnp.float32)
    assert (grad.shape, grad.dtype) == ((TOKENS, WIDTH), jnp.bfloat16)


def test_chunks_without_loss_are_skipped():
    """A token without loss may hold anything, even NaN, in a chunk of its kind."""
    tokens, width, vocab = 128, 8, 32
    x_SD = np.random.default_rng(0).normal(size=(tokens, width)).astype(np.float32)
    weights_S = np.zeros(tokens, np.float32)
    weights_S[::4] = 1.0
    x_SD[1::4] = np.nan
    targets_S = np.zeros(tokens, np.int32)
    table_VD = np.ones((vocab, width), np.float32)
    x_SD[3::4] = np.nan
    x_SD[2::4] = np.nan
    loss, dx_SD = reference.value_and_grad(
        LossTokens(x_SD, targets_S, weights_S), table_VD
    )
    assert np.isfinite(loss[::4]).all()
    np.testing.assert_array_equal(loss[1::4], 0.0)
    assert np.isfinite(dx_SD[::4]).all()
    np.testing.assert_array_equal(dx_SD[1::4], 0.0)
