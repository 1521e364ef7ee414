"""A training run, and the parts of it that have a config of their own."""

import dataclasses
import datetime
import enum
import math

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
        errors.at_least(1, self, "r", prefix="lora.")
        errors.within(0, 1, self, "lora_dropout", prefix="lora.")
        errors.above(0, self.lora_alpha, "lora.lora_alpha")
        for pattern, rank in self.rank_pattern.items():
            where = f"lora.rank_pattern[{pattern!r}]"
            errors.require(rank >= 1, f"{where}={rank}: at least 1")
        for pattern, alpha in self.alpha_pattern.items():
            errors.above(0, alpha, f"lora.alpha_pattern[{pattern!r}]")
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, name):
                errors.regular_expression(pattern, f"lora.{name}")
        errors.require(self.target_modules, "lora.target_modules is empty")
        if isinstance(self.target_modules, str):
            errors.regular_expression(self.target_modules, "lora.target_modules")


class TrainOn(enum.StrEnum):
    """Which tokens of a sample carry loss."""

    AUTO = "auto"
    ASSISTANT = "assistant"
    COMPLETION = "completion"
    ALL = "all"


class Overlong(enum.StrEnum):
    """What happens to a sample longer than `max_length`."""

    TRUNCATE = "truncate"
    DROP = "drop"
    ERROR = "error"


class OnBadSample(enum.StrEnum):
    """What happens at a line that cannot be used."""

    ERROR = "error"
    SKIP = "skip"


class Reasoning(enum.StrEnum):
    """What happens to the reasoning of an assistant's message."""

    KEEP = "keep"
    DROP = "drop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where samples come from and how a line becomes tokens and loss mask.

    Attributes:
      path: Files (JSONL, JSON, CSV, parquet; compressed or not), folders, patterns, or
        datasets of the Hugging Face hub as `owner/name:split`; empty means the
        instruction set that ships.
      weights: How often an epoch takes the samples of each entry of `path`, such as
        0.5 or 2; empty means once.
      format: `auto`, `messages`, `prompt_completion`, `alpaca`, `sharegpt` or `text`.
      columns: Our name of a column -> its name in the files, such as
        `{prompt: question, completion: answer}`.
      ignore_columns: Columns to leave out although they carry meaning.
      max_samples: Usable samples to read; 0 reads all.
      train_on: Tokens with loss; `auto` means the assistant's or completion's.
      chat_template: Jinja file that replaces the tokenizer's own template, or the
        name of one of several that it has.
      template_date: The day that chat templates are told, as YYYY-MM-DD.
      reasoning: Keep `reasoning_content` of messages, or the `<think>` block that
        begins an answer, which the chat template then has to show, or drop it.
      special_tokens_in_content: Have special tokens within messages be tokens, not
        text; a message can then end its turn and begin another one.
      overlong: What to do with samples longer than `max_length`.
      on_bad_sample: Stop at an unusable line, or skip and count it.
    """

    path: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    format: str = "auto"
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    ignore_columns: tuple[str, ...] = ()
    max_samples: int = 0
    train_on: TrainOn = TrainOn.AUTO
    chat_template: str = ""
    template_date: str = "2024-07-26"
    reasoning: Reasoning = Reasoning.KEEP
    special_tokens_in_content: bool = False
    overlong: Overlong = Overlong.TRUNCATE
    on_bad_sample: OnBadSample = OnBadSample.ERROR

    def __post_init__(self):
        errors.at_least(0, self, "max_samples", prefix="dataset.")
        for weight in self.weights:
            errors.require(
                0 <= weight < math.inf,
                f"dataset.weights: {weight} must not be negative",
            )
        try:
            datetime.date.fromisoformat(self.template_date)
        except ValueError:
            raise errors.ConfigError(
                f"dataset.template_date={self.template_date!r} is no date such as "
                "2024-07-26"
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule, counted in optimizer steps.

    Attributes:
      learning_rate: Highest rate of the schedule.
      lr_scheduler_type: `linear`, `cosine`, `constant` or `constant_with_warmup`.
      warmup_steps: Steps of linear warm-up; below 1 it is a share of all steps.
      weight_decay: Decoupled decay of the adapters.
      adam_beta1: Decay of the first moment.
      adam_beta2: Decay of the second moment.
      adam_epsilon: Added to the root of the second moment.
      max_grad_norm: Global norm to which gradients are clipped; 0 switches it off.
    """

    learning_rate: float = 2e-4
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.03
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self):
        schedules = ("linear", "cosine", "constant", "constant_with_warmup")
        errors.one_of(self, "lr_scheduler_type", schedules)
        for name in ("learning_rate", "adam_epsilon"):
            errors.above(0, getattr(self, name), name)
        errors.within(0, 1, self, "adam_beta1", "adam_beta2")
        errors.at_least(0, self, "weight_decay", "warmup_steps", "max_grad_norm")


