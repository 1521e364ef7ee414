"""Answers of the model that a run trains: while it trains, and at its end."""

import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.data import loading
from mtuner_jax.generation import decoding, sampling
from mtuner_jax.protocols.engines import State
from mtuner_jax.runs import generating
from mtuner_jax.runs.lora_engines import EngineBuilder
from mtuner_jax.training import loops

_logger = logging.getLogger(__name__)
_MAX_CPU_PARAMETERS = 1_000_000_000
_MAX_SHARE = 0.8  # of a device's memory, for weights that lie there alone


@dataclasses.dataclass(kw_only=True, eq=False)
class Answers:
    """A copy of the base on one device, loaded when it is first asked.

    Attributes:
      builder: Of the run's engine: its model and settings.
      data: The run's; its renderer.
    """

    builder: EngineBuilder
    data: loading.RunData

    @property
    def dtype(self) -> str:
        """Of the copy."""
        return self.builder.job.copy_dtype

    @functools.cached_property
    def generator(self) -> decoding.Generator:
        """With the base alone."""
        opened = self.builder.job.opened
        source: Any = opened.source
        return decoding.Generator(
            *generating.load(opened.shape, source, dtype=self.dtype)
        )

    def with_adapters(self, adapters: Mapping[str, Any]) -> decoding.Adapted:
        """A run's adapters, as the generator takes them."""
        specs = self.builder.model.adapters
        return generating.adapted(adapters, specs, dtype=self.dtype)

    def answer(self, prompt_ids: list[int], adapted: decoding.Adapted) -> str:
        """The most likely answer."""
        self.generator.adapted = adapted
        new_tokens = self.builder.job.config.generation_max_new_tokens
        return generating.Answerer(
            generator=self.generator,
            renderer=self.data.renderer,
            choice=sampling.Choice(),
            max_new_tokens=new_tokens,
        ).answer(prompt_ids)


def hooks(
    builder: EngineBuilder, data: loading.RunData, adapters_of: Callable[[State], Any]
) -> tuple[loops.Hook, ...]:
    """Answers every `generation_steps` steps, to the run's `samples.jsonl`.

    Args:
      builder: Of the run's engine.
      data: The run's.
      adapters_of: State -> adapters on the host.

    Raises:
      ConfigError: The prompts cannot be read.
    """
    config, run = builder.job.config, builder.job.run
    if not config.generation_steps:
        return ()
    answers = Answers(builder=builder, data=data)
    prompts = read_prompts(config)
    tokenized = [
        data.renderer.prompt_ids([{"role": "user", "content": prompt}])
        for prompt in prompts
    ]

    def write(state: State, step: int) -> None:
        adapted = answers.with_adapters(adapters_of(state))
        texts = [answers.answer(ids, adapted) for ids in tokenized]
        with run.samples.open("a", encoding="utf-8") as file:
            for prompt, text in zip(prompts, texts, strict=True):
                record = {"step": step, "prompt": prompt, "text": text}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        _logger.info("step %d: %d answers in %s", step, len(texts), run.samples)

    return (loops.Hook(lambda step: step % config.generation_steps == 0, write),)


def log_comparison(
    builder: EngineBuilder, data: loading.RunData, adapters: Mapping[str, Any]
) -> None:
    """Answers one held-out question with the base and with the adapter.

    Nothing where nothing is held out, weights are random, several processes train, or
    the model has no room on one device.
    """
    job, question = builder.job, _held_out(data)
    if question is None or job.opened.source is None or jax.process_count() > 1:
        return
    answers = Answers(builder=builder, data=data)
    if not _fits_alone(answers):
        return
    prompt_ids, expected = question
    trained = answers.with_adapters(adapters)
    nothing = trained._replace(
        scalings={module: 0.0 * each for module, each in trained.scalings.items()}
    )
    decode = data.renderer.encoder.decode
    shown = {
        "a held-out question": decode(prompt_ids),
        "its answer": decode(expected),
        "the base says": answers.answer(prompt_ids, nothing),
        "with the adapter": answers.answer(prompt_ids, trained),
    }
    for name, text in shown.items():
        _logger.info("%s: %s", name, text.strip())


def _held_out(data: loading.RunData) -> tuple[list[int], list[int]] | None:
    """Prompt and answer of the first held-out sample, as tokens."""
    if data.eval is None:
        return None
    ids, trained = data.eval.samples.tokens(int(data.eval.rows[0][0]))
    first = int(trained.argmax())
    return (ids[:first].tolist(), ids[first:].tolist()) if first > 1 else None


def _fits_alone(answers: Answers) -> bool:
    job = answers.builder.job
    if not job.devices.on_gpu:
        return job.opened.shape.num_parameters <= _MAX_CPU_PARAMETERS
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return job.copy_bytes <= _MAX_SHARE * free


def read_prompts(config: RunConfig) -> list[str]:
    """`generation_prompts` as they are, or the lines of the file that they name.

    Raises:
      ConfigError: Answers are asked for and there is no prompt.
    """
    given = config.generation_prompts
    if not config.generation_steps:
        return []
    path = pathlib.Path(given[0] if given else "").expanduser()
    if len(given) == 1 and path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        given = tuple(line for line in lines if line.strip())
    if not given:
        raise ConfigError(
            f"generation_steps={config.generation_steps} needs generation_prompts: "
            "questions, or a file with one a line"
        )
    return list(given)
