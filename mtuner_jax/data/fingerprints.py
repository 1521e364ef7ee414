"""What a position in the data depends on, so that resume can compare it.

A position is a number of steps. It means the same samples only for the same data,
tokens, rows, batch and seed; anything else would silently skip or repeat samples.
"""

import hashlib

from mtuner_jax import configs
from mtuner_jax.data import errors, ingestion, rendering

_DEFAULT = configs.DatasetConfig()

Fingerprint = dict[str, str | int | float | bool]


def fingerprint(
    run: configs.RunConfig,
    dataset: ingestion.Dataset,
    renderer: rendering.Renderer,
    *,
    global_batch_size: int,
) -> Fingerprint:
    """Collects it, as JSON values; the last field catches what the others don't."""
    template = renderer.template.source if renderer.template is not None else ""
    # Only where they are set, so that a checkpoint of before they existed still fits.
    names = ("template_date", "reasoning", "special_tokens_in_content")
    settings = {
        f"dataset.{name}": str(value)
        for name in names
        if (value := getattr(run.dataset, name)) != getattr(_DEFAULT, name)
    }
    if run.dataset.weights:
        settings["dataset.weights"] = ",".join(map(str, run.dataset.weights))
    return settings | {
        "dataset": dataset.digest,
        "dataset.format": ",".join(dataset.counts.formats),
        "dataset.train_on": str(run.dataset.train_on),
        "dataset.overlong": str(run.dataset.overlong),
        "tokenizer": renderer.encoder.digest,
        "chat_template": hashlib.sha256(template.encode()).hexdigest(),
        "max_length": run.max_length,
        "packing": run.packing,
        "val_size": run.val_size,
        "global_batch_size": global_batch_size,
        "seed": run.seed,
        "tokens": dataset.samples.digest(),
    }


def check(saved: Fingerprint, current: Fingerprint) -> None:
    """Compares the checkpoint's fingerprint with this run's.

    Raises:
      DataError: They differ; the text names the fields and both values.
    """
    different = [
        f"{name} was {_short(saved.get(name))}, is {_short(current.get(name))}"
        for name in {**current, **saved}
        if saved.get(name) != current.get(name)
    ]
    if different:
        raise errors.DataError(
            f"the checkpoint's position in the data is of no use: "
            f"{'; '.join(different)}. Set it back, or start anew with "
            "resume_from_checkpoint=none"
        )


def _short(value: object) -> str:
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text
