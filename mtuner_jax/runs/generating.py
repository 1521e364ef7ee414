"""Answers of a model, with or without an adapter, to questions of people."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_import
from mtuner_jax.configs import ConfigError, GenerateConfig, Platform
from mtuner_jax.data import rendering
from mtuner_jax.devices import meshes, starting
from mtuner_jax.generation import decoding, sampling
from mtuner_jax.planning import plans
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Params
from mtuner_jax.runs import choosing
from mtuner_jax.runs.families import Family, ModelShape
from mtuner_jax.weights import layouts, sources

Messages = list[dict[str, Any]]


def load(
    shape: ModelShape, source: sources.TensorSource, *, dtype: str
) -> tuple[Decoder, Params]:
    """The decoder and its weights, whole on the first device.

    Returns:
      (decoder, {"embed", "layers", "head"}), layers stacked.
    """
    model = shape.decoder(attention="xla")
    mesh = meshes.make(meshes.parse("1"), jax.local_devices()[:1])
    plan = plans.static(
        name="fsdp", num_layers=shape.num_layers, mesh_sizes=(1,), rows=(1, 1)
    )
    weights = hf_import.load(
        source,
        layouts.locate(shape.tensors(), plan),
        layouts.layout(model, plan, mesh, dtype=dtype),
    )
    layers = weights.pop("segments")["0"]
    return model, {**weights, "layers": layers}


def adapted(
    adapters: Mapping[str, Any], specs: Sequence[lora.AdapterSpec], *, dtype: str
) -> decoding.Adapted:
    """Adapters as a generator takes them, in the dtype of its weights."""
    placed = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, dtype), dict(adapters))
    return decoding.Adapted(placed, lora.scaling_arrays(specs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers messages as text.

    Attributes:
      generator: Of tokens.
      renderer: Text to tokens and back.
      choice: How tokens are chosen.
      max_new_tokens: Tokens after which an answer ends in any case.
      seed: Of the choice.
    """

    generator: decoding.Generator
    renderer: rendering.Renderer
    choice: sampling.Choice
    max_new_tokens: int = 256
    seed: int = 0

    def stream(self, prompt_ids: Sequence[int]) -> Iterator[str]:
        """Pieces of the answer to a tokenized prompt, as they come."""
        encoder = self.renderer.encoder
        ids: list[int] = []
        shown = ""
        for token in self.generator.stream(
            prompt_ids,
            max_new_tokens=self.max_new_tokens,
            stop_ids=frozenset(i for i in encoder.end_ids if i is not None),
            choice=self.choice,
            seed=self.seed,
        ):
            if token in encoder.end_ids:
                break
            ids.append(token)
            text = encoder.decode(ids)
            # A character of several tokens is shown when it is whole.
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        rest = encoder.decode(ids)[len(shown) :]
        if rest:
            yield rest

    def answer(self, prompt_ids: Sequence[int]) -> str:
        """The whole answer to a tokenized prompt."""
        return "".join(self.stream(prompt_ids))


def answerer(config: GenerateConfig, family: Family) -> Answerer:
    """Opens and loads what was chosen.

    Raises:
      UserError: As `choosing.choose` and the loading of weights.
    """
    devices = starting.start("1", Platform.AUTO, deterministic=False)
    chosen = choosing.choose(config, family)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if devices.on_gpu else "float32"
    source: Any = chosen.opened.source
    model, weights = load(chosen.opened.shape, source, dtype=dtype)
    trained = chosen.trained
    dataset = chosen.dataset
    if config.chat_template:
        dataset = dataclasses.replace(dataset, chat_template=config.chat_template)
    return Answerer(
        generator=decoding.Generator(
            model,
            weights,
            adapted(trained.adapters, trained.specs, dtype=dtype) if trained else None,
        ),
        renderer=rendering.Renderer(
            chosen.opened.tokenizer,
            dataset,
            max_length=chosen.opened.shape.max_positions,
            num_rows=chosen.opened.shape.vocab_size,
        ),
        choice=sampling.Choice(config.temperature, config.top_k, config.top_p),
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
    )


def conversations(config: GenerateConfig) -> list[Messages]:
    """The questions of the command line and of the file, each as messages.

    Raises:
      ConfigError: The file cannot be read, or a line of it is no question.
    """
    asked: list[Messages] = [_question(text) for text in config.prompt]
    if config.prompts:
        path = pathlib.Path(config.prompts).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts={config.prompts!r}: {error}") from None
        asked += [
            _messages(line, f"{path}:{number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
    return [with_system(messages, config.system) for messages in asked]


def with_system(messages: Messages, system: str) -> Messages:
    """Messages with a system text in front, if there is one."""
    return [{"role": "system", "content": system}, *messages] if system else messages


def talk(
    config: GenerateConfig,
    answers: Answerer,
    *,
    ask: Callable[[], str],
    say: Callable[[str], None],
) -> None:
    """A conversation: asks until there is nothing more, and streams the answers.

    Args:
      config: Its system text.
      answers: Who answers.
      ask: Returns the next question; raises EOFError at the end.
      say: Shows a piece of the answer.
    """
    messages: Messages = with_system([], config.system)
    while True:
        try:
            text = ask()
        except EOFError:
            return
        if not text.strip():
            continue
        messages = [*messages, *_question(text)]
        pieces = []
        for piece in answers.stream(answers.renderer.prompt_ids(messages)):
            say(piece)
            pieces.append(piece)
        say("\n")
        messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _question(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _messages(line: str, place: str) -> Messages:
    if not line.lstrip().startswith("{"):
        return _question(line)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    if isinstance(row.get("prompt"), str):
        return _question(row["prompt"])
    messages = row.get("messages", row.get("prompt"))
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{place}: neither messages nor prompt; found {sorted(row)}")
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]  # the answer is what is asked for
    return messages
