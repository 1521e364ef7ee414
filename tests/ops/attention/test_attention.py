import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.ops.attention import api
from mtuner_jax.ops.attention.operands import Qkv
from tests import comparing

LONG = 600  # tokens; more than one block of queries
XLA = api.Spec(implementation="xla")
# Tokens, query heads, kv heads, head dim, window.
ANY_DEVICE = (
    (17, 2, 2, 4, 0),
    (17, 6, 2, 4, 3),
    (LONG, 4, 2, 4, 0),
    (LONG, 2, 1, 4, 100),
)
ON_GPU = tuple(
    (*sizes, window)
    for sizes in ((256, 8, 8, 64), (512, 8, 2, 128))
    for window in (0, 100)
)


def rows(wanted=lambda back_end: True):
    """The table's rows as parameters; those for GPUs run there only."""
    return [
        pytest.param(name, marks=[pytest.mark.gpu(1)] * back_end.on_gpu_only)
        for name, back_end in api.BACK_ENDS.items()
        if wanted(back_end)
    ]


def cases():
    """Each row of the table with sizes that it takes."""
    return [
        pytest.param(*row.values, sizes, marks=row.marks)
        for row in rows()
        for sizes in (ON_GPU if row.marks else ANY_DEVICE)
    ]


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
    return api.attend(Qkv(q_BTNH, k_BTKH, v_BTKH), ids_BT, spec).out_BTNH


def from_saved(q_BTNH, k_BTKH, v_BTKH, ids_BT, spec):
    qkv = Qkv(q_BTNH, k_BTKH, v_BTKH)
    saved = jax.lax.stop_gradient(api.attend(qkv, ids_BT, spec))
    return api.attend_saved(qkv, ids_BT, saved, spec)


@functools.partial(jax.jit, static_argnums=(0, 2))
def value_and_grads(run, operands, option):
    q, k, v, ids, cotangent = operands
    output, pullback = jax.vjp(lambda *qkv: run(*qkv, ids, option), q, k, v)
    return output, *pullback(cotangent)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("run", [ours, from_saved])
@pytest.mark.parametrize(("name", "sizes"), cases())
def test_output_and_gradients_equal_plain_softmax(run, name, sizes):
    """In the best dtype that the back end takes, packed if it keeps rows apart."""
    tokens, heads, kv_heads, head_dim, window = sizes
    back_end = api.BACK_ENDS[name]
    dtype = back_end.dtypes[0] if back_end.dtypes else "float64"
    q, k, v, cotangent = (
        array.astype(dtype)
        for array in inputs(
            tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        )
    )
    ids = documents(tokens) if back_end.packed_rows else np.ones((2, tokens), np.int32)
    spec = api.Spec(implementation=name, window=window)
    with jax.numpy_dtype_promotion("strict"):
        got = value_and_grads(run, (q, k, v, ids, cotangent), spec)
        exact = [array.astype(np.float64) for array in (q, k, v, cotangent)]
        want = value_and_grads(plain, (*exact[:3], ids, exact[3]), window)
    comparing.assert_trees_close(got, tuple(array.astype(dtype) for array in want))


@pytest.mark.parametrize("run", [ours, from_saved])
@pytest.mark.parametrize("name", rows(lambda back_end: back_end.packed_rows))
@pytest.mark.parametrize("tokens", [16, LONG])
def test_changing_one_document_leaves_the_next_bit_unchanged(run, name, tokens):
    """known-bugs B1: output and gradients of document 2 do not know document 1."""
    spec = api.Spec(implementation=name)
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
        results.append(value_and_grads(run, (q, k, v, ids, cotangent), spec))
    for before, after in zip(*results, strict=True):
        assert np.any(before[:, :border] != after[:, :border])
        np.testing.assert_array_equal(before[:, border:], after[:, border:])


def test_saved_outputs_run_no_attention_forwards():
    q, k, v, cotangent = inputs(tokens=16, heads=2, kv_heads=2, batch=1)
    ids = np.ones((1, 16), np.int32)
    qkv = Qkv(q, k, v)
    saved = jax.eval_shape(lambda qkv: api.attend(qkv, ids, XLA), qkv)

    def replayed(qkv, saved, cotangent):
        return jax.vjp(lambda qkv: api.attend_saved(qkv, ids, saved, XLA), qkv)[1](
            cotangent
        )

    text = jax.jit(replayed).lower(qkv, saved, cotangent).as_text()
    # Scores, gradient of the weights, and of q, k, v; none for the output.
    assert text.count("stablehlo.dot_general") == 5


def test_16_bit_inputs_keep_their_dtype_and_float32_statistics():
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs(tokens=8, heads=4, kv_heads=2))
    with jax.numpy_dtype_promotion("strict"):
        output, stats = jax.eval_shape(
            lambda *qkv: api.attend(Qkv(*qkv), documents(8), XLA), q, k, v
        )
    assert (output.shape, output.dtype) == (q.shape, jnp.bfloat16)
    assert (stats.shape, stats.dtype) == ((2, 2, 2, 8), jnp.float32)


@pytest.mark.parametrize(("tokens", "blocks"), [(512, 1), (513, 2), (16384, 16)])
def test_long_rows_are_cut_into_at_most_16_blocks(tokens, blocks):
    q = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = jax.jit(functools.partial(api.attend, spec=XLA))
    text = run.lower(Qkv(q, q, q), ids).as_text()
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
    got = api.choose("auto", on_gpu=on_gpu, packing=packing, dtype=dtype)
    assert got == want
    assert api.choose("xla", on_gpu=on_gpu, packing=packing, dtype=dtype) == "xla"


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
    assert api.choose("cudnn", **usable) == "cudnn"
    with pytest.raises(ConfigError, match=f"attention=cudnn cannot be used.*{text}"):
        api.choose("cudnn", **{**usable, **changes})


@pytest.mark.parametrize(
    ("head_dim", "hopper", "want"),
    [
        (64, False, "cudnn"),
        (128, False, "cudnn"),
        (36, False, "xla"),
        (36, True, "xla"),
        (192, False, "xla"),
        (192, True, "cudnn"),
        (256, True, "cudnn"),
        (264, True, "xla"),
    ],
)
def test_auto_leaves_head_dims_that_cudnn_lacks_to_xla_and_says_so(
    head_dim, hopper, want, caplog
):
    where = {"on_gpu": True, "packing": False, "dtype": "bfloat16"}
    where |= {"head_dim": head_dim, "hopper": hopper}
    with caplog.at_level("INFO"):
        assert api.choose("auto", **where) == want
    told = [record.getMessage() for record in caplog.records]
    assert bool(told) == (want == "xla")
    if want == "xla":
        limit = 256 if hopper else 128
        reason = f"head_dim={head_dim} (multiples of 8 up to {limit} on these GPUs)"
        assert told[0].startswith("attention: xla, because cudnn cannot be used with")
        assert reason in told[0]
        with pytest.raises(ConfigError, match=rf"attention=cudnn.*head_dim={head_dim}"):
            api.choose("cudnn", **where)


@pytest.mark.parametrize("name", ["auto", *api.BACK_ENDS])
def test_every_back_end_can_be_asked_for_in_the_settings(name):
    assert RunConfig(attention=name).attention == name
