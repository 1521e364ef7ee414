import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.ops.low_rank import api as low_rank
from mtuner_jax.ops.low_rank.operands import Linear, Lora
from tests import tiny

NUM_LAYERS = 12  # so that layer 1 is a prefix of layers 10 and 11
LEAVES = {
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (8, 4),
    "self_attn.v_proj": (8, 4),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (8, 12),
    "mlp.up_proj": (8, 12),
    "mlp.down_proj": (12, 8),
}
LINEARS = [
    lora.LinearSite(module=module, in_dim=sizes[0], out_dim=sizes[1])
    for module, sizes in LEAVES.items()
]
CASES = {
    "all linears": {},
    "leaf names": {"target_modules": ("q_proj", "down_proj")},
    "dotted suffix": {"target_modules": ("self_attn.v_proj", "1.mlp.up_proj")},
    "one path": {"target_modules": ("model.layers.3.mlp.up_proj",)},
    "regex": {"target_modules": r".*layers\.(0|1\d)\.self_attn\.(q|v)_proj"},
    "regex must match the whole path": {"target_modules": r".*\.(q_proj|up_pro.)"},
    "rank by leaf": {"rank_pattern": {"q_proj": 2, "up_proj": 16}},
    "rank by layer": {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2}},
    "first pattern wins": {"rank_pattern": {r".*\.1\..*": 3, "q_proj": 5}},
    "dot matches any character": {"rank_pattern": {"layers.1.mlp.up_proj": 3}},
    "alternatives": {"rank_pattern": {"q_proj|k_proj": 3}, "use_rslora": True},
    "end of the path": {"rank_pattern": {r"layers\.1\.self_attn|up_proj": 3}},
    "anchored": {"rank_pattern": {r"^model\.layers\.0\.mlp\.up_proj": 3}},
    "alpha": {"alpha_pattern": {r"layers\.\d\.mlp\..*": 3.0}, "lora_alpha": 12.0},
    "both": {
        "rank_pattern": {"o_proj": 2},
        "alpha_pattern": {"o_proj": 5.0},
        "use_rslora": True,
        "target_modules": ("o_proj", "k_proj"),
    },
}


