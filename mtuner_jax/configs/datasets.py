"""Where samples come from."""

import dataclasses
import enum


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where samples come from and how a line becomes tokens and loss mask.

    Attributes:
      path: JSONL file or files; empty means the instruction set that ships.
      format: `auto`, `messages`, `prompt_completion` or `alpaca`.
      train_on: Tokens with loss; `auto` means the assistant's or completion's.
      chat_template: Jinja file that replaces the tokenizer's own template.
      overlong: What to do with samples longer than `max_length`.
      on_bad_sample: Stop at an unusable line, or skip and count it.
    """

    path: tuple[str, ...] = ()
    format: str = "auto"
    train_on: TrainOn = TrainOn.AUTO
    chat_template: str = ""
    overlong: Overlong = Overlong.TRUNCATE
    on_bad_sample: OnBadSample = OnBadSample.ERROR
