"""Draws runs: the losses of one or more, and the plan of each.

python scripts/plot.py runs/default
python scripts/plot.py runs/default --microbatch 0
python scripts/plot.py runs/a runs/b --output compare.png

Losses come from metrics.jsonl. A run that planned its steps has plan.json and
timeline.json; from these plan.png is drawn into its folder.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import timelines
from mtuner_jax.plots import loss_plots, plan_pictures, plan_plots
from mtuner_jax.settings import programs
from mtuner_jax.training import metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """What is drawn.

    Attributes:
      runs: Folders of runs.
      output: The losses' PNG; empty for the folder of the one run, or losses.png.
      microbatch: Of the plan, draw this one only, from 0 on; -1 draws all.
    """

    runs: tuple[str, ...] = ()
    output: str = ""
    microbatch: int = -1


def main(argv: list[str]) -> int:
    """Draws; returns the exit code."""
    return programs.run(argv, PlotConfig, plot, description=__doc__, positional="runs")


def plot(config: PlotConfig) -> None:
    """Writes the PNGs.

    Raises:
      ConfigError: No runs, or one without losses.
    """
    runs = [pathlib.Path(run) for run in config.runs]
    if not runs:
        raise ConfigError("runs is empty: give the folder of a run, or of several")
    losses = {}
    for run in runs:
        losses[str(run)] = metrics.read(run / "metrics.jsonl")
        if not any("loss" in record for record in losses[str(run)]):
            raise ConfigError(f"{run / 'metrics.jsonl'} holds no losses")
    default = runs[0] / "training_loss.png" if len(runs) == 1 else "losses.png"
    output = pathlib.Path(config.output or default)
    loss_plots.write(output, losses)
    print(f"wrote {output}")
    for run in runs:
        draw_plan(run, None if config.microbatch == -1 else config.microbatch)


def draw_plan(run: pathlib.Path, microbatch: int | None) -> None:
    """Draws a run's plan, or says why there is nothing to draw.

    Raises:
      ConfigError: Files that are not what a run writes, or no such microbatch.
    """
    missing = [
        name for name in ("plan.json", "timeline.json") if not (run / name).is_file()
    ]
    if missing:
        print(f"no picture of a plan: {run} has no {' and no '.join(missing)}")
        return
    plan = plans.read(run / "plan.json")
    played = timelines.read(run / "timeline.json")
    plan_plots.write(
        run / "plan.png",
        plan_pictures.picture(plan, played, microbatch=microbatch),
        title=plan_pictures.headline(str(run), plan, played),
    )
    print(f"wrote {run / 'plan.png'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
