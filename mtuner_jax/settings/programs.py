"""What all programs do alike: settings to a config, a user's errors to exit codes.

def main(argv: list[str]) -> int:
    return programs.run(argv, PlotConfig, plot, description=__doc__)
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from mtuner_jax.configs import UserError
from mtuner_jax.settings import cli

T = TypeVar("T")
BAD_INPUT = UserError.exit_code


def run(
    argv: Sequence[str],
    config_type: type[T],
    do: Callable[[T], int | None],
    *,
    description: str | None = "",
    positional: str = "",
) -> int:
    """Parses the command line into a config and does what it asks for.

    Args:
      argv: Arguments without the program's name.
      config_type: The dataclass of the program's settings.
      do: The program; it returns its exit code, or None for 0.
      description: What the program does, for `--help`.
      positional: The setting that words before the first flag are for.

    Returns:
      The exit code.
    """

    options = {"description": description or "", "positional": positional}
    return guarded(lambda: do(cli.parse(argv, config_type, **options)))


def guarded(do: Callable[[], int | None]) -> int:
    """Calls `do`; returns its exit code, or prints a UserError and returns its own.

    What takes long to import, or speaks up when imported, is imported in `do`.
    """
    # Of what transformers lacks and we do not use; it reads this when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        return do() or 0
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
