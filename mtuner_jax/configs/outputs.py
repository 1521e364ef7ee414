"""What is made of a trained run: files for other programs, and answers."""

import dataclasses
import re

from mtuner_jax.configs import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """A model, with or without an adapter.

    Attributes:
      run: A run's folder: its model and its adapter.
      checkpoint: Step of the run whose adapter is taken; 0 for the one at its end.
      model: Folder, GGUF file or hub id; empty for the run's or the adapter's, or for
        the default model.
      adapter: Folder with a PEFT adapter, instead of a run's.
    """

    run: str = ""
    checkpoint: int = 0
    model: str = ""
    adapter: str = ""

    def __post_init__(self):
        errors.at_least(0, self, "checkpoint")
        errors.require(
            not (self.run and self.adapter),
            f"run={self.run!r} and adapter={self.adapter!r}: give one of them",
        )
        errors.require(
            not self.checkpoint or self.run,
            f"checkpoint={self.checkpoint} is a step of a run: give run, too",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(ModelChoice):
    """What to write, and where to.

    Attributes:
      format: `peft` (the adapter), `merged` (a Hugging Face model with the adapter in
        its weights) or `gguf` (the same as one file).
      output: Folder to write; for `gguf` a folder or a .gguf file. It may not be there
        yet, or hold an earlier export of the same kind.
      dtype: `float32`, `bfloat16`, `float16` (or fp32, bf16, fp16), for `gguf` also
        `q8_0`; `auto` is bfloat16, and float32 for `peft`.
      max_shard_size: Largest file of a merged model, such as 5GB or 500MB.
      readers: Of an adapter: `peft`, or `all` for those that know one rank and one
        alpha only (vLLM, llama.cpp): scalings go into B, ranks are filled with zeros.
    """

    format: str = "merged"
    output: str = ""
    dtype: str = "auto"
    max_shard_size: str = "5GB"
    readers: str = "peft"

    def __post_init__(self):
        super().__post_init__()
        errors.one_of(self, "format", ("peft", "merged", "gguf"))
        errors.one_of(self, "readers", ("peft", "all"))
        errors.require(self.output, "output is empty: name the folder to write")
        errors.require(
            re.fullmatch(r"[1-9]\d*[KMGT]i?B", self.max_shard_size),
            f"max_shard_size={self.max_shard_size!r}: a size such as 5GB or 500MB",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelChoice):
    """What to answer, and how.

    Attributes:
      prompt: Questions to answer, one after the other; none begins a conversation in
        the terminal.
      prompts: File with a question a line, or JSONL with `messages` or `prompt`.
      system: System text of every conversation.
      chat_template: As `dataset.chat_template`; empty for the run's.
      max_new_tokens: Tokens after which an answer ends in any case.
      temperature: 0 takes the most likely token; else logits are divided by it.
      top_k: Only the k most likely tokens; 0 means all.
      top_p: Only the most likely tokens that together have this probability.
      seed: Of the choice.
      dtype: `auto` (bfloat16 on GPUs, float32 on CPUs), `float32` or `bfloat16`.
    """

    prompt: tuple[str, ...] = ()
    prompts: str = ""
    system: str = ""
    chat_template: str = ""
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        errors.at_least(1, self, "max_new_tokens")
        errors.at_least(0, self, "temperature", "top_k")
        errors.require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")
        errors.one_of(self, "dtype", ("auto", "float32", "bfloat16"))
