"""`adapter_config.json` and model card of PEFT, to and from our LoraConfig."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtuner_jax.adapters import lora
from mtuner_jax.configs import LoraConfig, UserError

# What must have this value (or be absent) for an adapter to mean what ours mean.
_REQUIRED = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "exclude_modules": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}
# Starts that subtract the adapter from the base: it does not fit the plain base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class PeftConfigError(UserError):
    """An `adapter_config.json` that asks for what is not implemented."""


def to_peft(
    config: LoraConfig, specs: Sequence[lora.AdapterSpec], *, base_name: str
) -> dict[str, Any]:
    """Writes what the user asked for in PEFT's terms.

    Alphas and `use_rslora` stay as given (the scaling is never folded into alpha);
    `all-linear` and regular expressions become the list of modules that are trained.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": _plain(config.lora_alpha),
        "lora_dropout": config.lora_dropout,
        "target_modules": _target_modules(config, specs),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "use_rslora": config.use_rslora,
        "use_dora": False,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": {k: _plain(v) for k, v in config.alpha_pattern.items()},
    }


def from_peft(content: Mapping[str, Any]) -> LoraConfig:
    """Reads PEFT's config.

    Raises:
      PeftConfigError: Another method than LoRA, or a part of LoRA that is not
        implemented here and would change the result.
    """
    for name, value in _REQUIRED.items():
        if (found := content.get(name, value) or value) != value:
            raise PeftConfigError(
                f"adapter_config.json: {name}={found!r} is not implemented "
                f"(only {value!r})"
            )
    start = str(content.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGES_BASE):
        raise PeftConfigError(
            f"adapter_config.json: init_lora_weights={start!r} changes the base model; "
            f"convert it to plain LoRA with PEFT first"
        )
    targets = content.get("target_modules")
    if not targets or "r" not in content:
        raise PeftConfigError("adapter_config.json lacks r or target_modules")
    numbers = {"r": int, "lora_alpha": int | float, "lora_dropout": int | float}
    for name, kind in numbers.items():
        if not isinstance(content.get(name, 0), kind):
            raise PeftConfigError(
                f"adapter_config.json: {name}={content[name]!r} is no number"
            )
    return LoraConfig(
        r=content["r"],
        lora_alpha=float(content.get("lora_alpha", 8)),
        lora_dropout=content.get("lora_dropout", 0.0),
        target_modules=targets if isinstance(targets, str) else tuple(targets),
        use_rslora=bool(content.get("use_rslora", False)),
        rank_pattern=dict(content.get("rank_pattern") or {}),
        alpha_pattern={
            pattern: float(alpha)
            for pattern, alpha in (content.get("alpha_pattern") or {}).items()
        },
    )


def model_card(config: Mapping[str, Any], specs: Sequence[lora.AdapterSpec]) -> str:
    """Writes the README.md that goes with an adapter."""
    base = config["base_model_name_or_path"]
    scale = "alpha / sqrt(r)" if config["use_rslora"] else "alpha / r"
    return f"""---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags:
- lora
---

# LoRA adapter for {base}

Trained with mtuner-jax: r = {config["r"]}, lora_alpha = {config["lora_alpha"]},
scaling {scale}, {lora.num_parameters(specs):,} parameters on
{", ".join(spec.module for spec in specs)}.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "path/to/this/folder")
```
"""


def _target_modules(config: LoraConfig, specs: Sequence[lora.AdapterSpec]) -> list[str]:
    """Names that PEFT finds the trained modules by, and no others.

    A regular expression is not handed on: PEFT would match it against the names of all
    modules, of which ours are the linears of the layers.
    """
    if not isinstance(config.target_modules, str):
        return list(config.target_modules)
    names = []
    for spec in specs:
        if all(spec.ranks):
            names.append(spec.module.rpartition(".")[2])
        else:
            trained = (layer for layer, rank in enumerate(spec.ranks) if rank)
            names += [lora.module_path(spec.module, layer) for layer in trained]
    return names


def _plain(number: float) -> float | int:
    return int(number) if number == int(number) else number
