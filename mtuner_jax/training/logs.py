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
_BASIC = logging.StreamHandler


class _ConsoleHandler(logging.Handler):
    """Writes above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            tqdm.tqdm.write(self.format(record), file=sys.stderr)


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith(_OURS)


@contextlib.contextmanager
def to_console(*, is_primary: bool = True) -> Generator[None]:
    """Shows log lines on stderr; warnings only, on processes other than the first."""
    handler = _ConsoleHandler(logging.INFO if is_primary else logging.WARNING)
    handler.setFormatter(_Formatter())
    with _without_basic_handlers(), _added(handler):
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


class _Formatter(logging.Formatter):
    """The plain text, with the level before it from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {text}"
        return text


@contextlib.contextmanager
def _without_basic_handlers() -> Generator[None]:
    """Takes off what `logging.basicConfig` put on: importing Orbax calls it."""
    root = logging.getLogger()
    basic = [handler for handler in root.handlers if type(handler) is _BASIC]
    for handler in basic:
        root.removeHandler(handler)
    try:
        yield
    finally:
        for handler in basic:
            root.addHandler(handler)


@contextlib.contextmanager
def _added(handler: logging.Handler) -> Generator[None]:
    handler.addFilter(_is_wanted)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
