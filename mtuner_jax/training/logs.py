"""Where log lines go: the console, without tearing a progress bar, and train.log."""

import contextlib
import logging
import pathlib
import sys
from collections.abc import Generator

import tqdm

# Other libraries speak up from WARNING on, we from INFO on.
_OURS = ("mtuner_jax", "models", "scripts", "__main__")
# `logger.info(text, extra=FILE_ONLY)`: for train.log, the bar shows it already.
FILE_ONLY = {"file_only": True}


class _ConsoleHandler(logging.Handler):
    """Writes above a progress bar if there is one; names the level from WARNING on."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            level = f"{record.levelname.lower()}: " * (
                record.levelno >= logging.WARNING
            )
            tqdm.tqdm.write(level + self.format(record), file=sys.stderr)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith(_OURS)


@contextlib.contextmanager
def to_console(*, is_primary: bool = True) -> Generator[None]:
    """Shows log lines on stderr; warnings only, on processes other than the first."""
    handler = _ConsoleHandler(logging.INFO if is_primary else logging.WARNING)
    # Importing Orbax calls `logging.basicConfig`, which put one of these on.
    with _added(handler, instead_of=logging.StreamHandler):
        yield


@contextlib.contextmanager
def to_file(path: pathlib.Path, *, is_primary: bool = True) -> Generator[None]:
    """Appends log lines and Python's warnings to a file, on the first process only."""
    if not is_primary:
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.captureWarnings(True)
    try:
        with contextlib.closing(handler), _added(handler):
            yield
    finally:
        logging.captureWarnings(False)


@contextlib.contextmanager
def _added(
    handler: logging.Handler, *, instead_of: type[logging.Handler] | None = None
) -> Generator[None]:
    """The root logger with a handler more, and without those of one type."""
    handler.addFilter(_is_wanted)
    root = logging.getLogger()
    level, taken = root.level, [h for h in root.handlers if type(h) is instead_of]
    root.handlers = [h for h in root.handlers if h not in taken] + [handler]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers = [h for h in root.handlers if h is not handler] + taken
        root.setLevel(level)
