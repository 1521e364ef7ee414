"""A step that is planned without being run."""

import dataclasses

from mtuner_jax.configs import errors
from mtuner_jax.configs.runs import LoraConfig, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """A step to be planned; names and defaults are those of train.py.

    Attributes:
      model: Shape by name (`llama2-70b`), local Hugging Face folder or GGUF file;
        empty for train.py's default model. No weight is read.
      mesh: Preset (`pcie8`, `nvlink8`, ...), `auto`, or sizes such as `2x2x2`.
      hardware: Figures of a machine: a preset's name, a calibrated name, a JSON file,
        or `auto` for those of the mesh, or of the GPUs found here.
      max_length: Tokens in a row.
      global_batch_size: Rows in an optimizer step; 0 means one for each device.
      memory_budget: GiB per device that the compiled step may take; 0 for the pool of
        XLA's allocator less a reserve.
      lora: The adapters.
      dtype: `auto` (bfloat16), `bfloat16` or `float32`, of frozen weights and
        activations.
      attention: `auto` (the fastest that train.py would find), `xla`, `cudnn` or
        `flash`.
      packing: Whether rows hold several samples, which cuDNN attention cannot do.
      plan: `auto` searches; a plan's JSON file is priced instead.
      output: Where to write the plan for `train.py --plan`; empty for nowhere.
      json: Where to write plan, price and comparisons; `-` prints them instead of the
        tables.
      plot: PNG to draw: memory over the step, ratios of the layers, the two streams.
      verify: Compile the step for the machine's GPUs, which need not be there, and
        compare what XLA allocates with what was predicted.
    """

    model: str = ""
    mesh: str = "auto"
    hardware: str = "auto"
    max_length: int = RunConfig.max_length
    global_batch_size: int = 0
    memory_budget: float = RunConfig.memory_budget
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dtype: str = RunConfig.dtype
    attention: str = RunConfig.attention
    packing: bool = RunConfig.packing
    plan: str = "auto"
    output: str = ""
    json: str = ""
    plot: str = ""
    verify: bool = False

    def __post_init__(self):
        errors.at_least(1, self, "max_length")
        errors.at_least(0, self, "global_batch_size", "memory_budget")
        if self.plan != "auto" and not self.plan.endswith(".json"):
            raise errors.ConfigError(
                f"plan={self.plan!r}: auto, or a plan's .json file; what the static "
                "plans cost is always part of the table"
            )
        errors.one_of(self, "dtype", ("auto", "float32", "bfloat16"))
        errors.one_of(self, "attention", ("auto", "xla", "cudnn", "flash"))
