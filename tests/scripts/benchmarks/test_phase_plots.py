import pytest

from scripts.benchmarks import phase_plots

NAMES = {"held": "more held", "tail": "tail in parts"}


def make(budget_gib, link_gb_s, **fields):
    return {
        "model": "small",
        "max_length": 64,
        "global_batch_size": 8,
        "budget_gib": budget_gib,
        "link_gb_s": link_gb_s,
        "status": phase_plots.PLANNED,
        "step_s": 1.0,
        **fields,
    }


RECORDS = [
    make(1.0, 7.0, status=phase_plots.NOTHING_FITS),
    make(
        1.0,
        14.0,
        status=phase_plots.ONLY_PLANNED,
        gain=None,
        winner="tail",
        without_s={"tail": None},
    ),
    make(2.0, 7.0, gain=5.0, winner="held", without_s={"held": 5.5, "tail": 1.1}),
    make(2.0, 14.0, gain=1.0, winner=phase_plots.NOTHING_WON, without_s={}),
    make(3.0, 14.0, gain=1.1, winner=phase_plots.NONE_ALONE, without_s={"tail": 1.01}),
]


def test_records_of_a_panel_keep_their_order():
    other = make(1.0, 7.0) | {"model": "large"}
    panels = phase_plots.by_panel([RECORDS[0], other, RECORDS[1]])
    assert panels == {
        ("small", 64, 8): RECORDS[:2],
        ("large", 64, 8): [other],
    }


def test_all_kinds_of_cells_are_drawn(tmp_path):
    phase_plots.write_factors(
        tmp_path / "gain.png",
        RECORDS,
        factor=lambda record: record["gain"],
        title="gain",
        label="times",
    )
    phase_plots.write_winners(
        tmp_path / "winner.png", RECORDS, names=NAMES, title="winner"
    )
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_cell_says_what_is_lost(tmp_path, monkeypatch):
    drawn = {}

    def draw(panel, rows, cell):
        del panel
        drawn.update({(r["budget_gib"], r["link_gb_s"]): cell(r) for r in rows})

    monkeypatch.setattr(phase_plots, "_draw", draw)
    phase_plots.write_winners(
        tmp_path / "winner.png", RECORDS, names=NAMES, title="winner"
    )
    texts = {place: text for place, (_, text) in drawn.items()}
    assert texts == {
        (1.0, 7.0): "",
        (1.0, 14.0): "fits",
        (2.0, 7.0): "5.50",
        (2.0, 14.0): "",
        (3.0, 14.0): "",
    }
    assert len({color for color, _ in drawn.values()}) == 5


def test_an_unknown_mechanism_is_not_drawn_as_something_else(tmp_path):
    record = make(2.0, 7.0, gain=2.0, winner="magic", without_s={"magic": 2.0})
    with pytest.raises(KeyError, match="magic"):
        phase_plots.write_winners(
            tmp_path / "winner.png", [record], names=NAMES, title=""
        )
