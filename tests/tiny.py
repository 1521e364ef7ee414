"""Small decoders, batches and adapters for tests, and the plain unsharded step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models import llama, llama_configs
from mtuner_jax.adapters import lora
from mtuner_jax.configs import LoraConfig
from mtuner_jax.ops import dropout, tapes
from mtuner_jax.ops.cross_entropy import reference
from mtuner_jax.ops.low_rank.operands import Dropout, LayerAdapters, Lora
from mtuner_jax.protocols.states import Batch, TrainState

CONFIG = llama_configs.LlamaConfig(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
VARIANTS = {
    "gqa": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True),
    "bias_and_padded_vocabulary": dataclasses.replace(
        CONFIG, family="qwen2", attention_bias=True, vocab_size=117
    ),
}
# The random plans choose among the variants; these are for chosen cases.
MODELS = {**VARIANTS, "qk_norm": dataclasses.replace(CONFIG, family="qwen3")}


def parameters(model, *, dtype, seed=0):
    """Random numpy weights in the model's own tree; biases and norms too."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: (0.3 * rng.normal(size=shape)).astype(dtype),
        model.shapes(),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def batch(rng, *, rows, tokens, vocab_size):
    """Packed rows of two or three documents with padding and untrained tokens."""
    fields = {name: np.zeros((rows, tokens), np.int32) for name in Batch._fields}
    fields["weights"] = np.zeros((rows, tokens), np.float32)
    sample = 0
    for row in range(rows):
        borders = np.sort(rng.choice(np.arange(1, tokens), 3, replace=False))
        for document, (start, end) in enumerate(
            zip((0, *borders[:-1]), borders, strict=True)
        ):
            place = (row, slice(start, end))
            length = end - start
            ids = rng.integers(0, vocab_size, length + 1)
            fields["input_ids"][place] = ids[:-1]
            fields["targets"][place] = ids[1:]
            fields["weights"][place] = rng.integers(0, 2, length)
            fields["segment_ids"][place] = document + 1
            fields["positions"][place] = np.arange(length)
            fields["sample_ids"][place] = sample
            sample += 1
    return Batch(**fields)


def adapters(model, **settings):
    """Specs of a LoraConfig on all linears."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 8.0, **settings})
    return lora.resolve(config, model.linears(), num_layers=model.num_layers)


def filled(specs, *, dtype, seed=1):
    """Numpy adapters whose B is not zero, so that every gradient is alive."""
    rng = np.random.default_rng(seed)
    values = {}
    for spec in specs:
        alive = np.arange(spec.max_rank)[None, :] < np.asarray(spec.ranks)[:, None]
        layers = len(spec.ranks)
        a = 0.2 * rng.normal(size=(layers, spec.in_dim, spec.max_rank))
        b = 0.1 * rng.normal(size=(layers, spec.max_rank, spec.out_dim))
        values[spec.module] = {
            "lora_a": (a * alive[:, None, :]).astype(dtype),
            "lora_b": (b * alive[:, :, None]).astype(dtype),
        }
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainStep:
    """Loss, gradient and update of one program on one device: the reference."""

    model: llama.Llama
    specs: tuple
    optimizer: optax.GradientTransformation
    dropout_rate: float = 0.0
    seed: int = 0

    def loss(self, params, weights, rows, step):
        """Mean loss of a trained token, by plain autodiff-able code."""
        model, context = self.model, self.model.context(rows)
        drop = None
        if self.dropout_rate:
            key = dropout.fold_in(dropout.key(self.seed), step)
            places = dropout.Places(rows.sample_ids, rows.positions)
            drop = Dropout(key, places, self.dropout_rate)
        scalings = lora.scaling_arrays(self.specs)
        x_BTD = model.embed(weights["embed"]["table"], rows.input_ids)
        for layer in range(model.num_layers):
            loras = {
                module: Lora(
                    leaf["lora_a"][layer],
                    leaf["lora_b"][layer],
                    scalings[module][layer],
                )
                for module, leaf in params.items()
            }
            layer_drop = drop and drop._replace(key=dropout.fold_in(drop.key, layer))
            x_BTD = model.layer(
                jax.tree.map(lambda a, i=layer: a[i], weights["layers"]),
                LayerAdapters(loras, layer_drop),
                x_BTD,
                context=context,
                tape=tapes.Tape(),
            )
        x_BTD = model.final_norm(weights["head"]["norm"], x_BTD)
        table = weights["head"].get("table", weights["embed"]["table"])
        total = reference.cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            table,
            rows.targets.reshape(-1),
            rows.weights.reshape(-1),
        )
        return total / jnp.maximum(jnp.sum(rows.weights), 1.0).astype(total.dtype)

    @functools.cached_property
    def run(self):
        """(state, weights, rows) -> (new state, loss, gradient norm), jitted."""

        def step(state, weights, rows):
            loss, grads = jax.value_and_grad(self.loss)(
                state.adapters, weights, rows, state.step
            )
            updates, opt_state = self.optimizer.update(
                grads, state.opt_state, state.adapters
            )
            params = optax.apply_updates(state.adapters, updates)
            new_state = TrainState(params, opt_state, state.step + 1)
            return new_state, loss, optax.tree.norm(grads)

        return jax.jit(step)
