import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.configs import ConfigError
from mtuner_jax.ops import attention
from tests import comparing

LONG = 600  # tokens; more than one block of queries
SPECS = {window: attention.Spec(window=window) for window in (0, 3, 100)}


def inputs(*, tokens, heads, kv_heads, seed=0, batch=2, head_dim=4):
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads, heads)
    return [rng.normal(size=(batch, tokens, n, head_dim)) for n in counts]


def documents(tokens, *, batch=2, seed=1):
    """Rows of four documents, the last of which is padding (0)."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((batch, tokens), np.int32)
    for row in ids:
        borders = np.sort(rng.choice(np.arange(1, tokens), 3, replace=False))
        for number, (start, end) in enumerate(
            zip((0, *borders[:-1]), borders, strict=True)
        ):
            row[start:end] = number + 1
    return ids


def plain(q_BTNH, k_BTKH, v_BTKH, ids_BT, window):
    """Softmax attention as in the textbook, over whole rows."""
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH = jnp.repeat(k_BTKH, groups, axis=2)
    v_BTNH = jnp.repeat(v_BTKH, groups, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH)
    scores /= jnp.sqrt(jnp.array(q_BTNH.shape[-1], scores.dtype))
    back = np.arange(ids_BT.shape[1])[:, None] - np.arange(ids_BT.shape[1])[None, :]
    seen = (back >= 0) & ((back < window) if window else True)
    seen = seen[None] & (ids_BT[:, :, None] == ids_BT[:, None, :])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v_BTNH)


def ours(q_BTNH, k_BTKH, v_BTKH, ids_BT, spec):
    return attention.attend(q_BTNH, k_BTKH, v_BTKH, ids_BT, spec)[0]


def from_saved(q_BTNH, k_BTKH, v_BTKH, ids_BT, spec):
    operands = (q_BTNH, k_BTKH, v_BTKH)
    saved = jax.lax.stop_gradient(attention.attend(*operands, ids_BT, spec))
    return attention.attend_saved(*operands, ids_BT, saved, spec)


@functools.partial(jax.jit, static_argnums=(0, 2))
def value_and_grads(run, operands, option):
    q, k, v, ids, cotangent = operands
    output, pullback = jax.vjp(lambda *qkv: run(*qkv, ids, option), q, k, v)
    return output, *pullback(cotangent)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("run", [ours, from_saved])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "window"),
    [(17, 2, 2, 0), (17, 6, 2, 3), (LONG, 4, 2, 0), (LONG, 2, 1, 100)],
)
def test_output_and_gradients_equal_plain_softmax(run, tokens, heads, kv_heads, window):
    q, k, v, cotangent = inputs(tokens=tokens, heads=heads, kv_heads=kv_heads)
    operands = (q, k, v, documents(tokens), cotangent)
    with jax.numpy_dtype_promotion("strict"):
        got = value_and_grads(run, operands, SPECS[window])
        want = value_and_grads(plain, operands, window)
    comparing.assert_trees_close(got, want)


@pytest.mark.parametrize("run", [ours, from_saved])
@pytest.mark.parametrize("tokens", [16, LONG])
def test_changing_one_document_leaves_the_next_bit_unchanged(run, tokens):
    """known-bugs B1: output and gradients of document 2 do not know document 1."""
    border = tokens // 2 + 1
    ids = np.where(np.arange(tokens) < border, 1, 2)[None].astype(np.int32)
    results = []
    for seed in (0, 1):
        operands = inputs(tokens=tokens, heads=4, kv_heads=2, batch=1, seed=9)
        for array, other in zip(
            operands,
            inputs(tokens=tokens, heads=4, kv_heads=2, batch=1, seed=seed),
            strict=True,
        ):
            array[:, :border] = 30.0 * other[:, :border]
        q, k, v, cotangent = (array.astype(np.float32) for array in operands)
        results.append(value_and_grads(run, (q, k, v, ids, cotangent), SPECS[0]))
    for before, after in zip(*results, strict=True):
        assert np.any(before[:, :border] != after[:, :border])
        np.testing.assert_array_equal(before[:, border:], after[:, border:])


def test_saved_outputs_run_no_attention_forwards():
    q, k, v, cotangent = inputs(tokens=16, heads=2, kv_heads=2, batch=1)
    ids = np.ones((1, 16), np.int32)
    saved = jax.eval_shape(lambda *qkv: attention.attend(*qkv, ids, SPECS[0]), q, k, v)

    def replayed(q, k, v, saved, cotangent):
        def run(*qkv):
            return attention.attend_saved(*qkv, ids, saved, SPECS[0])

        return jax.vjp(run, q, k, v)[1](cotangent)

    text = jax.jit(replayed).lower(q, k, v, saved, cotangent).as_text()
    # Scores, gradient of the weights, and of q, k, v; none for the output.
    assert text.count("stablehlo.dot_general") == 5


def test_16_bit_inputs_keep_their_dtype_and_float32_statistics():
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs(tokens=8, heads=4, kv_heads=2))
    with jax.numpy_dtype_promotion("strict"):
        output, stats = jax.eval_shape(
            lambda *qkv: attention.attend(*qkv, documents(8), SPECS[0]), q, k, v
        )
    assert (output.shape, output.dtype) == (q.shape, jnp.bfloat16)
    assert (stats.shape, stats.dtype) == ((2, 2, 2, 8), jnp.float32)


@pytest.mark.parametrize(("tokens", "blocks"), [(512, 1), (513, 2), (16384, 16)])
def test_long_rows_are_cut_into_at_most_16_blocks(tokens, blocks):
    q = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = functools.partial(attention.attend, spec=SPECS[0])
    text = jax.jit(run).lower(q, q, q, ids).as_text()
    assert text.count("stablehlo.dot_general") == 2 * blocks


@pytest.mark.parametrize(
    ("on_gpu", "packing", "dtype", "want"),
    [
        (True, False, "bfloat16", "cudnn"),
        (True, True, "bfloat16", "xla"),
        (True, False, "float32", "xla"),
        (False, False, "bfloat16", "xla"),
    ],
)
def test_auto_takes_cudnn_only_where_it_is_exact(on_gpu, packing, dtype, want):
    got = attention.choose("auto", on_gpu=on_gpu, packing=packing, dtype=dtype)
    assert got == want
    assert attention.choose("xla", on_gpu=on_gpu, packing=packing, dtype=dtype) == "xla"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"packing": True}, "packing=true .* set packing=false"),
        ({"on_gpu": False}, "no GPU; set attention=xla"),
        ({"dtype": "float32"}, "dtype=float32; set dtype=bfloat16"),
    ],
)
def test_cudnn_is_refused_where_it_would_leak_or_fail(changes, text):
    usable = {"on_gpu": True, "packing": False, "dtype": "bfloat16"}
    assert attention.choose("cudnn", **usable) == "cudnn"
    with pytest.raises(ConfigError, match=f"attention=cudnn cannot be used.*{text}"):
        attention.choose("cudnn", **{**usable, **changes})
