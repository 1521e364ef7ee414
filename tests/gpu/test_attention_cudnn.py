import functools

import jax
import jax.numpy as jnp
import pytest

from mtuner_jax.ops import attention
from tests import comparing

SHAPES = {"heads": (2, 256, 8, 8, 64), "grouped": (2, 512, 8, 2, 128)}


def inputs(shape):
    batch, tokens, heads, kv_heads, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = [(heads, 0), (kv_heads, 1), (kv_heads, 2), (heads, 3)]
    return [
        jax.random.normal(keys[i], (batch, tokens, n, head_dim), jnp.bfloat16)
        for n, i in sizes
    ]


def gradients(run, q, k, v, cotangent):
    output, pullback = jax.vjp(run, q, k, v)
    return output, pullback(cotangent)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("saved", [False, True])
def test_cudnn_equals_the_reference(name, window, saved):
    q, k, v, cotangent = inputs(SHAPES[name])
    ids = jnp.ones(q.shape[:2], jnp.int32)
    cudnn = attention.Spec(implementation="cudnn", window=window)
    reference = attention.Spec(implementation="xla", window=window)

    def run(spec, q, k, v):
        if not saved:
            return attention.attend(q, k, v, ids, spec)[0]
        kept = jax.lax.stop_gradient(attention.attend(q, k, v, ids, spec))
        return attention.attend_saved(q, k, v, ids, kept, spec)

    got = jax.jit(functools.partial(gradients, functools.partial(run, cudnn)))
    want = jax.jit(functools.partial(gradients, functools.partial(run, reference)))
    comparing.assert_trees_close(got(q, k, v, cotangent), want(q, k, v, cotangent))
