"""mtuner-jax: LoRA fine-tuning on several GPUs with planned memory.

    import mtuner_jax as mt
    from models import llama_family

    asked = mt.PlanConfig(model="llama2-7b", mesh="pcie8")
    mt.plan(asked, llama_family.FAMILY, say=print)
    mt.train(mt.RunConfig(mesh="2", max_steps=20), llama_family.FAMILY)

A name is looked up when it is first used: importing the package stays cheap, and the
number of CPU devices can still be chosen, because JAX has not been imported.
"""

import importlib
from typing import Any

_HOMES = {
    "ConfigError": "configs",
    "DatasetConfig": "configs",
    "LoraConfig": "configs",
    "PlanConfig": "configs",
    "RunConfig": "configs",
    "UserError": "configs",
    "plan": "runs.plan_only",
    "train": "runs.lora",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """The public object of that name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
