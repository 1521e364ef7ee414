"""Folders that are replaced whole: either the old content is there, or the new one."""

import contextlib
import fnmatch
import os
import pathlib
import shutil
import tempfile
from collections.abc import Generator, Sequence

from mtuner_jax.configs import UserError


class FolderError(UserError):
    """A folder that must not be replaced, or cannot be written to."""


def check_file(path: str, *, name: str) -> None:
    """Refuses a file to be written whose folder is not there; `-` and empty are fine.

    Args:
      path: Of the file.
      name: The setting that names it, for the message.

    Raises:
      FolderError: No such folder, or the path is a folder itself.
    """
    file = pathlib.Path(path)
    if path in ("", "-"):
        return
    if not file.parent.is_dir():
        raise FolderError(f"{name}={path!r}: there is no folder {file.parent}; make it")
    if file.is_dir():
        raise FolderError(f"{name}={path!r} is a folder; name a file in it")


def check_writable(folder: pathlib.Path, *, name: str) -> None:
    """Tries whether a folder can be made or written to; leaves nothing behind.

    Args:
      folder: Which may not be there yet.
      name: The setting that names it, for the message.

    Raises:
      FolderError: It lies below a file, nothing can be written there, or the disk is
        full.
    """
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    problem = ""
    try:
        if nearest.is_dir():
            tempfile.TemporaryDirectory(dir=nearest).cleanup()
        else:
            problem = f"{nearest} is a file"
    except OSError as error:
        problem = f"nothing can be written to {nearest} ({error.strerror})"
    if problem:
        raise FolderError(f"{name}={str(folder)!r}: {problem}; choose another {name}")


@contextlib.contextmanager
def replaced(
    folder: pathlib.Path, *, owned: Sequence[str]
) -> Generator[pathlib.Path, None, None]:
    """Gives an empty folder to fill, which takes the place of `folder` at the end.

    An error inside leaves `folder` as it was. Between two renames at the very end
    `folder` does not exist; should the machine stop just then, its old content lies
    beside it under `.<name>.old-<process id>`.

    Args:
      folder: Folder to create or replace.
      owned: Patterns of file names that an earlier export may have left there.

    Raises:
      FolderError: `folder` holds anything else, which would be lost.
    """
    foreign = _foreign(folder, owned)
    if foreign:
        raise FolderError(
            f"{folder} holds files that are not of an earlier export "
            f"({', '.join(foreign[:5])}) and would be lost; choose another folder"
        )
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in filter(pathlib.Path.is_file, temporary.rglob("*")):
            flush(path)
        _swap(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _foreign(folder: pathlib.Path, owned: Sequence[str]) -> list[str]:
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise FolderError(f"{folder} is a file; choose another folder")
    names = sorted(entry.name for entry in folder.iterdir())
    return [
        name
        for name in names
        if not any(fnmatch.fnmatch(name, pattern) for pattern in owned)
    ]


def _swap(new: pathlib.Path, folder: pathlib.Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        new.replace(folder)  # an empty folder may be replaced directly
        return
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def flush(path: pathlib.Path) -> None:
    """Waits until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
