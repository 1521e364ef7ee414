"""Draws the loss curves of one or more runs from their metrics.jsonl.

python scripts/plot.py runs/default
python scripts/plot.py runs/a runs/b --output compare.png
"""

import argparse
import pathlib
import sys

from mtuner_jax.training import loss_plots, metrics


def main(argv: list[str]) -> int:
    """Writes the PNG; one run without --output gets it into its folder."""
    parser = argparse.ArgumentParser(prog="plot.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN")
    parser.add_argument("--output", type=pathlib.Path, help="the PNG to write")
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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
