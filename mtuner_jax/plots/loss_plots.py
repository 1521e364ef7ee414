"""Loss curves as a PNG, from the records of metrics.jsonl."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

Records = Sequence[dict[str, Any]]
_COLORS = ("#2f6fb3", "#d1662b", "#3f8f5b", "#8a5aa8", "#b23b56", "#5c6670")


def write(path: pathlib.Path, runs: Mapping[str, Records]) -> None:
    """Draws training loss (raw and smoothed) and evaluation loss against steps.

    Args:
      path: The PNG to write.
      runs: Name -> records, a colour for each run.
    """
    # Slow to import, and only needed once at the end of a run.
    from matplotlib import figure, ticker

    drawing = figure.Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = drawing.add_subplot()
    for index, (name, records) in enumerate(runs.items()):
        label = f"{name}: " if len(runs) > 1 else ""
        _draw(axes, records, color=_COLORS[index % len(_COLORS)], label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(
        ", ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs", loc="left"
    )
    axes.grid(color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa3ad")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    drawing.savefig(path, format="png")


def smooth(losses: Sequence[float], *, half_life: float) -> list[float]:
    """Exponential mean without the pull of a start value.

    Args:
      losses: In order; what is not finite is passed over.
      half_life: Steps after which a value counts half.
    """
    decay = 0.5 ** (1.0 / half_life)
    total = weight = 0.0
    means = []
    for loss in losses:
        if math.isfinite(loss):
            total = decay * total + loss
            weight = decay * weight + 1.0
        means.append(total / weight if weight else math.nan)
    return means


def _draw(axes: Any, records: Records, *, color: str, label: str) -> None:
    steps, losses = _series(records, "loss")
    many = len(steps) >= 10
    if steps:
        raw_style = {"alpha": 0.3, "linewidth": 1.0} if many else {"linewidth": 2.0}
        raw_label = None if many else f"{label}train"
        axes.plot(steps, losses, color=color, label=raw_label, **raw_style)
    if many:
        means = smooth(losses, half_life=max(1.5, len(steps) / 40))
        axes.plot(steps, means, color=color, linewidth=2.0, label=f"{label}train")
    eval_steps, eval_losses = _series(records, "eval_loss")
    if eval_steps:
        marker = {"marker": "o", "markersize": 5, "markerfacecolor": "white"}
        line = {"color": color, "linestyle": "--", "label": f"{label}eval"}
        axes.plot(eval_steps, eval_losses, **line, **marker)


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    found = [record for record in records if name in record]
    losses = [math.nan if r[name] is None else r[name] for r in found]
    return [record["step"] for record in found], losses
