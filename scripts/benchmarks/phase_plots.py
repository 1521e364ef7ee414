"""Maps of where planning pays: gain and decisive mechanism, from a sweep's records.

A panel shows memory budgets (up) against link speeds (right) for one model, length and
batch. Colours are told apart by colour-blind eyes too, and each cell says its value.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Records = Sequence[Mapping[str, Any]]
NOTHING_FITS = "nothing fits"
ONLY_PLANNED = "only a plan fits"
PLANNED = "planned"
NOTHING_WON = "nothing to be won"
NONE_ALONE = "several, each replaceable"
_PANEL = ("model", "max_length", "global_batch_size")
_LIMIT = 3.0
_GREY, _MIXED, _PALE, _TEXT = "#9aa3ad", "#cfd5db", "#f1f3f5", "#1d2329"
# Okabe and Ito's, in the order in which a sweep names mechanisms.
_COLORS = "#56b4e9 #e69f00 #009e73 #cc79a7 #f0e442 #d55e00 #0072b2 #8c6d46".split()


def write_factors(
    path: pathlib.Path,
    records: Records,
    *,
    factor: Callable[[Mapping[str, Any]], float | None],
    title: str,
    label: str,
) -> None:
    """Draws how many times longer something takes than the planned step.

    Args:
      path: The PNG to write.
      records: Of a sweep, one a cell.
      factor: Of a record; None where that something does not fit.
      title: Above the panels.
      label: What the colours mean.
    """
    from matplotlib import cm, colors

    norm = colors.LogNorm(1.0, _LIMIT)
    shades = cm.ScalarMappable(norm, "YlGnBu")

    def cell(record: Mapping[str, Any]) -> tuple[Any, str]:
        if record["status"] == NOTHING_FITS:
            return _GREY, ""
        value = factor(record)
        if value is None:
            return _COLORS[5], "fits"
        return shades.cmap(norm(min(value, _LIMIT))), f"{value:.2f}"

    drawing, axes = _panels(records, title=title)
    for panel, rows in axes:
        _draw(panel, rows, cell)
    bar = drawing.colorbar(
        shades, ax=[panel for panel, _ in axes], shrink=0.6, extend="max"
    )
    bar.set_label(label, fontsize=9)
    ticks = [1.0, 1.25, 1.5, 2.0, 2.5, _LIMIT]
    bar.set_ticks(ticks, labels=[f"{tick:g}x" for tick in ticks], minor=False)
    bar.ax.minorticks_off()
    _legend(drawing, {NOTHING_FITS: _GREY, ONLY_PLANNED: _COLORS[5]})
    drawing.savefig(path, format="png")


def write_winners(
    path: pathlib.Path,
    records: Records,
    *,
    names: Mapping[str, str],
    title: str,
) -> None:
    """Draws without which mechanism the planned step would lose most, and how much.

    Args:
      path: The PNG to write.
      records: Of a sweep, one a cell.
      names: Mechanism -> what it is called in the legend.
      title: Above the panels.
    """
    marks = dict(zip(names, _COLORS, strict=False))
    assert len(marks) == len(names), "a mechanism without a colour"

    def cell(record: Mapping[str, Any]) -> tuple[Any, str]:
        if record["status"] == NOTHING_FITS:
            return _GREY, ""
        winner = record["winner"]
        if winner in (NOTHING_WON, NONE_ALONE):
            return (_PALE if winner == NOTHING_WON else _MIXED), ""
        lost_s = record["without_s"][winner]
        text = "fits" if lost_s is None else f"{lost_s / record['step_s']:.2f}"
        return marks[winner], text

    drawing, axes = _panels(records, title=title)
    for panel, rows in axes:
        _draw(panel, rows, cell)
    there = {record.get("winner", NOTHING_FITS) for record in records}
    shown = {names[name]: color for name, color in marks.items() if name in there}
    others = {NONE_ALONE: _MIXED, NOTHING_WON: _PALE, NOTHING_FITS: _GREY}
    _legend(drawing, shown | others)
    drawing.savefig(path, format="png")


def by_panel(records: Records) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """Records of each panel, panels in the order in which records name them."""
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        panels.setdefault(tuple(record[name] for name in _PANEL), []).append(record)
    return panels


def _panels(
    records: Records, *, title: str
) -> tuple[Any, list[tuple[Any, list[Mapping[str, Any]]]]]:
    """(figure, [(axes, records)]): a row for each model."""
    from matplotlib import figure

    panels = by_panel(records)
    models = list(dict.fromkeys(key[0] for key in panels))
    kinds = list(dict.fromkeys(key[1:] for key in panels))
    size = (1.4 + 2.7 * max(len(kinds), 3), 1.8 + 2.3 * len(models))
    drawing = figure.Figure(figsize=size, dpi=110, layout="constrained")
    drawing.suptitle(title, fontsize=11)
    grid = drawing.subplots(len(models), len(kinds), squeeze=False)
    axes = []
    for row, model in enumerate(models):
        for column, kind in enumerate(kinds):
            panel = grid[row][column]
            rows = panels.get((model, *kind), [])
            panel.set_title(f"{model}\n{kind[0]} tokens x {kind[1]} rows", fontsize=9)
            if row == len(models) - 1:
                panel.set_xlabel("slowest link (GB/s received)", fontsize=8)
            if column == 0:
                panel.set_ylabel("memory budget\n(GiB per device)", fontsize=8)
            axes.append((panel, rows))
    return drawing, axes


def _draw(
    panel: Any, rows: Records, cell: Callable[[Mapping[str, Any]], tuple[Any, str]]
) -> None:
    links = sorted({record["link_gb_s"] for record in rows})
    budgets = sorted({record["budget_gib"] for record in rows})
    for record in rows:
        x, y = links.index(record["link_gb_s"]), budgets.index(record["budget_gib"])
        color, text = cell(record)
        panel.bar(x, 1, 1, y - 0.5, color=color, edgecolor="white", linewidth=1.0)
        panel.text(x, y, text, ha="center", va="center", fontsize=7, color=_ink(color))
    panel.set_xticks(range(len(links)), [f"{link:g}" for link in links], fontsize=8)
    panel.set_yticks(range(len(budgets)), [f"{b:g}" for b in budgets], fontsize=8)
    panel.set_xlim(-0.5, max(len(links), 1) - 0.5)
    panel.set_ylim(-0.5, max(len(budgets), 1) - 0.5)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _ink(color: Any) -> str:
    """Black on light colours, white on dark ones."""
    from matplotlib import colors

    weights = (0.2126, 0.7152, 0.0722)
    light = sum(
        weight * channel
        for weight, channel in zip(weights, colors.to_rgb(color), strict=True)
    )
    return _TEXT if math.sqrt(light) > 0.6 else "white"


def _legend(drawing: Any, marks: Mapping[str, str]) -> None:
    from matplotlib import patches

    handles = [patches.Patch(color=color, label=name) for name, color in marks.items()]
    drawing.legend(
        handles=handles,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
