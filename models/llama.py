"""One decoder for Llama 2 and 3, SmolLM2, Qwen2.5, Qwen3 and Mistral, in Flax NNX.

NNX modules describe a layer; `Llama` splits them once into a graph definition and
exposes pure functions over plain dicts, which is all that engines see.

Letters: B batch, T tokens, D model, N query heads, K kv heads, H head dim, F
feed-forward, V vocabulary, L layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from models import rotary
from models.llama_configs import LlamaConfig
from mtuner_jax.adapters import lora
from mtuner_jax.ops import dropout, tapes
from mtuner_jax.ops.attention import api as attention
from mtuner_jax.ops.attention import cached
from mtuner_jax.ops.attention.operands import Attended, Documents, Qkv
from mtuner_jax.ops.low_rank import api as low_rank
from mtuner_jax.ops.low_rank import operands as low_rank_operands
from mtuner_jax.ops.low_rank.operands import LayerAdapters

Params = dict[str, Any]


class Context(NamedTuple):
    """What all layers share for a batch.

    Attributes:
      cos_BTH: Rotary cosines, [B, T, H / 2], at least float32.
      sin_BTH: Rotary sines, [B, T, H / 2], at least float32.
      documents: Which tokens see each other.
      places: Where each token comes from, for dropout.
      cache: Keys and values of the tokens before, where answers are generated.
    """

    cos_BTH: jax.Array
    sin_BTH: jax.Array
    documents: Documents
    places: dropout.Places
    cache: cached.KeyValues | None = None


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, computed in at least float32."""

    def __init__(self, size: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return rms_norm(x_BTD, self.scale[...], eps=self.eps)


# Linears by the input that they read.
_READS = {
    "self_attn.q_proj": "self_attn.input",
    "self_attn.k_proj": "self_attn.input",
    "self_attn.v_proj": "self_attn.input",
    "self_attn.o_proj": "self_attn.output",
    "mlp.gate_proj": "mlp.input",
    "mlp.up_proj": "mlp.input",
    "mlp.down_proj": "mlp.hidden",
}


class Linear(nnx.Module):
    """A frozen linear that an adapter may sit on; `module` is its name."""

    def __init__(self, module: str, config: LlamaConfig):
        shape = config.linears[module]
        self.module = module
        self.kernel = nnx.Param(jnp.zeros((shape.in_dim, shape.out_dim)))
        self.bias = nnx.Param(jnp.zeros(shape.out_dim)) if shape.bias else None


def apply_linears(
    x_BTD: jax.Array, linears: Sequence[Linear], adapters: LayerAdapters
) -> list[jax.Array]:
    """Linears that read one input, [B, T, D] -> [B, T, F] of each."""
    return low_rank.apply(
        x_BTD,
        [
            low_rank_operands.Linear(
                linear.kernel[...],
                None if linear.bias is None else linear.bias[...],
                adapters.loras.get(linear.module),
            )
            for linear in linears
        ],
        drop=adapters.drop_of(_READS[linears[0].module]),
    )


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, spec: attention.Spec):
        self.q_proj = Linear("self_attn.q_proj", config)
        self.k_proj = Linear("self_attn.k_proj", config)
        self.v_proj = Linear("self_attn.v_proj", config)
        self.o_proj = Linear("self_attn.o_proj", config)
        eps, self.qk_norm = config.rms_norm_eps, config.qk_norm
        self.q_norm = RMSNorm(config.head_dim, eps=eps) if self.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=eps) if self.qk_norm else None
        self.head_dim, self.spec = config.head_dim, spec

    def __call__(
        self,
        x_BTD: jax.Array,
        adapters: LayerAdapters,
        context: Context,
        tape: tapes.Tape,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            projected.reshape(heads)
            for projected in apply_linears(x_BTD, projections, adapters)
        )
        if self.q_norm is not None and self.k_norm is not None:
            # The norms' gradients need what went in: that is kept, and no product is
            # done twice; norms and rotation are.
            q = rotate(self.q_norm(tape.keep("query", q)), context)
            k = rotate(self.k_norm(tape.keep("key", k)), context)
        else:
            q = tape.keep("query", rotate(q, context))
            k = tape.keep("key", rotate(k, context))
        qkv = Qkv(q, k, tape.keep("value", v))
        documents = context.documents
        if context.cache is not None:
            positions = context.places.positions
            out_BTNH, cache = cached.attend(
                qkv, context.cache, positions, window=self.spec.window
            )
            tape.recorded |= cache._asdict()
            return self._project(out_BTNH, adapters)
        out_BTNH = tape.keep_pair(
            "attention",
            lambda: attention.attend(qkv, documents, self.spec),
            lambda out, stats: attention.attend_saved(
                qkv, documents, Attended(out, stats), self.spec
            ),
        )
        return self._project(out_BTNH, adapters)

    def _project(self, out_BTNH: jax.Array, adapters: LayerAdapters) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        out_BTD = out_BTNH.reshape(*out_BTNH.shape[:2], -1)
        return apply_linears(out_BTD, (self.o_proj,), adapters)[0]


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig):
        self.gate_proj = Linear("mlp.gate_proj", config)
        self.up_proj = Linear("mlp.up_proj", config)
        self.down_proj = Linear("mlp.down_proj", config)

    def __call__(
        self,
        x_BTD: jax.Array,
        adapters: LayerAdapters,
        tape: tapes.Tape,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        both = (self.gate_proj, self.up_proj)
        gate, up = apply_linears(x_BTD, both, adapters)
        gate, up = tape.keep("gate", gate), tape.keep("up", up)
        hidden = tape.keep("hidden", jax.nn.silu(gate) * up)
        return apply_linears(hidden, (self.down_proj,), adapters)[0]


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, spec: attention.Spec):
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.self_attn = Attention(config, spec)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps)
        self.mlp = MLP(config)

    def __call__(
        self,
        x_BTD: jax.Array,
        adapters: LayerAdapters,
        context: Context,
        tape: tapes.Tape,
    ) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        normed = tape.keep("attention_input", self.input_layernorm(x_BTD))
        x_BTD = x_BTD + self.self_attn(normed, adapters, context, tape)
        x_BTD = tape.keep("residual", x_BTD)
        normed = tape.keep("mlp_input", self.post_attention_layernorm(x_BTD))
        return x_BTD + self.mlp(normed, adapters, tape)


