"""Says what a run waits for where it has not moved for long."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence

import jax

_logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that speaks up about a wait that does not end; use it as a context.

    A wait may take the limit, or three times as long as the longest one so far.
    """

    def __init__(self, limit_s: float, tell: Callable[[str, float], None]):
        """Watches nothing yet.

        Args:
          limit_s: Seconds without an end after which `tell` is called, and again each
            time that the wait has doubled; 0 never calls it.
          tell: (what is waited for, seconds so far) -> says so.
        """
        self._limit_s = limit_s
        self._tell = tell
        self._longest_s = 0.0
        self._what, self._since, self._next_s = "", 0.0, 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._limit_s > 0:
            self._thread = threading.Thread(
                target=self._watch, name="watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Watches what happens inside, such as `step 3`."""
        with self._changed:
            self._what, self._since = what, time.monotonic()
            self._next_s = max(self._limit_s, 3 * self._longest_s)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                waited_s = time.monotonic() - self._since
                self._longest_s = max(self._longest_s, waited_s)
                self._what = ""

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._what:
                    self._changed.wait()
                    continue
                waited_s = time.monotonic() - self._since
                if waited_s >= self._next_s:
                    self._tell(self._what, waited_s)
                    self._next_s = 2 * waited_s
                self._changed.wait(self._next_s - waited_s)


def warn(devices: Sequence[jax.Device], what: str, waited_s: float) -> None:
    """Warns that `what` does not end, with the remedy for these devices."""
    _logger.warning(
        "%s has not ended after %.3g minutes%s",
        what,
        waited_s / 60,
        _remedy(devices[0].platform, jax.device_count()),
    )


def _remedy(platform: str, num_devices: int) -> str:
    if platform != "gpu" or num_devices == 1:
        return ""
    return (
        f": if it stays so and all {num_devices} GPUs are at 100 %, a collective hangs "
        "(an all-gather of weights, most likely): start again with "
        "NCCL_P2P_DISABLE=1, or on fewer cards (--mesh 1); see docs/hardware.md"
    )
