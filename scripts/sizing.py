"""What the planner needs to know of a model: sizes of its layers and adapters."""

from collections.abc import Sequence

import jax.numpy as jnp

from models import llama_configs
from mtuner_jax.adapters import lora
from mtuner_jax.planning import workloads


def workload(
    config: llama_configs.LlamaConfig,
    adapters: Sequence[lora.AdapterSpec],
    *,
    name: str,
    rows: tuple[int, int],
    dtype: str,
    attention: str,
) -> workloads.Workload:
    """Sizes of a model with adapters, and of a step's rows.

    Args:
      config: The decoder's shape.
      adapters: Which linears have adapters of which rank.
      name: The model's name.
      rows: (rows in an optimizer step, tokens in a row).
      dtype: Of weights and activations.
      attention: Implementation that computes it, `cudnn` or `xla`.

    Returns:
      The workload, without dropout.
    """
    ranks = {spec.module.rpartition(".")[2]: spec.max_rank for spec in adapters}
    width = config.hidden_size
    query, key = (
        heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
    )
    dims = {
        "q_proj": (width, query),
        "k_proj": (width, key),
        "v_proj": (width, key),
        "o_proj": (query, width),
        "gate_proj": (width, config.intermediate_size),
        "up_proj": (width, config.intermediate_size),
        "down_proj": (config.intermediate_size, width),
    }
    biases = query + 2 * key if config.attention_bias else 0
    return workloads.Workload(
        model=name,
        num_layers=config.num_layers,
        hidden_size=width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
        linears=tuple(
            workloads.Linear(
                name=linear, in_dim=dim_in, out_dim=dim_out, rank=ranks.get(linear, 0)
            )
            for linear, (dim_in, dim_out) in dims.items()
        ),
        replicated_layer_weights=2 * width + biases,
        max_length=rows[1],
        global_batch_size=rows[0],
        weight_dtype=jnp.dtype(dtype).name,
        activation_dtype=jnp.dtype(dtype).name,
        attention=attention,
    )
