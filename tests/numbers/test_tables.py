from mtuner_jax.numbers import tables


def test_a_colon_sets_a_column_to_the_right_and_bars_are_escaped():
    text = tables.markdown("model | tokens:", [("a|b", 8), ("c", 16)])
    assert text.splitlines() == [
        "| model | tokens |",
        "|---|--:|",
        "| a\\|b | 8 |",
        "| c | 16 |",
    ]


def test_a_table_without_rows_is_its_head():
    assert tables.markdown("a", []) == "| a |\n|---|\n"
