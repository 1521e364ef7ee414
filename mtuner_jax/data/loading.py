"""From a run's configuration and its tokenizer to the run's data."""

import dataclasses
import importlib.resources
import itertools
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import transformers

from mtuner_jax import configs
from mtuner_jax.data import (
    errors,
    files,
    fingerprints,
    ingestion,
    packing,
    pipelines,
    rendering,
    summaries,
)
from mtuner_jax.numbers.documents import RowDocuments

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

    @property
    def documents(self) -> RowDocuments:
        """What training rows hold; no row has more documents, of evaluation neither."""
        trained = self.train.documents
        if self.eval is None:
            return trained
        most = max(trained.most, self.eval.documents.most)
        return dataclasses.replace(trained, most=most)


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
    asked = run.dataset.path or (shipped_path(),)
    found = files.expand_all(asked)
    dataset = _ingest(run, renderer, found, name="training")
    summaries.log_sample(dataset, renderer.encoder)
    kept, held_out = _split(run, dataset)
    kept = _weighted(run, dataset, kept, files_per_entry=[len(one) for one in found])
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
        found = files.expand_all(run.eval_dataset)
        other = _ingest(run, renderer, found, name="evaluation")
        everything = np.arange(len(other.samples), dtype=np.int32)
        evaluation = _evaluation(run, other, everything, batch_size=batch_size)
    else:
        evaluation = _evaluation(run, dataset, held_out, batch_size=batch_size)
    return RunData(train=train, eval=evaluation, renderer=renderer, dataset=dataset)


def shipped_path() -> str:
    """Where the instruction set that ships lies, from any working directory."""
    return str(importlib.resources.files("mtuner_jax.data") / SHIPPED)


def show(
    run: configs.RunConfig,
    tokenizer: transformers.PreTrainedTokenizerBase,
    *,
    num_rows: int = 0,
) -> Iterator[str]:
    """The first `run.show_samples` samples as text, with what carries loss marked.

    Raises:
      DataError: As `load`.
    """
    dataset = dataclasses.replace(run.dataset, max_samples=run.show_samples)
    run = dataclasses.replace(run, dataset=dataset, val_size=0.0, eval_dataset=())
    data = load(run, tokenizer, global_batch_size=1, num_rows=num_rows)
    for index in range(len(data.dataset.samples)):
        yield summaries.show_mask(data.dataset, data.renderer.encoder, index=index)


def _ingest(
    run: configs.RunConfig,
    renderer: rendering.Renderer,
    found: Sequence[Sequence[str]],
    *,
    name: str,
) -> ingestion.Dataset:
    dataset = ingestion.ingest(
        tuple(itertools.chain.from_iterable(found)),
        renderer,
        run.dataset,
        max_samples=run.dataset.max_samples if name == "training" else 0,
    )
    summaries.log_dataset(dataset, name=name, max_length=run.max_length)
    return dataset


def _split(
    run: configs.RunConfig, dataset: ingestion.Dataset
) -> tuple[np.ndarray, np.ndarray]:
    """Indices [kept] and [held out] int32; the samples of a row stay together."""
    rows, row = np.unique(dataset.samples.sample_ids, return_inverse=True)
    _, chosen = pipelines.split(len(rows), val_size=run.val_size, seed=run.seed)
    held_out = np.isin(row, chosen)
    kept = np.flatnonzero(~held_out).astype(np.int32)
    return kept, np.flatnonzero(held_out).astype(np.int32)


def _weighted(
    run: configs.RunConfig,
    dataset: ingestion.Dataset,
    kept: np.ndarray,
    *,
    files_per_entry: Sequence[int],
) -> np.ndarray:
    """The samples of an epoch: of a file of weight 2.5 all twice, half of them thrice.

    Which half is chosen by `seed`, once for all epochs.
    """
    weights = run.dataset.weights
    if not weights:
        return kept
    if len(weights) != len(files_per_entry):
        raise errors.DataError(
            f"dataset.weights has {len(weights)} entries, dataset.path "
            f"{len(files_per_entry)}; give each entry of dataset.path its weight"
        )
    per_file = np.repeat(weights, files_per_entry)
    file = np.searchsorted(dataset.file_starts, kept, side="right") - 1
    whole, share = np.divmod(per_file[file], 1.0)
    random = np.random.default_rng(pipelines.named_seed(run.seed, "weights"))
    times = whole.astype(np.int64) + (random.permutation(len(kept)) / len(kept) < share)
    logger.info(
        "an epoch takes %s samples of %s, by dataset.weights",
        f"{times.sum():,}",
        f"{len(kept):,}",
    )
    if not times.any():
        raise errors.DataError(f"dataset.weights={list(weights)} leave no sample")
    return np.repeat(kept, times)


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
