"""Run checkpoints: `output_dir/checkpoints/<step>/` with `state`, `data` and `meta`.

Orbax writes them in the background and marks a finished one as committed. A step is
complete when it is committed and holds our `meta` item; whatever else lies there (a
killed save, foreign folders) is reported and left alone. Restoring always names the
shardings of the mesh that runs now, so the number of devices may change.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import pathlib
import sys
import types
from collections.abc import Callable, Generator
from typing import Any

import jax
import orbax.checkpoint as ocp
import safetensors

from mtuner_jax.checkpoints import metas, step_dirs
from mtuner_jax.configs import ConfigError, RunError

_logger = logging.getLogger(__name__)
Json = metas.Json
# What Orbax, TensorStore and safetensors raise when a disk is full, a file is gone,
# and so on.
_SAVE_ERRORS = (OSError, ValueError, RuntimeError, safetensors.SafetensorError)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


class SaveError(RunError):
    """A checkpoint that could not be written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gives back.

    Attributes:
      state: The tree that was saved, on the devices that were asked for.
      data: The data iterator's state.
      step: Optimizer steps done.
      notes: What was saved beside it; {} in checkpoints of earlier versions.
    """

    state: Any
    data: Json
    step: int
    notes: Json


class Store:
    """Writes and reads the checkpoints of one run; close it at the end.

    Attributes:
      directory: The folder of the step folders.
      best_step: Its checkpoint is kept beyond the limit; -1 for none.
      notes: JSON that goes into each checkpoint and that `restore` gives back.
    """

    def __init__(self, directory: str | pathlib.Path, *, save_total_limit: int):
        """Opens a store; nothing is written before the first save.

        Args:
          directory: Folder of the step folders, made when needed.
          save_total_limit: Complete checkpoints to keep, the newest ones.
        """
        self.directory = pathlib.Path(directory).absolute()
        self._save_total_limit = save_total_limit
        self.best_step = -1
        self.notes: Json = {}
        self._latest_step = -1
        self._checkpointer = _checkpointer()
        self._hook = sys.excepthook

    def __enter__(self) -> "Store":
        self._hook, sys.excepthook = sys.excepthook, self._quiet_hook
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.close()
        finally:
            sys.excepthook = self._hook

    def _quiet_hook(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        """Leaves out what TensorStore prints for each write of a save that failed."""
        if not (kind is RuntimeError and str(error) == "Event loop is closed"):
            self._hook(kind, error, trace)

    def save(
        self,
        state: Any,
        *,
        step: int,
        data: Json,
        meta: metas.RunMeta,
        write_adapter: Callable[[pathlib.Path], None] | None = None,
    ) -> None:
        """Begins to write a checkpoint; arrays may be donated when it returns.

        Waits for the save before, whose error is raised here if it had one. The step
        that was saved or restored last is not written again.

        Args:
          state: Pytree of arrays.
          step: Optimizer steps done.
          data: The data iterator's state.
          meta: Identity of the run.
          write_adapter: Writes the adapter's files into the folder it is given; they
            become the checkpoint's `adapter/`.

        Raises:
          SaveError: This save could not begin, or the one before failed.
        """
        if step == self._latest_step:
            return
        self._finish()
        target = self.directory / str(step)
        content = {
            "format": step_dirs.FORMAT,
            "step": step,
            "arrays": metas.array_types(state),
            "run": dataclasses.asdict(meta),
            "notes": self.notes,
        }
        args: dict[str, ocp.args.CheckpointArgs] = {
            "state": ocp.args.StandardSave(state),
            "data": ocp.args.JsonSave(_checked_json(data)),
            "meta": ocp.args.JsonSave(_checked_json(content)),
        }
        if write_adapter is not None:
            args["adapter"] = _FilesSave(write_adapter)
        self._latest_step = step
        with as_save_error(target):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                step_dirs.set_aside(target, reason="is in the way of a new one")
            self._checkpointer.save(target, args=ocp.args.Composite(**args))

    def poll(self) -> None:
        """Raises the error of a background save that failed; call it at each step."""
        with as_save_error(self.directory / str(self._latest_step)):
            self._checkpointer.check_for_errors()

    def restore(
        self, path: str | pathlib.Path, abstract_state: Any, *, meta: metas.RunMeta
    ) -> Restored:
        """Reads a complete checkpoint onto the devices that `abstract_state` names.

        Complete checkpoints of later steps in this store are set aside: the run goes
        on from here, and `auto` must not find another future.

        Args:
          path: A step folder, as `step_dirs.find` returns it.
          abstract_state: Tree of jax.ShapeDtypeStruct with shardings.
          meta: Identity of the run that asks.

        Raises:
          CheckpointMismatch: Another run's checkpoint, or other arrays.
        """
        path = pathlib.Path(path).absolute()
        content = step_dirs.read_meta(path)
        metas.check_same_run(path, content["run"], meta)
        metas.check_same_arrays(path, content["arrays"], abstract_state)
        items = self._checkpointer.restore(
            path,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract_state),
                data=ocp.args.JsonRestore(),
            ),
        )
        if path.parent == self.directory:
            self._latest_step = content["step"]
            if jax.process_index() == 0:
                step_dirs.set_aside_after(self.directory, content["step"])
        return Restored(
            state=items.state,
            data=items.data,
            step=content["step"],
            notes=content.get("notes", {}),
        )

    def close(self) -> None:
        """Waits for the last save and raises its error if it had one."""
        try:
            self._finish()
        finally:
            self._checkpointer.close()

    def _finish(self) -> None:
        """Waits for the running save, then deletes the checkpoints over the limit."""
        with as_save_error(self.directory / str(self._latest_step)):
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return
        complete = step_dirs.scan(self.directory).complete
        others = [step for step in complete if step != self.best_step]
        for step in others[: -self._save_total_limit]:
            _logger.info("deleting checkpoint %d (save_total_limit)", step)
            step_dirs.delete(self.directory / str(step))


def abstract_like(state: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, as `restore` wants them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@contextlib.contextmanager
def as_save_error(path: pathlib.Path) -> Generator[None]:
    """Turns what a failed save raises into SaveError with the path, in one line."""
    try:
        yield
    except ConfigError:
        raise
    except _SAVE_ERRORS as error:
        raise SaveError(
            f"{path} could not be written: {_one_line(error)}; older checkpoints are "
            "untouched; check free space and permissions there"
        ) from error


def _one_line(error: Exception) -> str:
    """What the operating system said, or the start of what Orbax makes of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split())
    known = [os.strerror(n) for n in _DISK_ERRORS if os.strerror(n) in text]
    return known[0] if known else text[:500]


def _checked_json(tree: Json) -> Json:
    json.dumps(tree, allow_nan=False)
    return tree


class _FilesHandler(ocp.CheckpointHandler):
    """An item whose files somebody else writes."""

    def save(self, directory: Any, args: "_FilesSave") -> None:
        """Calls the writer on process 0."""
        if jax.process_index() == 0:
            args.write(pathlib.Path(directory))

    def restore(self, directory: Any, args: Any = None) -> pathlib.Path:
        """The folder of the files."""
        return pathlib.Path(directory)


@dataclasses.dataclass
class _FilesSave(ocp.args.CheckpointArgs):
    write: Callable[[pathlib.Path], None]


def _checkpointer() -> ocp.AsyncCheckpointer:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    json_handler = ocp.JsonCheckpointHandler()
    state_handler = ocp.StandardCheckpointHandler()
    for item in ("data", "meta"):
        registry.add(item, ocp.args.JsonSave, json_handler)
        registry.add(item, ocp.args.JsonRestore, json_handler)
    registry.add("state", ocp.args.StandardSave, state_handler)
    registry.add("state", ocp.args.StandardRestore, state_handler)
    registry.add("adapter", _FilesSave, _FilesHandler())
    return ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(handler_registry=registry)
    )