class Llama:
    """The decoder as pure functions (`protocols.decoders.Decoder`)."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        attention_implementation: str = "xla",
        most_documents: int = 0,
    ):
        self.config = config
        self._attention = attention.Spec(
            implementation=attention_implementation,
            window=config.sliding_window,
            most_documents=most_documents,
        )
        layer = nnx.eval_shape(lambda: DecoderLayer(config, self._attention))
        self._graph, state = nnx.split(layer)
        self._layer_shapes = _flatten(nnx.to_pure_dict(state))

    @property
    def num_layers(self) -> int:
        """Layers in the stack."""
        return self.config.num_layers

    @property
    def vocab_size(self) -> int:
        """Tokens known to the model."""
        return self.config.vocab_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, tied embeddings counted once."""
        return self.config.num_parameters

    def shapes(self) -> Params:
        """The parameter tree as tuples of sizes, layers stacked."""
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        head: Params = {"norm": {"scale": (config.hidden_size,)}}
        if not config.tie_word_embeddings:
            head["table"] = table
        layers = {
            name: {
                leaf: (config.num_layers, *value.shape)
                for leaf, value in leaves.items()
            }
            for name, leaves in self._layer_shapes.items()
        }
        return {"embed": {"table": table}, "layers": layers, "head": head}

    def linears(self) -> tuple[lora.LinearSite, ...]:
        """The linears of a layer, in the order they run."""
        return tuple(
            lora.LinearSite(
                module=name,
                in_dim=shape.in_dim,
                out_dim=shape.out_dim,
                reads=_READS[name],
            )
            for name, shape in self.config.linears.items()
        )

    def context(self, batch: Any, *, cache: cached.KeyValues | None = None) -> Context:
        """Rotary angles, segments and places of a batch."""
        config = self.config
        angles = rotary.angles(
            batch,
            head_dim=config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
        )
        return Context(
            cos_BTH=angles.cos_BTH,
            sin_BTH=angles.sin_BTH,
            documents=attention.locate(batch.segment_ids, self._attention),
            places=dropout.Places(batch.sample_ids, batch.positions),
            cache=cache,
        )

    def cache_shape(self) -> tuple[int, int]:
        """Key and value heads (K) and their features (H)."""
        return self.config.num_kv_heads, self.config.head_dim

    def embed(self, table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, D]."""
        return jnp.take(table_VD, ids_BT, axis=0)

    def layer(
        self,
        weights: Params,
        adapters: LayerAdapters,
        x_BTD: jax.Array,
        *,
        context: Context,
        tape: tapes.Tape,
    ) -> jax.Array:
        """One decoder layer, [B, T, D] -> [B, T, D]."""
        module = nnx.merge(self._graph, nnx.State(_nest(weights)))
        return module(x_BTD, adapters, context, tape)

    def final_norm(self, norm: Params, x_BTD: jax.Array) -> jax.Array:
        """The norm before the head, [B, T, D] -> [B, T, D]."""
        return rms_norm(x_BTD, norm["scale"], eps=self.config.rms_norm_eps)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, *, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale, [..., D]; computed in at least float32."""
    wide = x_BTD.astype(np.promote_types(x_BTD.dtype, jnp.float32))
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean + eps)).astype(x_BTD.dtype)
    return normed * jnp.expand_dims(scale_D, range(x_BTD.ndim - 1))


def rotate(x_BTNH: jax.Array, context: Context) -> jax.Array:
    """Rotary positions in Hugging Face's half-rotation layout, [B, T, N, H]."""
    wide = np.promote_types(x_BTNH.dtype, jnp.float32)
    cos = context.cos_BTH[:, :, None, :].astype(wide)
    sin = context.sin_BTH[:, :, None, :].astype(wide)
    first, second = jnp.split(x_BTNH.astype(wide), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def _flatten(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"self_attn": {"q_proj": {"kernel": x}}} -> {"self_attn.q_proj": ...}."""
    flat: dict[str, dict[str, Any]] = {}
    for (*parents, leaf), value in traverse_util.flatten_dict(state).items():
        flat.setdefault(".".join(parents), {})[leaf] = value
    return flat


def _nest(flat: Mapping[str, Mapping[str, Any]]) -> Params:
    """The inverse of `_flatten`."""
    return traverse_util.unflatten_dict(
        {
            (*name.split("."), leaf): value
            for name, leaves in flat.items()
            for leaf, value in leaves.items()
        }
    )
