"""Says in the log what the data is like, before any device works on it."""

import logging

from mtuner_jax.data import encoding, ingestion, packing

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARS = 1200


def log_dataset(dataset: ingestion.Dataset, *, name: str, max_length: int) -> None:
    """Logs what became of the rows, and the share of tokens with loss."""
    counts, samples = dataset.counts, dataset.samples
    parts = [f"{counts.read:,} samples read"]
    if counts.skipped:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts.skipped.items())
        parts.append(f"{sum(counts.skipped.values()):,} skipped ({reasons})")
    if counts.truncated:
        parts.append(f"{counts.truncated:,} truncated to {max_length:,} tokens")
    if counts.overlong:
        parts.append(f"{counts.overlong:,} dropped (longer than {max_length:,} tokens)")
    if counts.untrained:
        parts.append(f"{counts.untrained:,} dropped (no trained token)")
    logger.info("%s data %s: %s", name, ", ".join(dataset.paths), "; ".join(parts))
    logger.info(
        "%s data: %s samples, %s tokens, %.1f %% of them trained",
        name,
        f"{len(samples):,}",
        f"{len(samples.ids):,}",
        100 * trained_share(dataset),
    )
    if counts.unused:
        logger.warning(
            "%s data: not used: %s",
            name,
            ", ".join(
                f"column {column!r} of {n:,} rows"
                for column, n in counts.unused.items()
            ),
        )
    if counts.split:
        logger.warning(
            "%s data: %s conversations became a sample for each answer, since the chat "
            "template rewrites earlier turns; dataset.train_on: completion takes the "
            "last answers only",
            name,
            f"{counts.split:,}",
        )
    if counts.untrained:
        logger.warning(ingestion.untrained_text(counts, max_length))
    if counts.endless:
        logger.warning(
            "%d of %d samples end without an end-of-turn or EOS token; the model does "
            "not learn to stop from them",
            counts.endless,
            counts.read,
        )


def trained_share(dataset: ingestion.Dataset) -> float:
    """Share of all tokens that carry loss."""
    return float(dataset.samples.trained.mean())


def log_rows(
    rows: packing.PackedRows, *, num_tokens: int, batch_size: int, max_length: int
) -> None:
    """Logs how well the rows are filled, and what an epoch is."""
    steps = -(-len(rows) // batch_size)
    logger.info(
        "an epoch is %d steps: %s samples in %s rows of %s tokens, %.1f %% filled; "
        "%d rows a step",
        steps,
        f"{len(rows.samples):,}",
        f"{len(rows):,}",
        f"{max_length:,}",
        100 * num_tokens / (len(rows) * max_length),
        batch_size,
    )
    if len(rows) < batch_size:
        logger.warning(
            "the data fills %d rows and global_batch_size is %d: %d rows of every step "
            "are padding; lower global_batch_size, or max_length",
            len(rows),
            batch_size,
            batch_size - len(rows),
        )


def log_sample(dataset: ingestion.Dataset, encoder: encoding.Encoder) -> None:
    """Logs the first sample as text, with what carries loss in >>> <<<."""
    text = show_mask(dataset, encoder, index=0)
    if len(text) > MAX_SHOWN_CHARS:
        half = MAX_SHOWN_CHARS // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    logger.info("the first sample, with >>>trained<<< tokens:\n%s", text)


def show_mask(
    dataset: ingestion.Dataset, encoder: encoding.Encoder, *, index: int
) -> str:
    """Decodes a sample, with >>> and <<< around each run of tokens with loss."""
    ids, trained = dataset.samples.tokens(index)
    parts = []
    start = 0
    for stop in range(1, len(ids) + 1):
        if stop == len(ids) or trained[stop] != trained[start]:
            text = encoder.decode(ids[start:stop].tolist())
            parts.append(f">>>{text}<<<" if trained[start] else text)
            start = stop
    return "".join(parts)
