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
        if not (getattr(record, "file_only", False) or _is_told_by_us(record)):
            level = f"{record.levelname.lower()}: " * (
                record.levelno >= logging.WARNING
            )
            tqdm.tqdm.write(level + self.format(record), file=sys.stderr)


def _is_told_by_us(record: logging.LogRecord) -> bool:
    """Whether it is the traceback of a failed save, which ends the run with a line."""
    return record.levelno >= logging.ERROR and "orbax" in record.pathname


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.startswith(_OURS)


@contextlib.contextmanager
def to_console(*, is_primary: bool = True) -> Generator[None]:
    """Shows log lines on stderr; warnings only, on processes other than the first."""
    handler = _ConsoleHandler(logging.INFO if is_primary else logging.WARNING)
    # Importing Orbax calls `logging.basicConfig`, which put one of these on.
    with _added(handler, instead_of=logging.StreamHandler):
        yield


class RunLog(logging.Handler):
    """Keeps records until it is known that they may be written, and where."""

    def __init__(self):
        super().__init__()
        self._held: list[logging.LogRecord] = []
        self._file: _LogFile | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Holds a record back, or writes it."""
        if self._file is not None:
            self._file.emit(record)
            return
        record.msg, record.args = record.getMessage(), None
        self._held.append(record)

    def open(self, path: pathlib.Path) -> None:
        """Appends what was held back to a file, and from now on everything."""
        with self.lock or contextlib.nullcontext():
            self._file = _LogFile(path, encoding="utf-8")
            self._file.setFormatter(
                logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
            )
            for record in self._held:
                self._file.emit(record)
            self._held = []

    def close(self) -> None:
        """Closes the file; what was held back is dropped."""
        if self._file is not None:
            self._file.close()
        super().close()


class _LogFile(logging.FileHandler):
    """Says once that it cannot write, instead of a traceback for each line."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            path = self.baseFilename
            sys.stderr.write(f"warning: {path} is not written: {error.strerror}\n")

    def close(self) -> None:
        # A full disk was told; what the stream still holds cannot be written.
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def to_file(*, is_primary: bool = True) -> Generator[RunLog]:
    """Takes log lines and Python's warnings for a file, on the first process only.

    Nothing is written before `RunLog.open`.
    """
    log = RunLog()
    if not is_primary:
        yield log
        return
    logging.captureWarnings(True)
    try:
        with contextlib.closing(log), _added(log):
            yield log
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
