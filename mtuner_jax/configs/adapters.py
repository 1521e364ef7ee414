"""Which adapters are trained."""

import dataclasses

from mtuner_jax.configs import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, named and defined as in PEFT.

    Attributes:
      r: Rank of the update; adapters are A [in, r] and B [r, out].
      lora_alpha: Numerator of the scaling, alpha / r (or alpha / sqrt(r)).
      lora_dropout: Probability of zeroing an element of an adapter's input.
      target_modules: Module names (leaf, such as q_proj, or dotted suffix), one
        regular expression that must match a whole module path, or `all-linear`.
      use_rslora: Scale by alpha / sqrt(r) instead of alpha / r.
      rank_pattern: Regular expression on module paths -> its own rank.
      alpha_pattern: Regular expression on module paths -> its own alpha.
    """

    r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        errors.require(self.r >= 1, f"lora.r={self.r} must be at least 1")
        errors.require(
            0.0 <= self.lora_dropout < 1.0,
            f"lora.lora_dropout={self.lora_dropout} must be in [0, 1)",
        )
        for pattern, rank in self.rank_pattern.items():
            errors.require(
                rank >= 1, f"lora.rank_pattern[{pattern!r}]={rank}: at least 1"
            )
        errors.require(self.target_modules, "lora.target_modules is empty")
