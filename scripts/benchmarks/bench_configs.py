"""What `scripts/bench.py` measures, read without JAX."""

import dataclasses

from mtuner_jax.configs import LoraConfig, Platform, RunConfig, errors
from mtuner_jax.planning import plans
from mtuner_jax.settings import cli


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """A step to be measured; its plan is searched, read from a file, or put together.

    Attributes:
      model: Shape by name, or a local folder or file; no weight is read.
      random_init: Has to be given: weights and tokens are random.
      mesh: Preset (`pcie8`, `nvlink8`, ...), `auto`, or sizes such as `2x2x2`.
      platform: Where to run; `auto` finds out.
      plan: `auto`, `fsdp`, `replicated`, or a plan's JSON file.
      hardware: Machine whose figures price the plan: a preset, a name, a file, `auto`.
      memory_budget: GiB per device that `plan=auto` may take; 0 for the pool.
      global_batch_size: Rows of a step that `plan=auto` plans for; 0 means microbatch
        x accumulation x devices.
      saved: Tensors that a layer saves for its backward pass.
      microbatch: Rows that a device runs at once.
      accumulation: Microbatches in a step.
      rest_axes: Mesh axes over which the kept layers' weights are whole all the time.
      fwd_keep_axes: Likewise, what the forward pass keeps.
      bwd_keep_axes: Likewise, what is kept from the backward pass for the next step.
      kept_layers: First layers that these three hold for; 0 means all.
      no_prefetch: Gather a layer's weights when they are needed, not before.
      merge_gathers: Join the gathers of a layer into one.
      tail_layers: Last layers that run in parts of the microbatch.
      tail_chunks: Such parts.
      embedding: How the input table is used.
      head: How the output table is used.
      no_profile: Do not compile again with a profile.
      xla: Compiler options, each `name=value`.
      trace: Tell the communication that nothing hides.
      max_length: Tokens in a row.
      dtype: `auto` (bfloat16 on GPUs, float32 on CPUs), `bfloat16` or `float32`.
      attention: `auto`, `xla`, `cudnn` or `flash`.
      packing: Whether rows hold several documents, as in train.py.
      document_tokens: Mean length of these, which are drawn log-normal as chats are.
      r: Rank of the adapters.
      lora_dropout: Their dropout.
      seconds: Of timed steps, three at least.
      layers: Run that many layers only, for tests; 0 means all.
      output: JSON lines to append to; empty for none.
      cases: File with the flags of a configuration on each line.
    """

    model: str = "llama2-7b"
    random_init: bool = False
    mesh: str = "auto"
    platform: Platform = Platform.AUTO
    plan: str = "fsdp"
    hardware: str = "auto"
    memory_budget: float = 0.0
    global_batch_size: int = 0
    saved: plans.Saved = plans.Saved.ATTENTION_AND_GATES
    microbatch: int = 1
    accumulation: int = 1
    rest_axes: int = 0
    fwd_keep_axes: int = 0
    bwd_keep_axes: int = 0
    kept_layers: int = 0
    no_prefetch: bool = False
    merge_gathers: bool = False
    tail_layers: int = 0
    tail_chunks: int = 1
    embedding: plans.Table = plans.Table.GATHERED
    head: plans.Table = plans.Table.GATHERED
    no_profile: bool = False
    xla: tuple[str, ...] = ()
    trace: bool = False
    max_length: int = 4096
    dtype: str = RunConfig.dtype
    attention: str = RunConfig.attention
    packing: bool = RunConfig.packing
    document_tokens: int = 350
    r: int = LoraConfig.r
    lora_dropout: float = LoraConfig.lora_dropout
    seconds: float = 30.0
    layers: int = 0
    output: str = ""
    cases: str = ""

    def __post_init__(self):
        if not self.random_init:
            raise errors.ConfigError(
                "random_init=False: weights are random; --random_init"
            )
        errors.at_least(
            1, self, "document_tokens", "max_length", "microbatch", "accumulation", "r"
        )
        errors.one_of(self, "dtype", ("auto", "float32", "bfloat16"))
        errors.one_of(self, "attention", ("auto", "xla", "cudnn", "flash"))
        errors.one_of(self, "plan", ("auto", "fsdp", "replicated"), suffix=".json")
        for option in self.xla:
            if "=" not in option:
                raise errors.ConfigError(f"xla={option!r}: name=value")


def parse(argv: list[str], *, description: str = "") -> BenchConfig:
    """Reads the command line, or the flags of a case."""
    return cli.parse(argv, BenchConfig, prog="bench.py", description=description)
