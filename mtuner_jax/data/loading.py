"""From a run's configuration and its tokenizer to the run's data."""

import dataclasses
import importlib.resources
import logging

import numpy as np
import transformers

from mtuner_jax import configs
from mtuner_jax.data import (
    fingerprints,
    formats,
    ingestion,
    packing,
    pipelines,
    rendering,
    summaries,
)

logger = logging.getLogger(__name__)

SHIPPED = "python_stdlib_qa.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run.

    Attributes:
      train: Batches of optimizer steps.
      eval: None if nothing is held out and no eval_dataset is given.
      renderer: How samples became tokens, and prompts do.
      dataset: The training files as samples, the held-out ones included.
    """

    train: pipelines.TrainData
    eval: pipelines.EvalData | None
    renderer: rendering.Renderer
    dataset: ingestion.Dataset


def load(
    run: configs.RunConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    global_batch_size: int,
    eval_batch_size: int = 0,
    num_rows: int = 0,
) -> RunData:
    """Reads and tokenizes a run's data; touches no device.

    Args:
      global_batch_size: Rows of an optimizer step.
      eval_batch_size: Rows of an evaluation batch; 0 means the global batch size.
      num_rows: Rows of the model's embedding table; 0 does not check token ids.

    Raises:
      DataError: There is something the user has to change.
    """
    renderer = rendering.Renderer(
        tokenizer, run.dataset, max_length=run.max_length, num_rows=num_rows
    )
    paths = run.dataset.path or (shipped_path(),)
    dataset = _ingest(run, renderer, paths=paths, name="training")
    summaries.log_sample(dataset, renderer.encoder)
    kept, held_out = pipelines.split(
        len(dataset.samples), val_size=run.val_size, seed=run.seed
    )
    train = pipelines.TrainData(
        dataset.samples,
        _rows(run, dataset, kept),
        global_batch_size=global_batch_size,
        max_length=run.max_length,
        seed=run.seed,
        fingerprint=fingerprints.fingerprint(
            run, dataset, renderer, global_batch_size=global_batch_size
        ),
    )
    summaries.log_rows(
        train.rows,
        num_tokens=int(dataset.samples.lengths[kept].sum()),
        batch_size=global_batch_size,
        max_length=run.max_length,
    )
    batch_size = eval_batch_size or global_batch_size
    if run.eval_dataset:
        other = _ingest(run, renderer, paths=run.eval_dataset, name="evaluation")
        everything = np.arange(len(other.samples), dtype=np.int32)
        evaluation = _evaluation(run, other, everything, batch_size=batch_size)
    else:
        evaluation = _evaluation(run, dataset, held_out, batch_size=batch_size)
    return RunData(train=train, eval=evaluation, renderer=renderer, dataset=dataset)


def shipped_path() -> str:
    """Where the instruction set that ships lies, from any working directory."""
    return str(importlib.resources.files("mtuner_jax.data") / SHIPPED)


def _ingest(
    run: configs.RunConfig,
    renderer: rendering.Renderer,
    *,
    paths: tuple[str, ...],
    name: str,
) -> ingestion.Dataset:
    policy = ingestion.Policy(
        format=formats.choose(run.dataset.format),
        overlong=run.dataset.overlong,
        on_bad_sample=run.dataset.on_bad_sample,
    )
    dataset = ingestion.ingest(paths, renderer, policy=policy)
    summaries.log_dataset(dataset, name=name, max_length=run.max_length)
    return dataset


def _evaluation(
    run: configs.RunConfig,
    dataset: ingestion.Dataset,
    indices: np.ndarray,
    *,
    batch_size: int,
) -> pipelines.EvalData | None:
    if not len(indices):
        return None
    evaluation = pipelines.EvalData(
        samples=dataset.samples,
        rows=_rows(run, dataset, indices),
        batch_size=batch_size,
        max_length=run.max_length,
    )
    num = len(evaluation)
    logger.info("evaluation: %s samples, %d batches", f"{len(indices):,}", num)
    return evaluation


def _rows(
    run: configs.RunConfig, dataset: ingestion.Dataset, indices: np.ndarray
) -> packing.PackedRows:
    if not run.packing:
        return packing.one_per_row(indices)
    lengths = dataset.samples.lengths
    return packing.best_fit(indices, lengths, max_length=run.max_length)
