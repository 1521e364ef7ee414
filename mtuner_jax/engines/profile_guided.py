"""Profile-guided latencies: XLA schedules gathers by what they were measured to take.

XLA's own estimate does not hide gathers on a slow link; with a profile of a few steps
it does. The first steps run as compiled at first and under the profiler, then the step
is compiled once more with the profile, which is stored for the next run.
"""

import hashlib
import itertools
import logging
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import profiler as jax_profiler

_logger = logging.getLogger(__name__)
_WARMUP_CALLS = 2
_PROFILED_CALLS = 3
_LONG_CALL_S = 2.0  # of such a call, one is enough
_PERCENTILE = 50


class GuidedStep:
    """A jitted step that compiles itself again once it has been measured.

    Call it like the jitted function. It must always get arguments of the same shapes.

    JAX's own `jax_enable_pgle` does the same inside the call of a jitted function, and
    only there: it does not show the program that it compiled again, whose memory has
    to be compared with the budget before the run goes on with it, it does not let a
    step be compiled ahead of its first call, and it keeps no profile for the next run.
    It also applies to every jitted function of the process. What both share is JAX's
    profiler session, the one private name used here.

    Attributes:
      compiled: The program in use; None before the first call.
      guided: Whether that program was compiled with a profile.
    """

    def __init__(
        self,
        jitted: Any,
        *,
        compiler_options: dict[str, Any],
        profile_directory: pathlib.Path | None,
    ):
        """Wraps a step.

        Args:
          jitted: What `jax.jit` returned.
          compiler_options: Used for each compilation.
          profile_directory: Where profiles are kept; None switches profiling off.
        """
        self._jitted = jitted
        self._options = compiler_options
        self._directory = profile_directory
        self._calls = 0
        self._settled_at = 0
        self._collector: jax_profiler.PGLEProfiler | None = None
        self._lowered: jax.stages.Lowered | None = None
        self.compiled: jax.stages.Compiled | None = None
        self.guided = False

    def __call__(self, *args: Any) -> Any:
        """Runs the step; the calls that are profiled wait for their result."""
        compiled = self.compiled or self._first(args)
        self._calls += 1
        if self.guided or self._directory is None or self._calls < _WARMUP_CALLS:
            return compiled(*args)
        if self._collector is None:
            start = time.perf_counter()
            results = jax.block_until_ready(compiled(*args))
            long = time.perf_counter() - start > _LONG_CALL_S
            calls = 1 if long else _PROFILED_CALLS
            self._collector = jax_profiler.PGLEProfiler(calls, _PERCENTILE)
            return results
        with self._collector.trace(self._collector):
            results = jax.block_until_ready(compiled(*args))
        profile = self._collector.consume_fdo_profile()
        if profile is not None:
            self._adopt(profile)
        return results

    @property
    def settled(self) -> bool:
        """Whether the next call neither compiles nor profiles nor warms up."""
        plain = self._directory is None or self.guided
        return plain and self._calls - self._settled_at >= _WARMUP_CALLS

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """Compiles without running, with a stored profile if there is one."""
        return self.compiled or self._first(args)

    def _first(self, args: tuple[Any, ...]) -> jax.stages.Compiled:
        self._lowered = self._jitted.lower(*args)
        path = self._path()
        if path is not None and path.is_file():
            _logger.info("compiling with the stored profile %s", path)
            return self._compile(path.read_bytes())
        return self._compile()

    def _adopt(self, profile: bytes) -> None:
        path = self._path()
        if not profile or path is None:
            _logger.warning(
                "the profiler returned nothing (another tool may hold it); gathers are "
                "scheduled by XLA's own estimate"
            )
            self._directory = None
            self._settled_at = self._calls
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(profile)
        calls = self._calls - _WARMUP_CALLS
        _logger.info("compiling the step again with a profile of %d steps", calls)
        self._compile(profile)

    def _compile(self, profile: bytes = b"") -> jax.stages.Compiled:
        assert self._lowered is not None
        options: Any = self._options | ({"fdo_profile": profile} if profile else {})
        self.compiled = self._lowered.compile(compiler_options=options)
        self.guided, self._settled_at = bool(profile), self._calls
        return self.compiled

    def _path(self) -> pathlib.Path | None:
        if self._directory is None or self._lowered is None:
            return None
        device_kind = jax.devices()[0].device_kind
        options = repr(sorted(self._options.items()))
        parts = (self._lowered.as_text(), options, jax.__version__, device_kind)
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        return self._directory / f"{name}.fdo"


def exposed_communication_s(
    trace_directory: pathlib.Path, *, is_communication: Callable[[str], bool]
) -> tuple[float, float]:
    """Reads a profiler trace: how long collectives ran, and ran alone.

    Args:
      trace_directory: What `jax.profiler.trace` wrote.
      is_communication: Whether a kernel of this name is a collective.

    Returns:
      (seconds of communication, seconds of it without a computation at the same
      time), of the first GPU, over the whole trace.
    """
    files = sorted(trace_directory.glob("**/*.xplane.pb"))
    data = jax.profiler.ProfileData.from_file(str(files[-1]))
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    streams = (
        line
        for plane in data.planes
        if plane.name.startswith("/device:GPU:0")
        for line in plane.lines
        if line.name.startswith("Stream")
    )
    for event in itertools.chain.from_iterable(line.events for line in streams):
        end = event.start_ns + event.duration_ns
        spans[is_communication(event.name)].append((event.start_ns, end))
    total, alone = _covered(spans[True]), _covered(spans[False])
    both = _covered(spans[True] + spans[False])
    return total / 1e9, (both - alone) / 1e9


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
