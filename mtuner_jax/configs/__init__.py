"""What a run is asked to do, as frozen dataclasses that check themselves.

Names are the ones users know from Hugging Face (`learning_rate`, `max_steps`) and
PEFT (`lora.r`, `lora.lora_alpha`). `settings.cli` parses YAML and flags into them;
nothing below ever sees a dict or a string flag.
"""

from mtuner_jax.configs.errors import ConfigError, RunError, UserError
from mtuner_jax.configs.outputs import ExportConfig, GenerateConfig, ModelChoice
from mtuner_jax.configs.planning import PlanConfig
from mtuner_jax.configs.runs import (
    DatasetConfig,
    LoraConfig,
    OnBadSample,
    OptimizerConfig,
    Overlong,
    Platform,
    Reasoning,
    RunConfig,
    TrainOn,
)

__all__ = [
    "ConfigError",
    "DatasetConfig",
    "ExportConfig",
    "GenerateConfig",
    "LoraConfig",
    "ModelChoice",
    "OnBadSample",
    "OptimizerConfig",
    "Overlong",
    "PlanConfig",
    "Platform",
    "Reasoning",
    "RunConfig",
    "RunError",
    "TrainOn",
    "UserError",
]
