import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.ops.attention import api, flash
from mtuner_jax.ops.attention.operands import Documents, Qkv
from tests import comparing
from tests.ops.attention import fake_flash

LONG = 600  # tokens; more than one block of queries
XLA = api.Spec(implementation="xla")
FLASH = api.Spec(implementation="flash", most_documents=4)
# Tokens, query heads, kv heads, head dim, window.
ANY_DEVICE = (
    (17, 2, 2, 4, 0),
    (17, 6, 2, 4, 3),
    (LONG, 4, 2, 4, 0),
    (LONG, 2, 1, 4, 100),
)
ON_GPU = tuple(
    (*sizes, window)
    for sizes in ((256, 8, 8, 64), (512, 8, 2, 128), (131, 4, 4, 96), (200, 4, 2, 256))
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
    located = api.locate(ids_BT, spec)
    return api.attend(Qkv(q_BTNH, k_BTKH, v_BTKH), located, spec).out_BTNH


def from_saved(q_BTNH, k_BTKH, v_BTKH, ids_BT, spec):
    qkv = Qkv(q_BTNH, k_BTKH, v_BTKH)
    located = api.locate(ids_BT, spec)
    saved = jax.lax.stop_gradient(api.attend(qkv, located, spec))
    return api.attend_saved(qkv, located, saved, spec)


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
    spec = api.Spec(implementation=name, window=window, most_documents=6)
    with jax.numpy_dtype_promotion("strict"):
        got = value_and_grads(run, (q, k, v, ids, cotangent), spec)
        exact = [array.astype(np.float64) for array in (q, k, v, cotangent)]
        want = value_and_grads(plain, (*exact[:3], ids, exact[3]), window)
    comparing.assert_trees_close(got, tuple(array.astype(dtype) for array in want))


@pytest.fixture
def fake_flash_package(monkeypatch):
    monkeypatch.setattr(flash, "_package", lambda: fake_flash)


@pytest.mark.usefixtures("x64", "fake_flash_package")
@pytest.mark.parametrize("run", [ours, from_saved])
@pytest.mark.parametrize("sizes", ANY_DEVICE)
def test_flash_attention_is_given_what_it_asks_for(run, sizes):
    """Its kernels run on GPUs; here the host computes what they are asked for."""
    tokens, heads, kv_heads, head_dim, window = sizes
    q, k, v, cotangent = inputs(
        tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )
    ids = documents(tokens)
    spec = dataclasses.replace(FLASH, window=window)
    got = value_and_grads(run, (q, k, v, ids, cotangent), spec)
    want = value_and_grads(plain, (q, k, v, ids, cotangent), window)
    comparing.assert_trees_close(got, want, bound=1e-6)  # its statistics are float32


@pytest.mark.usefixtures("fake_flash_package")
@pytest.mark.parametrize("run", [ours, from_saved])
def test_flash_attention_runs_on_each_device_of_a_mesh(run):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = inputs(tokens=16, heads=4, kv_heads=2, batch=8)
    q, k, v, cotangent = (array.astype(np.float32) for array in arrays)
    operands = (q, k, v, documents(16, batch=8), cotangent)
    of_devices = jax.shard_map(
        lambda *operands: value_and_grads(run, operands, FLASH),
        mesh=mesh,
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
    )
    got = jax.jit(of_devices)(*operands)
    want = value_and_grads(run, operands, XLA)
    comparing.assert_trees_close(got, want)


@pytest.mark.parametrize("run", [ours, from_saved])
@pytest.mark.parametrize("name", rows(lambda back_end: back_end.packed_rows))
@pytest.mark.parametrize("tokens", [16, LONG])
def test_changing_one_document_leaves_the_next_bit_unchanged(run, name, tokens):
    """known-bugs B1: output and gradients of document 2 do not know document 1."""
    spec = api.Spec(implementation=name, most_documents=2)
    dtype, head_dim = ("bfloat16", 64) if spec.back_end.dtypes else ("float32", 4)
    border = tokens // 2 + 1
    ids = np.where(np.arange(tokens) < border, 1, 2)[None].astype(np.int32)
    results = []
    for seed in (0, 1):
        sizes = {"tokens": tokens, "heads": 4, "kv_heads": 2, "batch": 1}
        operands = inputs(**sizes, seed=9, head_dim=head_dim)
        others = inputs(**sizes, seed=seed, head_dim=head_dim)
        for array, other in zip(operands, others, strict=True):
            array[:, :border] = 30.0 * other[:, :border]
        q, k, v, cotangent = (array.astype(dtype) for array in operands)
        results.append(value_and_grads(run, (q, k, v, ids, cotangent), spec))
    for before, after in zip(*results, strict=True):
        assert np.any(before[:, :border] != after[:, :border])
        np.testing.assert_array_equal(before[:, border:], after[:, border:])


def test_documents_are_located_by_their_borders_within_rows():
    ids = np.array([[1, 1, 2, 0, 0], [1, 1, 1, 1, 1], [2, 3, 3, 1, 0]], np.int32)
    starts = api.locate(ids, FLASH).starts
    assert starts.dtype == jnp.int32
    assert starts.tolist() == [0, 2, 3, 5, 10, 11, 13, 14, *[15] * 5]
    assert api.locate(ids, XLA).starts is None


@pytest.mark.parametrize("tokens", [16, LONG])
def test_located_documents_are_those_of_segment_ids(tokens):
    ids = documents(tokens, batch=8)
    numbers = np.repeat(
        np.arange(32), np.diff(np.asarray(api.locate(ids, FLASH).starts))
    )
    inside = numbers.reshape(ids.shape)
    same = inside[:, :, None] == inside[:, None, :]
    np.testing.assert_array_equal(same, ids[:, :, None] == ids[:, None, :])


def test_devices_of_a_mesh_locate_the_documents_of_their_own_rows():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    ids, rows = documents(16, batch=8), jax.P("x")
    with jax.set_mesh(mesh):
        locate = jax.shard_map(
            lambda part: api.locate(part, FLASH).starts, in_specs=rows, out_specs=rows
        )
        got = np.asarray(jax.jit(locate)(jax.device_put(ids, rows))).reshape(8, -1)
    for row, starts in zip(ids, got, strict=True):
        np.testing.assert_array_equal(starts, api.locate(row[None], FLASH).starts)


def test_attention_that_needs_a_bound_of_documents_asks_for_it():
    with pytest.raises(ConfigError, match="attention=flash has to know how many doc"):
        api.Spec(implementation="flash")


def test_saved_outputs_run_no_attention_forwards():
    q, k, v, cotangent = inputs(tokens=16, heads=2, kv_heads=2, batch=1)
    ids = Documents(np.ones((1, 16), np.int32))
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
            lambda *qkv: api.attend(Qkv(*qkv), Documents(documents(8)), XLA), q, k, v
        )
    assert (output.shape, output.dtype) == (q.shape, jnp.bfloat16)
    assert (stats.shape, stats.dtype) == ((2, 2, 2, 8), jnp.float32)


