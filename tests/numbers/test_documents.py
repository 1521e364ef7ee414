import pytest

from mtuner_jax.numbers import documents


def test_rows_are_counted_with_their_padding():
    found = documents.count([[4, 4], [2, 1], [3]], max_length=8)
    assert found.most == 3  # the second row: two documents and padding
    shares = [(16 + 16) / 64, (4 + 1 + 25) / 64, (9 + 25) / 64]
    assert found.attended == pytest.approx(sum(shares) / 3)


def test_one_document_that_fills_a_row_attends_to_all_of_it():
    found = documents.count([[8], [8]], max_length=8)
    assert found == documents.RowDocuments(most=1, attended=1.0)
