"""Which Hugging Face tensor lands where in our parameter tree."""

import dataclasses

from models.llama_configs import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfTensor:
    """One tensor of a Hugging Face checkpoint and its place in our tree.

    Attributes:
      name: Its name in the checkpoint.
      path: Keys down our parameter tree.
      layer: Index into the leading L dim of our array, None where there is no such dim.
      shape: The shape that Hugging Face stores; linear weights are [out, in].
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


def tensors(config: LlamaConfig) -> tuple[HfTensor, ...]:
    """Lists every tensor of the model, in the order of the forward pass."""
    table = (config.vocab_size, config.hidden_size)
    found = [_outer("model.embed_tokens", ("embed", "table"), table)]
    for layer in range(config.num_layers):
        found += _layer(config, layer)
    found.append(_outer("model.norm", ("head", "norm", "scale"), table[1:]))
    if not config.tie_word_embeddings:
        found.append(_outer("lm_head", ("head", "table"), table))
    return tuple(found)


def _outer(stem: str, path: tuple[str, ...], shape: tuple[int, ...]) -> HfTensor:
    return HfTensor(
        name=f"{stem}.weight",
        path=path,
        layer=None,
        shape=shape,
        padded=path[-1] == "table",
    )


def _layer(config: LlamaConfig, layer: int) -> list[HfTensor]:
    def tensor(module: str, leaf: str, shape: tuple[int, ...]) -> HfTensor:
        kind = "bias" if leaf == "bias" else "weight"
        return HfTensor(
            name=f"model.layers.{layer}.{module}.{kind}",
            path=("layers", module, leaf),
            layer=layer,
            shape=shape,
            transposed=leaf == "kernel",
        )

    found = []
    for module, linear in config.linears.items():
        found.append(tensor(module, "kernel", (linear.out_dim, linear.in_dim)))
        if linear.bias:
            found.append(tensor(module, "bias", (linear.out_dim,)))
    for norm, size in config.norms.items():
        found.append(tensor(norm, "scale", (size,)))
    return found