@pytest.mark.parametrize(("tokens", "blocks"), [(512, 1), (513, 2), (16384, 16)])
def test_long_rows_are_cut_into_at_most_16_blocks(tokens, blocks):
    q = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    run = jax.jit(functools.partial(api.attend, spec=XLA))
    text = run.lower(Qkv(q, q, q), Documents(ids)).as_text()
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
    where = {"device": api.Device(on_gpu=on_gpu), "packing": packing, "dtype": dtype}
    assert api.choose("auto", **where) == want
    assert api.choose("xla", **where) == "xla"


HOPPER = api.Device(on_gpu=True, capability=9.0)


@pytest.fixture
def with_flash(monkeypatch):
    monkeypatch.setattr(api, "_installed", lambda package: True)


@pytest.mark.usefixtures("with_flash")
@pytest.mark.parametrize("packing", [False, True])
def test_auto_takes_flash_attention_for_packed_rows_on_hopper(packing):
    step = {"packing": packing, "dtype": "bfloat16", "head_dim": 128}
    fastest = "flash" if packing else "cudnn"
    assert api.choose("auto", device=HOPPER, **step) == fastest
    assert api.choose("flash", device=HOPPER, **step) == "flash"
    for capability in (8.9, 10.0, 12.0):
        other = api.Device(on_gpu=True, capability=capability)
        portable = "xla" if packing else "cudnn"
        assert api.choose("auto", device=other, **step) == portable
        with pytest.raises(ConfigError, match=r"flash cannot be .* GPUs other than"):
            api.choose("flash", device=other, **step)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch, caplog
):
    monkeypatch.setattr(api, "_installed", lambda package: False)
    step = {"packing": True, "dtype": "bfloat16"}
    with caplog.at_level("INFO"):
        assert api.choose("auto", device=HOPPER, **step) == "xla"
    assert "pip install 'mtuner-jax[flash12]' or 'mtuner-jax[flash13]'" in caplog.text
    elsewhere = dataclasses.replace(HOPPER, elsewhere=True)
    assert api.choose("auto", device=elsewhere, **step) == "flash"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"packing": True}, "packing=true .* set packing=false"),
        ({"device": api.Device(on_gpu=False)}, "no GPU; set attention=xla"),
        ({"dtype": "float32"}, "dtype=float32; set dtype=bfloat16"),
    ],
)
def test_cudnn_is_refused_where_it_would_leak_or_fail(changes, text):
    usable = {"device": api.Device(on_gpu=True), "packing": False, "dtype": "bfloat16"}
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
    device = api.Device(on_gpu=True, capability=9.0 if hopper else 8.6)
    where = {"device": device, "packing": False, "dtype": "bfloat16"}
    where |= {"head_dim": head_dim}
    with caplog.at_level("INFO"):
        assert api.choose("auto", **where) == want
    told = [record.getMessage() for record in caplog.records]
    assert bool(told) == (want == "xla")
    if want == "xla":
        start = "attention: xla, because cudnn cannot be used with"
        assert told[0].startswith(start)
        limit = 256 if hopper else 128
        reason = f"head_dim={head_dim} (multiples of 8 up to {limit} on these GPUs)"
        assert reason in told[0]
        with pytest.raises(ConfigError, match=rf"attention=cudnn.*head_dim={head_dim}"):
            api.choose("cudnn", **where)


@pytest.mark.parametrize("name", ["auto", *api.BACK_ENDS])
def test_every_back_end_can_be_asked_for_in_the_settings(name):
    assert RunConfig(attention=name).attention == name
