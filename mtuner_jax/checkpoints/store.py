"""Run checkpoints: `output_dir/checkpoints/<step>/` with `state`, `data` and `meta`.

Orbax writes them in the background and marks a finished one as committed. A step is
complete when it is committed and holds our `meta` item; whatever else lies there (a
killed save, foreign folders) is reported and left alone. Restoring always names the
shardings of the mesh that runs now, so the number of devices may change.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import orbax.checkpoint as ocp

from mtuner_jax.checkpoints import metas, step_dirs
from mtuner_jax.configs import RunError

_logger = logging.getLogger(__name__)
Json = metas.Json
# What Orbax and TensorStore raise when a disk is full, a file is gone, and so on.
_SAVE_ERRORS = (OSError, ValueError, RuntimeError)


class SaveError(RunError):
    """A checkpoint that could not be written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint gives back.

    Attributes:
      state: The tree that was saved, on the devices that were asked for.
      data: The data iterator's state.
      step: Optimizer steps done.
    """

    state: Any
    data: Json
    step: int


class Store:
    """Writes and reads the checkpoints of one run; close it at the end.

    Attributes:
      directory: The folder of the step folders.
    """

    def __init__(self, directory: str | pathlib.Path, *, save_total_limit: int):
        """Opens a store; nothing is written before the first save.

        Args:
          directory: Folder of the step folders, made when needed.
          save_total_limit: Complete checkpoints to keep, the newest ones.
        """
        self.directory = pathlib.Path(directory).absolute()
        self._save_total_limit = save_total_limit
        self._latest_step = -1
        self._checkpointer = _checkpointer()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

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
        }
        args: dict[str, ocp.args.CheckpointArgs] = {
            "state": ocp.args.StandardSave(state),
            "data": ocp.args.JsonSave(_checked_json(data)),
            "meta": ocp.args.JsonSave(_checked_json(content)),
        }
        if write_adapter is not None:
            args["adapter"] = _FilesSave(write_adapter)
        self._latest_step = step
        with _as_save_error(target):
            if jax.process_index() == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                step_dirs.set_aside(target, reason="is in the way of a new one")
            self._checkpointer.save(target, args=ocp.args.Composite(**args))

    def poll(self) -> None:
        """Raises the error of a background save that failed; call it at each step."""
        with _as_save_error(self.directory / str(self._latest_step)):
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
        return Restored(state=items.state, data=items.data, step=content["step"])

    def close(self) -> None:
        """Waits for the last save and raises its error if it had one."""
        try:
            self._finish()
        finally:
            self._checkpointer.close()

    def _finish(self) -> None:
        """Waits for the running save, then deletes the checkpoints over the limit."""
        with _as_save_error(self.directory / str(self._latest_step)):
            self._checkpointer.wait_until_finished()
        if jax.process_index() != 0:
            return
        complete = step_dirs.scan(self.directory).complete
        for step in complete[: -self._save_total_limit]:
            _logger.info("deleting checkpoint %d (save_total_limit)", step)
            step_dirs.delete(self.directory / str(step))


def abstract_like(state: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, as `restore` wants them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@contextlib.contextmanager
def _as_save_error(path: pathlib.Path) -> Generator[None]:
    """Turns what a failed save raises into SaveError with the path."""
    try:
        yield
    except _SAVE_ERRORS as error:
        raise SaveError(
            f"checkpoint {path} could not be written: {error}; older checkpoints are "
            "untouched; check free space and permissions there"
        ) from error


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
