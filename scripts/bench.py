"""Measures the training step on random weights and tokens: tokens/s and memory.

python scripts/bench.py --model llama2-7b --random_init --max_length 4096 --microbatch 4
python scripts/bench.py --random_init --cases cases.txt --output results.jsonl

A file of cases has one configuration a line: flags that are added to the command's.
All run in one process, one after the other, so that only the first pays for the start;
what a case used is freed before the next.
"""

import json
import logging
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import starting
from scripts.benchmarks import step_benches


def main(argv: list[str]) -> int:
    """Runs the configurations and prints one JSON object for each."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        cases = read_cases(argv)
        first = step_benches.parse(cases[0])
        devices = starting.start(first.mesh, first.platform)
        print(devices.lines[0])
        for case in cases:
            config = step_benches.parse(case)
            result = step_benches.measure(config, devices)
            line = json.dumps({"arguments": " ".join(case), **result}, sort_keys=True)
            print(line, flush=True)
            if config.output:
                with pathlib.Path(config.output).open("a") as file:
                    file.write(line + "\n")
            step_benches.free()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_cases(argv: list[str]) -> list[list[str]]:
    """The command lines to run: the one given, or one for each case of its file."""
    path = step_benches.parse(argv, description=__doc__ or "").cases
    if not path:
        return [argv]
    return [
        [*argv, *shlex.split(line)]
        for line in pathlib.Path(path).read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
