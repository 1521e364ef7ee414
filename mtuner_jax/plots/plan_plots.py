"""A plan as a PNG: memory over a step, each layer's local ratio, the streams.

What is shown is computed by `plan_pictures`. Colours are Okabe and Ito's, shades darken
with the ratio: both are told apart by colour-blind eyes.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtuner_jax.planning.costs import timelines
from mtuner_jax.plots import plan_pictures
from mtuner_jax.plots.plan_pictures import Picture

_GIB = 2**30
MOST_BARS = 400
_MOMENTS = 60
_INK, _SPINE = "#1d2329", "#9aa3ad"
# From the bottom of the stack: what is always there, copies, activations.
_KINDS = {
    "weights": ("weights at rest", "#4d5a68"),
    "tables": ("vocabulary tables", "#8b98a6"),
    "adapters": ("adapters, moments,\ngradients", "#c3cad2"),
    "batch": ("batch", "#5b3a29"),
    "boundary": ("between main part\nand tail", "#009e73"),
    "kept_across_steps": ("copies kept to the\nnext forward pass", "#e69f00"),
    "kept_for_backward": ("copies kept to the\nbackward pass", "#f0e442"),
    "layer_inputs": ("layer inputs", "#56b4e9"),
    "saved": ("saved tensors", "#0072b2"),
    "transient": ("of the layer at work", "#cc79a7"),
}
_BARS = {
    "forward": ("forward", "#56b4e9"),
    "backward": ("backward", "#0072b2"),
    "copies": ("copies of gathered\nweights", "#cc79a7"),
    "other": ("tables, loss, update", "#8b98a6"),
    "waits": ("nothing computes", "#d55e00"),
    "weights": ("gathers of weights", "#e69f00"),
    "moved": ("other collectives", "#f0e442"),
    "layer_input": ("inputs to, from the host", "#009e73"),
}
_LANES = {
    timelines.COMPUTE: "computation",
    timelines.LINK: "links",
    timelines.HOST: "host",
}


def write(
    path: pathlib.Path,
    shown: Picture,
    *,
    title: str,
    limits: Mapping[str, int] | None = None,
) -> None:
    """Draws a picture as a PNG of 1200 x 1000 pixels.

    Args:
      path: The PNG to write.
      shown: What `plan_pictures.picture` returned.
      title: Above it.
      limits: Bytes per device to mark by a line each, such as the budget.
    """
    # Slow to import, and only needed here.
    from matplotlib import figure

    drawing = figure.Figure(figsize=(8, 20 / 3), dpi=150, layout="constrained")
    drawing.suptitle(title, fontsize=10, x=0.01, ha="left")
    heights = (3.4, 2.6, 0.6 * len(shown.bars) + 0.2)
    memory, ratios, lanes = drawing.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    scale, unit = (1.0, "s") if shown.window_s[1] >= 2.0 else (1e3, "ms")
    _draw_memory(memory, shown, scale, limits or {})
    _draw_ratios(ratios, shown, scale)
    _draw_lanes(lanes, shown, scale)
    for axes in (memory, ratios, lanes):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_SPINE)
    lanes.set_xlim(scale * shown.window_s[0], scale * shown.window_s[1])
    lanes.set_xlabel(f"time from the start of the step ({unit})", fontsize=9)
    drawing.savefig(path, format="png")


def _draw_memory(
    axes: Any, shown: Picture, scale: float, limits: Mapping[str, int]
) -> None:
    times = scale * np.append(shown.time_s, max(shown.window_s[1], shown.time_s[-1]))
    bottom = np.zeros(len(times))
    handles = []
    for kind, values in _stacked(shown.num_bytes).items():
        label, color = _KINDS[kind]
        top = bottom + np.append(values, values[-1]) / _GIB
        style = {"step": "post", "color": color, "linewidth": 0}
        label = f"{label} {values.max() / _GIB:.2f}"
        handles.append(axes.fill_between(times, bottom, top, label=label, **style))
        bottom = top
    for (name, limit), style in zip(limits.items(), ("-", "--", ":"), strict=False):
        label = f"{name} {limit / _GIB:.2f}"
        handles.append(axes.axhline(limit / _GIB, color=_INK, ls=style, label=label))
    axes.set_ylim(0.0, 1.06 * max([bottom.max(), *(v / _GIB for v in limits.values())]))
    axes.set_ylabel("memory (GiB per device)", fontsize=9)
    _legend(axes, handles[::-1], title="most held (GiB)")


def _stacked(num_bytes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """From the bottom up; what is nowhere a 300th of the whole is left out."""
    most = np.sum(list(num_bytes.values()), axis=0).max()
    kinds = sorted(num_bytes, key=list(_KINDS).index)
    return {k: num_bytes[k] for k in kinds if 300 * num_bytes[k].max() >= most}


def _draw_ratios(axes: Any, shown: Picture, scale: float) -> None:
    import matplotlib
    from matplotlib import colors, patches

    levels = len(shown.ratios)
    shades = matplotlib.colormaps["YlGnBu"](np.linspace(0.1, 0.95, levels))
    axes.pcolormesh(
        scale * shown.edges_s,
        np.arange(shown.held_axes.shape[0] + 1),
        shown.held_axes,
        cmap=colors.ListedColormap(shades),
        vmin=-0.5,
        vmax=levels - 0.5,
    )
    axes.set_ylabel("layer", fontsize=9)
    distinct = dict(zip(shown.ratios, shades, strict=True))
    handles = [
        patches.Patch(facecolor=shade, edgecolor=_SPINE, label=_fraction(ratio))
        for ratio, shade in sorted(distinct.items())
    ]
    _legend(axes, handles[::-1], title="of its weights held")


def _draw_lanes(axes: Any, shown: Picture, scale: float) -> None:
    from matplotlib import patches

    first_s, last_s = shown.window_s
    lanes = shown.bars.values()
    spans = [span for kinds in lanes for spans in kinds.values() for span in spans]
    many = sum(first_s <= start_s < last_s for start_s, _ in spans) > MOST_BARS
    draw, note = (_draw_shares, "\n(share of time)") if many else (_draw_spans, "")
    for row in range(len(lanes)):
        draw(axes, shown, scale, row)
    names = [f"{_LANES[stream]}{note}" for stream in shown.bars]
    drawn = {kind for kinds in lanes for kind in kinds}
    axes.set_yticks([-row for row in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.5, 0.5)
    handles = [
        patches.Patch(color=color, label=label)
        for kind, (label, color) in _BARS.items()
        if kind in drawn
    ]
    _legend(axes, handles)


def _draw_spans(axes: Any, shown: Picture, scale: float, row: int) -> None:
    for kind, spans in list(shown.bars.values())[row].items():
        axes.broken_barh(
            [(scale * start_s, scale * seconds) for start_s, seconds in spans],
            (-row - 0.4, 0.8),
            facecolor=_BARS[kind][1],
            linewidth=0.0,
            snap=False,  # else most spans below a pixel vanish
        )


def _draw_shares(axes: Any, shown: Picture, scale: float, row: int) -> None:
    """Spans too short to be seen: which share of each moment they take."""
    first_s, last_s = shown.window_s
    edges_s = np.linspace(first_s, last_s, _MOMENTS + 1)
    bottom = np.full(_MOMENTS, -row - 0.4)
    kinds = list(shown.bars.values())[row]
    for kind in sorted(kinds, key=list(_BARS).index):
        top = bottom + 0.8 * plan_pictures.shares(kinds[kind], edges_s)
        axes.stairs(
            top, scale * edges_s, baseline=bottom, fill=True, color=_BARS[kind][1]
        )
        bottom = top


def _fraction(ratio: float) -> str:
    return "all" if ratio == 1 else f"1/{round(1 / ratio)}"


def _legend(axes: Any, handles: Sequence[Any], *, title: str | None = None) -> None:
    axes.legend(
        handles=handles,
        title=title,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        fontsize=7.5,
        title_fontsize=7.5,
        handlelength=1.2,
        alignment="left",
    )
