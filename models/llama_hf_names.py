"""Which Hugging Face tensor lands where in our parameter tree.

D model, F feed-forward, N query heads, K kv heads, H head dim, V vocabulary, L layers.
"""

import dataclasses

from models import llama_configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face checkpoint and its place in our tree.

    Attributes:
      name: Its name in the checkpoint.
      path: Keys down our parameter tree.
      layer: Index into the leading L dim of our array, None where there is no such dim.
      shape: As Hugging Face stores it: linear weights are [out, in].
      transposed: Whether ours is the transpose, [in, out].
      padded: Whether ours may have more rows, which are zeros (vocabulary tables, so
        that the rows divide the mesh).
    """

    name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    transposed: bool = False
    padded: bool = False


def tensors(config: llama_configs.LlamaConfig) -> tuple[HfTensor, ...]:
    """Lists every tensor of the model, in the order of the forward pass."""
    d = config.hidden_size
    table = (config.vocab_size, d)
    outer = [
        HfTensor(
            name="model.embed_tokens.weight",
            path=("embed", "table"),
            layer=None,
            shape=table,
            padded=True,
        )
    ]
    for layer in range(config.num_layers):
        outer += _layer(config, layer)
    outer.append(
        HfTensor(
            name="model.norm.weight",
            path=("head", "norm", "scale"),
            layer=None,
            shape=(d,),
        )
    )
    if not config.tie_word_embeddings:
        outer.append(
            HfTensor(
                name="lm_head.weight",
                path=("head", "table"),
                layer=None,
                shape=table,
                padded=True,
            )
        )
    return tuple(outer)


def _linears(config: llama_configs.LlamaConfig) -> dict[str, tuple[int, int, bool]]:
    """Gives (in, out, has a bias) of each linear module of a layer."""
    d, f = config.hidden_size, config.intermediate_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (d, q, config.attention_bias),
        "self_attn.k_proj": (d, kv, config.attention_bias),
        "self_attn.v_proj": (d, kv, config.attention_bias),
        "self_attn.o_proj": (q, d, config.attention_out_bias),
        "mlp.gate_proj": (d, f, config.mlp_bias),
        "mlp.up_proj": (d, f, config.mlp_bias),
        "mlp.down_proj": (f, d, config.mlp_bias),
    }


def _layer(config: llama_configs.LlamaConfig, layer: int) -> list[HfTensor]:
    prefix = f"model.layers.{layer}"
    found = []
    for module, (in_dim, out_dim, bias) in _linears(config).items():
        found.append(
            HfTensor(
                name=f"{prefix}.{module}.weight",
                path=("layers", module, "kernel"),
                layer=layer,
                shape=(out_dim, in_dim),
                transposed=True,
            )
        )
        if bias:
            found.append(
                HfTensor(
                    name=f"{prefix}.{module}.bias",
                    path=("layers", module, "bias"),
                    layer=layer,
                    shape=(out_dim,),
                )
            )
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found.append(
            HfTensor(
                name=f"{prefix}.{norm}.weight",
                path=("layers", norm, "scale"),
                layer=layer,
                shape=(config.hidden_size,),
            )
        )
    return found
