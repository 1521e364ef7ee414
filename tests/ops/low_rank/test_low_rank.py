import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtuner_jax.ops import dropout
from mtuner_jax.ops.low_rank import api
from mtuner_jax.ops.low_rank.operands import Dropout, LayerAdapters, Linear, Lora
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


def group(*, with_bias):
    """Three linears on one input: of ranks 3 and 2, and one without an adapter."""
    arrays, lora = inputs()
    rng = np.random.default_rng(2)
    narrow = Lora(rng.normal(size=(D, 2)), rng.normal(size=(2, 5)), np.asarray(3.0))
    kernels = [arrays["kernel"], rng.normal(size=(D, 4)), rng.normal(size=(D, 5))]
    bias = arrays["bias"] if with_bias else None
    return arrays["x"], kernels, bias, {0: lora, 2: narrow}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", api.BACK_ENDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rate", [None, 0.0, 0.5])
def test_outputs_and_gradients_equal_the_formula(name, with_bias, rate):
    x, kernels, bias, loras = group(with_bias=with_bias)
    drop = None if rate is None else randomness(rate)
    keep = np.ones(x.shape)
    if rate:
        mask = dropout.keep_mask(drop.key, drop.places, num_features=D, rate=rate)
        keep = np.asarray(mask) / (1 - rate)

    def run(x, loras):
        linears = [
            Linear(kernel, None if i else bias, loras.get(i))
            for i, kernel in enumerate(kernels)
        ]
        return api.apply(x, linears, drop=drop, implementation=name)

    rng = np.random.default_rng(1)
    cotangents = [rng.normal(size=(*x.shape[:2], k.shape[1])) for k in kernels]
    with jax.numpy_dtype_promotion("strict"):
        outputs, pullback = jax.vjp(run, x, loras)
        dx, d_loras = pullback([jnp.asarray(one) for one in cotangents])
    kept = keep * x
    want = [x @ kernel for kernel in kernels]
    want[0] = want[0] + (0.0 if bias is None else bias)
    want_dx = sum(c @ k.T for c, k in zip(cotangents, kernels, strict=True))
    want_grads = {}
    for i, lora in loras.items():
        scale, cotangent = float(lora.scaling), cotangents[i]
        want[i] = want[i] + scale * kept @ lora.a_DR @ lora.b_RF
        want_dx = want_dx + keep * (scale * cotangent @ lora.b_RF.T @ lora.a_DR.T)
        rows, d_rows = kept.reshape(-1, D), cotangent.reshape(-1, cotangent.shape[-1])
        want_grads[i] = (
            scale * rows.T @ d_rows @ lora.b_RF.T,
            scale * (rows @ lora.a_DR).T @ d_rows,
        )
    got_grads = {i: (grads.a_DR, grads.b_RF) for i, grads in d_loras.items()}
    comparing.assert_trees_close(
        jax.device_get((outputs, dx, got_grads)), (want, want_dx, want_grads)
    )


@pytest.mark.usefixtures("x64")
def test_linears_together_equal_each_alone():
    x, kernels, _, loras = group(with_bias=False)
    linears = [Linear(k, None, loras.get(i)) for i, k in enumerate(kernels)]
    drop = randomness(0.5)
    together = api.apply(x, linears, drop=drop)
    alone = [api.apply(x, [one], drop=drop)[0] for one in linears]
    comparing.assert_trees_close(jax.device_get(together), jax.device_get(alone))


@pytest.mark.usefixtures("x64")
def test_merged_kernel_gives_the_adapters_output():
    arrays, lora = inputs()
    (want,) = api.apply(arrays["x"], [Linear(arrays["kernel"], lora=lora)])
    merged = api.merged(arrays["kernel"], lora)
    (got,) = api.apply(arrays["x"], [Linear(np.asarray(merged))])
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
                [Linear(arrays["kernel"], arrays["bias"], lora)],
                drop=randomness(0.5),
                implementation=name,
            )[0],
            arrays["x"],
            lora,
        )
        dx, d_lora = pullback(jnp.ones_like(output))
    assert output.dtype == dx.dtype == jnp.bfloat16
    assert d_lora.a_DR.dtype == d_lora.b_RF.dtype == jnp.float32


def test_each_input_has_a_mask_of_its_own():
    adapters = LayerAdapters({}, randomness(0.5))
    masks = [
        dropout.keep_mask(drop.key, drop.places, num_features=D, rate=drop.rate)
        for drop in map(adapters.drop_of, ("self_attn.input", "mlp.input"))
    ]
    assert np.any(masks[0] != masks[1])
    assert LayerAdapters({}).drop_of("self_attn.input") is None
