"""Reads a dataset's files into tokenized samples, and counts what happened."""

import collections
import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence

from mtuner_jax import configs
from mtuner_jax.data import errors, files, formats, jsonl, rendering, samples

logger = logging.getLogger(__name__)

MAX_LOGGED_SKIPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What happened to the rows of a dataset.

    Attributes:
      read: Rows that are not blank.
      skipped: Rows that could not be used, by reason.
      truncated: Samples that were cut to `max_length` and are used.
      overlong: Samples left out for being longer than `max_length`.
      untrained: Samples left out since no token with loss was left after the cut.
      endless: Samples whose last token with loss does not end a turn.
      split: Conversations that became a sample a turn.
      formats: Format of each file.
      unused: Rows with a value in a column that is not used, by column.
    """

    read: int
    skipped: dict[str, int]
    truncated: int
    overlong: int
    untrained: int
    endless: int
    split: int
    formats: tuple[formats.RowFormat, ...]
    unused: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """A dataset as samples.

    Attributes:
      paths: The files.
      file_starts: [files + 1], first sample of each file.
      samples: At least one.
      counts: What became of all rows.
      digest: SHA-256 of the rows' bytes; blank lines and line ends don't matter.
    """

    paths: tuple[str, ...]
    file_starts: tuple[int, ...]
    samples: samples.Samples
    counts: Counts
    digest: str


def ingest(
    paths: Sequence[str],
    renderer: rendering.Renderer,
    settings: configs.DatasetConfig,
    *,
    max_samples: int = 0,
) -> Dataset:
    """Reads, renders and cuts all samples.

    Args:
      paths: Files and hub datasets, as `files.read` takes them.
      renderer: Of their samples.
      settings: What becomes of columns, overlong samples and bad lines.
      max_samples: Usable samples after which reading stops; 0 reads all.

    Raises:
      DataError: A file can't be read; a line can't be used, and the policy is to
        stop; or no sample is left.
    """
    reader = _Reader(renderer, settings, max_samples=max_samples)
    starts = [0]
    for path in paths:
        if not reader.is_full:
            reader.read_file(path)
        starts.append(reader.num_samples)
    return reader.finish(tuple(paths), tuple(starts))


class _Reader:
    def __init__(
        self,
        renderer: rendering.Renderer,
        settings: configs.DatasetConfig,
        *,
        max_samples: int,
    ):
        self._renderer = renderer
        self._settings = settings
        self._format = formats.choose(settings.format)
        self._max_samples = max_samples
        self._builder = samples.SamplesBuilder()
        self._digest = hashlib.sha256()
        self._formats: list[formats.RowFormat] = []
        self._unused: collections.Counter[str] = collections.Counter()
        self._skipped: collections.Counter[str] = collections.Counter()
        self._tally: collections.Counter[str] = collections.Counter()

    @property
    def num_samples(self) -> int:
        """Usable samples so far."""
        return len(self._builder)

    @property
    def is_full(self) -> bool:
        """Whether `max_samples` are there."""
        return 0 < self._max_samples <= self.num_samples

    def read_file(self, path: str) -> None:
        format = self._format
        logged = False
        for sample_id, line in self._numbered(path):
            try:
                row = formats.rename(jsonl.parse_row(line), self._settings.columns)
                format = format or formats.detect(row)
                self._add(sample_id, line, row, format)
            except errors.SampleError as error:
                self._skip(line, error)
                continue
            if not logged:
                found = "set" if self._format else "found by its columns"
                logger.info("%s: format %s (%s)", path, format, found)
                self._formats.append(format)
                logged = True
            if self.is_full:
                return

    def _numbered(self, path: str) -> Iterator[tuple[int, jsonl.Line]]:
        for line in files.read(path):
            sample_id = self._tally["read"]
            self._tally["read"] += 1
            self._digest.update(line.raw + b"\n")
            yield sample_id, line

    def _add(
        self,
        sample_id: int,
        line: jsonl.Line,
        row: formats.Row,
        format: formats.RowFormat,
    ) -> None:
        example = formats.parse(
            row, format, has_template=self._renderer.template is not None
        )
        self._unused.update(formats.unused(row, format, self._settings.ignore_columns))
        parts = self._renderer.render_all(example)
        self._tally["split"] += len(parts) > 1
        for tokens in parts:
            self._add_tokens(sample_id, line, tokens)

    def _add_tokens(
        self, sample_id: int, line: jsonl.Line, tokens: rendering.RenderedTokens
    ) -> None:
        max_length = self._renderer.max_length
        if len(tokens.ids) > max_length:
            if self._settings.overlong is configs.Overlong.ERROR:
                raise errors.DataError(
                    f"{line.path}:{line.number}: {len(tokens.ids):,} tokens, "
                    f"max_length is {max_length:,}; raise it, or set "
                    "dataset.overlong to truncate or drop"
                )
            if self._settings.overlong is configs.Overlong.DROP:
                self._tally["overlong"] += 1
                return
        if not tokens.trained[:max_length].any():
            self._tally["untrained"] += 1
            return
        self._tally["truncated"] += len(tokens.ids) > max_length
        self._tally["endless"] += not self._renderer.ends_turn(tokens)
        self._builder.add(
            sample_id, tokens.ids[:max_length], tokens.trained[:max_length]
        )

    def _skip(self, line: jsonl.Line, error: errors.SampleError) -> None:
        place = f"{line.path}:{line.number}: {error}"
        if self._settings.on_bad_sample is configs.OnBadSample.ERROR:
            raise errors.DataError(
                f"{place} (dataset.on_bad_sample: skip leaves such lines out)"
            ) from None
        self._skipped[error.reason] += 1
        if self._skipped.total() <= MAX_LOGGED_SKIPS:
            logger.warning("%s; skipped", place)
        elif self._skipped.total() == MAX_LOGGED_SKIPS + 1:
            logger.warning("further skipped lines are only counted")

    def finish(self, paths: tuple[str, ...], starts: tuple[int, ...]) -> Dataset:
        counts = Counts(
            read=self._tally["read"],
            skipped=dict(self._skipped.most_common()),
            truncated=self._tally["truncated"],
            overlong=self._tally["overlong"],
            untrained=self._tally["untrained"],
            endless=self._tally["endless"],
            split=self._tally["split"],
            formats=tuple(self._formats),
            unused=dict(sorted(self._unused.items())),
        )
        if not len(self._builder):
            raise errors.DataError(
                _nothing_left(", ".join(paths), counts, self._renderer.max_length)
            )
        return Dataset(
            paths=paths,
            file_starts=starts,
            samples=self._builder.build(),
            counts=counts,
            digest=self._digest.hexdigest(),
        )


def _nothing_left(paths: str, counts: Counts, max_length: int) -> str:
    if not counts.read:
        return f"{paths}: no samples"
    found = []
    if counts.skipped:
        reasons = ", ".join(f"{n} {reason}" for reason, n in counts.skipped.items())
        found.append(f"{sum(counts.skipped.values())} skipped ({reasons})")
    if counts.overlong:
        found.append(f"{counts.overlong} longer than max_length={max_length}")
    if counts.untrained:
        found.append(untrained_text(counts, max_length) + "; raise max_length")
    return f"{paths}: no samples left of {counts.read} read: {'; '.join(found)}"


def untrained_text(counts: Counts, max_length: int) -> str:
    """Says how many samples lost every token with loss to truncation."""
    return (
        f"{counts.untrained} of {counts.read} samples have no trained token after "
        f"truncation to {max_length}"
    )
