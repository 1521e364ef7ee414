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
from mtuner_jax.settings import programs
from scripts.benchmarks import bench_configs
from scripts.benchmarks.bench_configs import BenchConfig


def main(argv: list[str]) -> int:
    """Runs the configurations and prints one JSON object for each."""

    def do() -> None:
        cases = read_cases(argv)
        measure([(" ".join(case), bench_configs.parse(case)) for case in cases])

    return programs.guarded(do)


def measure(cases: list[tuple[str, BenchConfig]]) -> None:
    """Measures each (flags, config); JAX is imported once all settings are read."""
    from mtuner_jax.checkpoints import folders
    from mtuner_jax.devices import starting
    from scripts.benchmarks import step_benches

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, first = cases[0]
    folders.check_file(first.output, name="output")
    devices = starting.start(first.mesh, first.platform)
    print(devices.lines[0])
    for arguments, config in cases:
        result = step_benches.measure(config, devices)
        line = json.dumps({"arguments": arguments, **result}, sort_keys=True)
        print(line, flush=True)
        if config.output:
            with pathlib.Path(config.output).open("a") as file:
                file.write(line + "\n")
        step_benches.free()


def read_cases(argv: list[str]) -> list[list[str]]:
    """The command lines to run: the one given, or one for each case of its file."""
    path = bench_configs.parse(argv, description=__doc__ or "").cases
    if not path:
        return [argv]
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cases={path!r}: {error.strerror}") from error
    cases = [
        [*argv, *shlex.split(line)]
        for line in lines
        if line.strip() and not line.startswith("#")
    ]
    if not cases:
        raise ConfigError(f"cases={path!r} holds no case: a line of flags each")
    return cases


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
