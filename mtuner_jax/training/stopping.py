"""Signals that end a run: SIGTERM, SIGUSR1 and Ctrl-C.

A thread hears of them while the main thread is inside a compiler or waits for devices,
where Python's own handlers would come too late. Before a run has anything to save, the
process ends then and there; later the loop finishes its step, saves and ends. A second
signal ends the process at once.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Exit code of a run that was stopped and goes on when it is started again.
STOPPED = 85
# GNU timeout and some schedulers send a signal to the process and to its group.
_SAME_SIGNAL_S = 0.5


class Stop:
    """Whether the run was asked to stop.

    Attributes:
      asked: The signal's name; empty while there was none.
    """

    def __init__(self):
        self.asked = ""
        self._asked_at = 0.0
        self._deferred = False
        self._lock = threading.Lock()

    def defer(self) -> None:
        """From now on there is something to save, and who runs looks at `asked`."""
        with self._lock:
            self._deferred = True

    def hear(self, number: int) -> None:
        """Takes a signal; ends the process if that is due."""
        name, now = signal.Signals(number).name, time.monotonic()
        with self._lock:
            if not self.asked and not self._deferred:
                _logger.warning(
                    "%s: the run ends before its first step is done, with nothing new "
                    "to save",
                    name,
                )
                os._exit(STOPPED)
            if self.asked and now - self._asked_at > _SAME_SIGNAL_S:
                _logger.warning("%s again: the run ends at once", name)
                os._exit(128 + number)
            if self.asked:
                return
            self.asked, self._asked_at = name, now
        _logger.warning(
            "%s: the run finishes its step, saves and ends; a second signal ends it "
            "at once",
            name,
        )


@contextlib.contextmanager
def watched() -> Generator[Stop]:
    """Hears of the signals inside; of none where a thread runs the whole run."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(
        target=_listen, args=(reader, stop), name="signals", daemon=True
    )
    thread.start()
    # What is written when a signal comes in, whatever the main thread does.
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, _nothing) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        thread.join()
        os.close(reader)


def anywhere(*flags: bool) -> tuple[bool, ...]:
    """Each flag or-ed over all processes, which must ask at the same places."""
    if jax.process_count() == 1:
        return flags
    gathered: Any = multihost_utils.process_allgather(np.asarray(flags))
    return tuple(bool(flag) for flag in np.any(gathered, axis=0))


def _listen(reader: int, stop: Stop) -> None:
    while numbers := os.read(reader, 64):
        for number in numbers:
            if number in SIGNALS:
                stop.hear(number)


def _nothing(number: int, frame: object) -> None:
    """Replaces the default, which would end the process."""
