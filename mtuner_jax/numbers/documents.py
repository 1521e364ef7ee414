"""What rows hold as far as attention is concerned; for data, ops and plans."""

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowDocuments:
    """Documents that share rows.

    Attributes:
      most: Documents in the row that has most, the padding at a row's end counted as
        one; 0 where nobody knows, which only attention without such a bound takes.
      attended: Share of a row's T x T scores within documents, on the mean: the sum
        of their squared lengths over T squared; 1 for rows of one document.
    """

    most: int = 0
    attended: float = 1.0


UNKNOWN = RowDocuments()


def count(rows: Iterable[Sequence[int]], *, max_length: int) -> RowDocuments:
    """Counts what rows hold.

    Args:
      rows: Tokens of each document, row by row; at least one row.
      max_length: Tokens of a row (T), as many as a row's documents have at most.
    """
    most, shares = 0, []
    for lengths in rows:
        padding = max_length - sum(lengths)
        most = max(most, len(lengths) + (padding > 0))
        squares = sum(length * length for length in lengths) + padding * padding
        shares.append(squares / max_length**2)
    return RowDocuments(most=most, attended=sum(shares) / len(shares))
