"""Draws runs: the losses of one or more, and the plan of each.

python scripts/plot.py runs/default
python scripts/plot.py runs/default --microbatch 0
python scripts/plot.py runs/a runs/b --output compare.png

Losses come from metrics.jsonl. A run that planned its steps has plan.json and
timeline.json; from these plan.png is drawn into its folder.
"""

import argparse
import pathlib
import sys

from mtuner_jax.configs import ConfigError
from mtuner_jax.planning import plans
from mtuner_jax.planning.costs import timelines
from mtuner_jax.plots import loss_plots, plan_pictures, plan_plots
from mtuner_jax.training import metrics


def main(argv: list[str]) -> int:
    """Writes the PNGs; one run without --output gets them into its folder."""
    parser = argparse.ArgumentParser(
        prog="plot.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--output", type=pathlib.Path, help="the losses' PNG")
    parser.add_argument(
        "--microbatch", type=int, help="of the plan, draw this one only, from 0 on"
    )
    arguments = parser.parse_args(argv)
    runs = {}
    for run in arguments.runs:
        records = metrics.read(run / "metrics.jsonl")
        if not any("loss" in record for record in records):
            print(f"error: {run / 'metrics.jsonl'} holds no losses", file=sys.stderr)
            return 1
        runs[str(run)] = records
    output = arguments.output
    if output is None:
        single = len(arguments.runs) == 1
        output = arguments.runs[0] / "training_loss.png" if single else "losses.png"
    loss_plots.write(pathlib.Path(output), runs)
    print(f"wrote {output}")
    try:
        for run in arguments.runs:
            draw_plan(run, microbatch=arguments.microbatch)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def draw_plan(run: pathlib.Path, *, microbatch: int | None) -> None:
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