def resolve(**settings):
    config = LoraConfig(**{"r": 4, "lora_alpha": 8.0, **settings})
    return lora.resolve(config, LINEARS, num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def base():
    """A transformers model of shapes only."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )

    def make():
        with torch.device("meta"):
            return transformers.LlamaForCausalLM(config)

    return make


def of_peft(model, settings):
    """{path: (rank, alpha, scaling)} of the adapters that PEFT makes."""
    peft = pytest.importorskip("peft")
    targets = settings.get("target_modules", "all-linear")
    targets = targets if isinstance(targets, str) else list(targets)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8.0, **settings, "target_modules": targets}
    )
    wrapped = peft.get_peft_model(model, config)
    return {
        name.removeprefix("base_model.model."): (
            module.r["default"],
            module.lora_alpha["default"],
            pytest.approx(module.scaling["default"], rel=1e-12),
        )
        for name, module in wrapped.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def of_ours(specs):
    return {
        lora.module_path(spec.module, layer): (
            rank,
            spec.alphas[layer],
            spec.scalings[layer],
        )
        for spec in specs
        for layer, rank in enumerate(spec.ranks)
        if rank
    }


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern")
@pytest.mark.filterwarnings(  # peft 0.21 asks transformers 5 for a deprecated name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("name", CASES)
def test_adapters_ranks_and_scalings_are_those_of_peft(base, name):
    want = of_peft(base(), CASES[name])
    assert want
    assert of_ours(resolve(**CASES[name])) == want


def test_scaling_is_alpha_over_r_or_over_its_root():
    assert lora.scaling(16, 32.0, use_rslora=False) == 2.0
    assert lora.scaling(16, 32.0, use_rslora=True) == 8.0


def test_scaling_arrays_are_zero_where_a_layer_has_no_adapter():
    specs = resolve(target_modules=("3.mlp.up_proj",))
    arrays = lora.scaling_arrays(specs)
    assert arrays.keys() == {"mlp.up_proj"}
    want = np.zeros(NUM_LAYERS, np.float32)
    want[3] = 2.0
    np.testing.assert_array_equal(arrays["mlp.up_proj"], want)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"target_modules": ("q_proj", "v_porj")}, "'v_porj' .* mean 'v_proj'?; avail"),
        ({"target_modules": ("lm_head",)}, "'lm_head' matches no linear of the layers"),
        ({"target_modules": ("proj",)}, "'proj' matches no linear"),
        ({"target_modules": r"model\.layers\.1\.q_proj"}, "matches no linear"),
        ({"target_modules": ("1.q_proj",)}, "available: down_proj, gate_proj, k_proj"),
        ({"rank_pattern": {"gate": 4}}, "rank_pattern: 'gate' .* mean 'gate_proj'"),
        ({"alpha_pattern": {"layers.12.*": 4}}, "alpha_pattern: 'layers.12.*' matches"),
    ],
)
def test_an_entry_that_matches_nothing_is_an_error(settings, text):
    with pytest.raises(ConfigError, match=text.replace("'?;", r"'\?;")):
        resolve(**settings)


def test_fresh_adapters_are_kaiming_uniform_and_zero_in_float32():
    wide = lora.LinearSite(module="mlp.down_proj", in_dim=400, out_dim=6)
    config = LoraConfig(r=32, rank_pattern={"layers.1.mlp.down_proj": 8})
    specs = lora.resolve(config, [wide], num_layers=2)
    params = jax.jit(lora.init, static_argnums=0)(specs, jax.random.key(0))
    a, b = (np.asarray(params["mlp.down_proj"][k]) for k in ("lora_a", "lora_b"))
    assert (a.shape, b.shape) == ((2, 400, 32), (2, 32, 6))
    assert a.dtype == b.dtype == np.float32
    assert not np.any(b)
    assert not np.any(a[1, :, 8:])
    bound = 1 / np.sqrt(400)  # kaiming_uniform(a=sqrt(5)): sqrt(6 / (1 + 5) / fan_in)
    for alive in (a[0], a[1, :, :8]):
        assert 0.98 * bound < abs(alive).max() <= bound
        assert abs(alive.std() - bound / np.sqrt(3)) < 0.03 * bound
        assert abs(alive.mean()) < 0.05 * bound
    assert np.any(a[0, :, :8] != a[1, :, :8])


def test_bound_of_a_is_that_of_peft(base):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    linear = torch.nn.Sequential(torch.nn.Linear(400, 6, bias=False))
    config = peft.LoraConfig(r=32, target_modules=["0"])
    torch.manual_seed(0)
    theirs = peft.get_peft_model(linear, config).base_model.model[0]
    top = theirs.lora_A["default"].weight.abs().max().item()
    assert 0.98 / np.sqrt(400) < top <= 1 / np.sqrt(400)
    assert not theirs.lora_B["default"].weight.any()


def test_modules_start_differently_and_seeds_matter():
    specs = resolve(target_modules=("q_proj", "o_proj"))
    init = jax.jit(lora.init, static_argnums=0)
    first, second = (init(specs, jax.random.key(seed)) for seed in (0, 1))
    q, o = (np.asarray(first[f"self_attn.{n}_proj"]["lora_a"]) for n in "qo")
    assert np.any(q != o)
    assert np.any(q != np.asarray(second["self_attn.q_proj"]["lora_a"]))


def test_padding_stays_exactly_zero_through_optimizer_steps():
    specs = resolve(
        rank_pattern={r"layers\.0\..*proj": 1, r"layers\.1\..*_proj": 3},
        target_modules=r".*(q_proj|layers\.[03]\.mlp\.up_proj)",
    )
    scalings = lora.scaling_arrays(specs)
    x_BTD = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)

    def loss(params):
        total = 0.0
        for spec in specs:
            a, b = params[spec.module]["lora_a"], params[spec.module]["lora_b"]
            kernel = jnp.ones((spec.in_dim, spec.out_dim))
            y_LBTF = jax.vmap(
                lambda *leaves, kernel=kernel: low_rank.apply(
                    x_BTD, [Linear(kernel, lora=Lora(*leaves))]
                )[0]
            )(a, b, scalings[spec.module])
            total += jnp.sum(jnp.sin(y_LBTF))
        return total

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-1))

    @jax.jit
    def steps(params):
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, updates)
        return params

    before = tiny.filled(specs, dtype=np.float32)
    after = jax.device_get(steps(before))
    for spec in specs:
        for name, across in (("lora_a", 1), ("lora_b", 0)):
            for layer, rank in enumerate(spec.ranks):
                new, old = (tree[spec.module][name][layer] for tree in (after, before))
                alive, padding = np.split(new, [rank], axis=across)
                assert not np.any(padding)
                assert np.all(alive != np.split(old, [rank], axis=across)[0])
    assert {0, 1, 3, 4} == {rank for spec in specs for rank in spec.ranks}


def test_description_counts_adapters_and_the_trainable_share():
    specs = resolve(target_modules=("q_proj", "3.mlp.up_proj"))
    num_trained = 12 * 4 * (8 + 8) + 4 * (8 + 12)
    assert lora.num_parameters(specs) == num_trained
    text = lora.describe(specs, num_frozen=9 * num_trained)
    want = (
        f"12 x q_proj, 1 x up_proj: {num_trained:,} trainable of {10 * num_trained:,}"
    )
    assert re.search(re.escape(want) + r" parameters \(10\.00 %\)", text)