class Platform(enum.StrEnum):
    """Where the run executes: found by itself, or asked for."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(OptimizerConfig):
    """One training run.

    Attributes:
      model: Local Hugging Face folder, GGUF file or hub id; empty for the
        default model.
      random_init: Random weights of the model's shape instead of its own.
      mesh: Preset (`pcie8`, `nvlink8`, ...), `auto`, or sizes such as `2x2x2`.
      platform: Where to run; `auto` finds out.
      dtype: `auto` (bfloat16 on GPUs, float32 on CPUs), `float32`, `bfloat16`.
      attention: `auto`, `xla`, `cudnn` or `flash`.
      plan: `auto` (the fastest that fits), `fsdp` (nothing kept), `replicated`, or a
        plan's JSON file.
      hardware: Machine whose figures `auto` plans for: a preset, a file that
        scripts/calibrate.py wrote, or `auto`.
      memory_budget: GiB per device that a compiled step may take; 0 for XLA's pool
        less the hardware's reserve.
      strict_plan: Stop where a plan needs more memory than the budget, instead of
        planning again.
      verify_plan: On CPUs, compile the step for the GPUs that it is planned for, if
        the wheels for it are installed; GPU runs always check what they compile.
      output_dir: Folder of the run: log, metrics, checkpoints, adapter.
      gradient_checkpointing: Keep only layer inputs for the backward pass and redo
        the rest; less memory, more computation. For `fsdp` and `replicated`; other
        plans decide themselves.
      profile_guided: On several GPUs, compile the step again after measuring it.
      max_length: Tokens in a row.
      strict: Stop where a warning would say that the model may learn badly, such as at
        a max_length beyond its own.
      packing: Several samples in a row, best fit, without seeing each other.
      val_size: Held-out share (below 1) or number of samples; 0 for none.
      eval_dataset: What to evaluate on instead of a held-out part, as `dataset.path`.
      show_samples: Print so many samples with what carries loss, and stop.
      per_device_train_batch_size: Rows that a device runs at once.
      gradient_accumulation_steps: Such batches in an optimizer step.
      global_batch_size: Rows in an optimizer step; 0 means
        per_device_train_batch_size x gradient_accumulation_steps x devices.
      num_train_epochs: Passes over the data, if `max_steps` is 0.
      max_steps: Optimizer steps; 0 means `num_train_epochs` decides.
      logging_steps: Optimizer steps between console lines.
      save_steps: Optimizer steps between checkpoints; 0 leaves it to save_minutes.
      save_minutes: Minutes between checkpoints where save_steps is 0; 0 saves at the
        end only.
      save_total_limit: Checkpoints to keep, the newest ones.
      save_best: Also keep the checkpoint of the lowest evaluation loss, whatever
        save_total_limit says, and write its adapter to adapter_best/.
      eval_steps: Optimizer steps between evaluations; 0 evaluates at the end only.
      max_eval_batches: Batches of an evaluation; 0 means all.
      eval_on_start: Evaluate before the first step, too.
      early_stopping_patience: End after so many evaluations without a lower loss; 0
        never ends early.
      early_stopping_threshold: By how much a loss must be lower to count.
      watchdog_minutes: Say so when a step or an evaluation takes longer; 0 never does.
      resume_from_checkpoint: `auto` or `latest`, `none`, or a checkpoint's folder.
      init_adapter: Adapter whose weights a new run begins with: a PEFT folder, a run's
        folder or a checkpoint; optimizer and data start anew.
      generation_steps: Optimizer steps between answers to `generation_prompts`, written
        to samples.jsonl; 0 for none.
      generation_prompts: Questions, or a file with one a line.
      generation_max_new_tokens: Tokens of such an answer.
      compare_answers: Answer a held-out question with and without the adapter at the
        end, where the model fits on one device.
      report_to: `tensorboard` or `none`; metrics.jsonl is always written.
      plot_loss: Write training_loss.png at the end.
      deterministic: On GPUs, slower kernels that repeat bit for bit.
      seed: Of data order, adapters and dropout.
    """

    model: str = ""
    random_init: bool = False
    mesh: str = "auto"
    platform: Platform = Platform.AUTO
    dtype: str = "auto"
    attention: str = "auto"
    plan: str = "auto"
    hardware: str = "auto"
    memory_budget: float = 0.0
    strict_plan: bool = False
    verify_plan: bool = True
    gradient_checkpointing: bool = False
    profile_guided: bool = True
    output_dir: str = "runs/default"
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dataset: DatasetConfig = dataclasses.field(default_factory=DatasetConfig)
    max_length: int = 1024
    strict: bool = False
    packing: bool = True
    val_size: float = 0.0
    eval_dataset: tuple[str, ...] = ()
    show_samples: int = 0
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    global_batch_size: int = 0
    num_train_epochs: float = 1.0
    max_steps: int = 0
    logging_steps: int = 1
    save_steps: int = 0
    save_minutes: float = 10.0
    save_total_limit: int = 3
    save_best: bool = False
    eval_steps: int = 0
    max_eval_batches: int = 0
    eval_on_start: bool = False
    early_stopping_patience: int = 0
    early_stopping_threshold: float = 0.0
    watchdog_minutes: float = 5.0
    resume_from_checkpoint: str = "auto"
    init_adapter: str = ""
    generation_steps: int = 0
    generation_prompts: tuple[str, ...] = ()
    generation_max_new_tokens: int = 48
    compare_answers: bool = True
    report_to: str = "tensorboard"
    plot_loss: bool = True
    deterministic: bool = False
    seed: int = 42

    def __post_init__(self):
        super().__post_init__()
        errors.at_least(
            1,
            self,
            *"max_length per_device_train_batch_size gradient_accumulation_steps "
            "logging_steps save_total_limit generation_max_new_tokens".split(),
        )
        errors.at_least(
            0,
            self,
            *"global_batch_size max_steps save_steps eval_steps max_eval_batches "
            "val_size memory_budget show_samples save_minutes early_stopping_patience "
            "early_stopping_threshold watchdog_minutes generation_steps".split(),
        )
        errors.within(0, 2**32, self, "seed")
        errors.require(
            self.val_size < 1 or self.val_size == int(self.val_size),
            f"val_size={self.val_size}: a whole number of samples, or a share below 1",
        )
        errors.one_of(self, "plan", ("auto", "fsdp", "replicated"), suffix=".json")
        for name in ("save_best", "early_stopping_patience"):
            errors.require(
                not getattr(self, name)
                or (self.eval_steps and (self.val_size or self.eval_dataset)),
                f"{name}={getattr(self, name)} needs evaluations: set eval_steps, and "
                "val_size or eval_dataset",
            )
        errors.require(
            self.max_steps > 0 or self.num_train_epochs > 0,
            f"max_steps={self.max_steps} and num_train_epochs={self.num_train_epochs}: "
            "one of them must be above 0",
        )
        errors.one_of(self, "dtype", ("auto", "float32", "bfloat16"))
        errors.one_of(self, "attention", ("auto", "xla", "cudnn", "flash"))
        errors.one_of(self, "report_to", ("tensorboard", "none"))
        errors.require(
            not (self.eval_dataset and self.val_size),
            "eval_dataset and val_size are both set; choose one",
        )
