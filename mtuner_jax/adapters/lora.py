"""Low-rank adapters as in PEFT: where they sit, how they scale, how they start.

Shapes use L layers, D input features, F output features, R the largest rank of a
module over its layers. Layers are stacked; a layer with a smaller rank (or none)
has zero columns in A and zero rows in B. Those stay exactly zero: the gradient of
each is a product with the other.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.ops import dropout

Params = dict[str, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSite:
    """A linear of every layer that an adapter may sit on.

    Attributes:
      module: Its name within a layer, such as `self_attn.q_proj`.
      in_dim: Input features (D).
      out_dim: Output features (F).
      reads: Name of its input within a layer; linears of one input share its name,
        and what is dropped of it; empty for one of its own.
    """

    module: str
    in_dim: int
    out_dim: int
    reads: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """The adapters of one linear in all layers.

    Attributes:
      module: The linear's name within a layer.
      in_dim: Input features (D).
      out_dim: Output features (F).
      ranks: Rank in each layer; 0 where the layer has no adapter.
      alphas: lora_alpha in each layer.
      use_rslora: Scale by alpha / sqrt(r).
    """

    module: str
    in_dim: int
    out_dim: int
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    use_rslora: bool

    @property
    def max_rank(self) -> int:
        """Columns of the stacked A."""
        return max(self.ranks)

    @property
    def scalings(self) -> tuple[float, ...]:
        """What each layer's update is multiplied by; 0 where it has no adapter."""
        return tuple(
            scaling(rank, alpha, use_rslora=self.use_rslora) if rank else 0.0
            for rank, alpha in zip(self.ranks, self.alphas, strict=True)
        )

    @property
    def num_parameters(self) -> int:
        """Trained weights, padding not counted."""
        return sum(self.ranks) * (self.in_dim + self.out_dim)


def scaling(rank: int, alpha: float, *, use_rslora: bool) -> float:
    """The one factor of an update: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def module_path(module: str, layer: int) -> str:
    """The Hugging Face path that patterns are matched against."""
    return f"model.layers.{layer}.{module}"


def resolve(
    config: LoraConfig, linears: Sequence[LinearSite], *, num_layers: int
) -> tuple[AdapterSpec, ...]:
    """Decides which linear of which layer gets an adapter of which rank.

    Matching is PEFT's: an entry of a list names a module by its path or the end of
    it, a string is a regular expression on the whole path, `all-linear` is every
    linear of the layers (never the head).

    Raises:
      ConfigError: An entry that matches nothing; it names the nearest module.
    """
    paths = [
        module_path(linear.module, layer)
        for linear in linears
        for layer in range(num_layers)
    ]
    _check_every_entry_matches(config, paths)
    specs = []
    for linear in linears:
        ranks, alphas = [], []
        for layer in range(num_layers):
            path = module_path(linear.module, layer)
            targeted = _targets(config.target_modules, path)
            ranks.append(_pattern(config.rank_pattern, path, config.r) * targeted)
            alphas.append(
                float(_pattern(config.alpha_pattern, path, config.lora_alpha))
            )
        if any(ranks):
            specs.append(
                AdapterSpec(
                    module=linear.module,
                    in_dim=linear.in_dim,
                    out_dim=linear.out_dim,
                    ranks=tuple(ranks),
                    alphas=tuple(alphas),
                    use_rslora=config.use_rslora,
                )
            )
    return tuple(specs)


def init_key(seed: int) -> jax.Array:
    """What the fresh adapters of a run are drawn from."""
    return jax.random.fold_in(jax.random.key(seed), dropout.stable_hash("init"))


def init(specs: Sequence[AdapterSpec], key: jax.Array) -> Params:
    """Fresh adapters: A Kaiming-uniform as in PEFT, B zero, float32.

    Returns:
      {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}.
    """
    params = {}
    for spec in specs:
        bound = 1.0 / math.sqrt(spec.in_dim)  # kaiming_uniform(a=sqrt(5))
        num_layers, rank = len(spec.ranks), spec.max_rank
        module_key = jax.random.fold_in(key, dropout.stable_hash(spec.module))
        a_LDR = jax.vmap(
            lambda layer_key, shape=(spec.in_dim, rank), bound=bound: (
                jax.random.uniform(layer_key, shape, jnp.float32, -bound, bound)
            )
        )(jax.random.split(module_key, num_layers))
        has_column_LR = jnp.arange(rank)[None, :] < jnp.asarray(spec.ranks)[:, None]
        params[spec.module] = {
            "lora_a": a_LDR * has_column_LR[:, None, :],
            "lora_b": jnp.zeros((num_layers, rank, spec.out_dim), jnp.float32),
        }
    return params


def scaling_arrays(specs: Sequence[AdapterSpec]) -> dict[str, jax.Array]:
    """Scalings by module, each [L] float32, to be scanned beside the adapters."""
    return {spec.module: jnp.asarray(spec.scalings, jnp.float32) for spec in specs}


def num_parameters(specs: Sequence[AdapterSpec]) -> int:
    """Trained weights of all adapters."""
    return sum(spec.num_parameters for spec in specs)


def describe(specs: Sequence[AdapterSpec], *, num_frozen: int) -> str:
    """One line for the log: adapters by module and the trainable share."""
    trained = num_parameters(specs)
    parts = [
        f"{sum(rank > 0 for rank in spec.ranks)} x {spec.module.rpartition('.')[2]}"
        for spec in specs
    ]
    share = 100.0 * trained / (trained + num_frozen)
    return (
        f"LoRA on {', '.join(parts)}: {trained:,} trainable of "
        f"{trained + num_frozen:,} parameters ({share:.2f} %)"
    )


def _targets(target_modules: str | Sequence[str], path: str) -> bool:
    if target_modules == "all-linear":
        return True
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, path) is not None
    return any(path == entry or path.endswith(f".{entry}") for entry in target_modules)


def _pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def _check_every_entry_matches(config: LoraConfig, paths: Sequence[str]) -> None:
    targets = config.target_modules
    named = (
        {targets: targets} if isinstance(targets, str) else {t: (t,) for t in targets}
    )
    checks = {
        ("target_modules", entry): any(_targets(one, p) for p in paths)
        for entry, one in named.items()
    }
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, field):
            marked = {pattern: True}
            checks[field, pattern] = any(_pattern(marked, p, False) for p in paths)
    leaves = sorted({path.rpartition(".")[2] for path in paths})
    for (field, entry), matched in checks.items():
        if not matched:
            near = difflib.get_close_matches(entry, leaves, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"lora.{field}: {entry!r} matches no linear of the layers{hint}; "
                f"available: {', '.join(leaves)}"
            )
