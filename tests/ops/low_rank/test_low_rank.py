import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.ops import dropout
from mtuner_jax.ops.low_rank import api
from mtuner_jax.ops.low_rank.operands import Dropout, LayerAdapters, Lora
from tests import comparing

D, F, R = 6, 8, 3
BATCH, TOKENS = 2, 5


def inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    sizes = {"x": (BATCH, TOKENS, D), "kernel": (D, F), "bias": (F,)}
    arrays = {name: rng.normal(size=size).astype(dtype) for name, size in sizes.items()}
    wide = np.promote_types(dtype, np.float32)
    a, b = rng.normal(size=(D, R)).astype(wide), rng.normal(size=(R, F)).astype(wide)
    return arrays, Lora(a, b, np.asarray(0.25, wide))


def randomness(rate):
    samples, positions = np.indices((BATCH, TOKENS)).astype(np.int32)
    places = dropout.Places(samples, positions)
    return Dropout(dropout.key(5), places, rate)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", api.BACK_ENDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_output_and_gradients_equal_the_formula(name, with_bias, rate):
    arrays, lora = inputs()
    x, kernel = arrays["x"], arrays["kernel"]
    bias = arrays["bias"] if with_bias else None
    drop = None if rate is None else randomness(rate)
    keep = np.ones(x.shape)
    if rate:
        mask = dropout.keep_mask(drop.key, drop.places, num_features=D, rate=rate)
        keep = np.asarray(mask) / (1 - rate)

    def run(x, lora):
        return api.apply(x, kernel, bias, lora=lora, drop=drop, implementation=name)

    cotangent = np.random.default_rng(1).normal(size=(BATCH, TOKENS, F))
    with jax.numpy_dtype_promotion("strict"):
        output, pullback = jax.vjp(run, x, lora)
        dx, d_lora = pullback(jnp.asarray(cotangent))
    kept = keep * x
    update = 0.25 * kept @ lora.a_DR @ lora.b_RF
    want = x @ kernel + update + (0.0 if bias is None else bias)
    want_dx = cotangent @ kernel.T
    want_dx += keep * (0.25 * cotangent @ lora.b_RF.T @ lora.a_DR.T)
    rows, d_rows = kept.reshape(-1, D), cotangent.reshape(-1, F)
    want_da = 0.25 * rows.T @ d_rows @ lora.b_RF.T
    want_db = 0.25 * (rows @ lora.a_DR).T @ d_rows
    comparing.assert_trees_close(
        jax.device_get((output, dx, d_lora.a_DR, d_lora.b_RF)),
        (want, want_dx, want_da, want_db),
    )


@pytest.mark.usefixtures("x64")
def test_merged_kernel_gives_the_adapters_output():
    arrays, lora = inputs()
    want = api.apply(arrays["x"], arrays["kernel"], lora=lora)
    merged = api.merged(arrays["kernel"], lora)
    got = api.apply(arrays["x"], np.asarray(merged))
    comparing.assert_trees_close(got, want, bound=comparing.BOUNDS["float32"])


def test_update_of_a_16_bit_kernel_is_added_in_float32():
    arrays, lora = inputs(jnp.bfloat16)
    small = lora._replace(b_RF=1e-5 * lora.b_RF)
    merged = api.merged(arrays["kernel"], small)
    assert merged.dtype == jnp.float32
    delta = np.asarray(merged) - arrays["kernel"].astype(np.float32)
    assert np.count_nonzero(delta) > delta.size // 2


@pytest.mark.parametrize("name", api.BACK_ENDS)
def test_16_bit_inputs_give_16_bit_outputs_and_float32_adapter_gradients(name):
    arrays, lora = inputs(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        output, pullback = jax.vjp(
            lambda x, lora: api.apply(
                x,
                arrays["kernel"],
                arrays["bias"],
                lora=lora,
                drop=randomness(0.5),
                implementation=name,
            ),
            arrays["x"],
            lora,
        )
        dx, d_lora = pullback(jnp.ones_like(output))
    assert output.dtype == dx.dtype == jnp.bfloat16
    assert d_lora.a_DR.dtype == d_lora.b_RF.dtype == jnp.float32


def test_each_module_gets_its_adapter_and_its_own_mask():
    _, lora = inputs(np.float32)
    other = lora._replace(scaling=np.float32(2.0))
    modules = {"self_attn.q_proj": lora, "self_attn.k_proj": other}
    adapters = LayerAdapters(modules, randomness(0.5))
    (got, drop), (got_other, drop_other) = map(adapters.of, modules)
    assert (got, got_other) == (lora, other)
    masks = [
        dropout.keep_mask(d.key, d.places, num_features=D, rate=d.rate)
        for d in (drop, drop_other)
    ]
    assert np.any(masks[0] != masks[1])
    assert adapters.of("mlp.up_proj")[0] is None
    assert LayerAdapters(modules).of("self_attn.q_proj") == (lora, None)
