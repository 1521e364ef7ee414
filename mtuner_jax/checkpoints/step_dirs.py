"""Which step folders of a run are whole, and which one to resume from."""

import dataclasses
import json
import logging
import pathlib
import re
import shutil
from typing import Any

from mtuner_jax import configs

_logger = logging.getLogger(__name__)
# Version of the layout of a step folder and of its `meta` item.
FORMAT = 1
_DELETED = ".deleted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """What lies in a folder of checkpoints.

    Attributes:
      complete: Steps that can be restored, ascending.
      skipped: Names of the other entries, and why they cannot.
    """

    complete: tuple[int, ...]
    skipped: dict[str, str]


def scan(directory: pathlib.Path) -> Scan:
    """Looks through a folder of checkpoints without changing anything."""
    complete, skipped = [], {}
    if not directory.is_dir():
        return Scan(complete=(), skipped={})
    for entry in sorted(directory.iterdir()):
        reason = problem(entry)
        if reason:
            skipped[entry.name] = reason
        else:
            complete.append(int(entry.name))
    return Scan(complete=tuple(sorted(complete)), skipped=skipped)


def problem(path: pathlib.Path) -> str:
    """Why `path` is no complete checkpoint; empty if it is one."""
    if ".orbax-checkpoint-tmp" in path.name:
        return "a save that did not finish"
    if not (re.fullmatch(r"0|[1-9][0-9]*", path.name) and path.is_dir()):
        return "not the folder of a step"
    if not any(path.iterdir()):
        return "an empty folder"
    if not (path / "commit_success.txt").is_file():
        return "a save that did not finish: commit_success.txt is missing"
    missing = [item for item in ("state", "data", "meta") if not (path / item).is_dir()]
    if missing:
        return f"{', '.join(missing)} missing: not written by mtuner-jax"
    try:
        content = read_meta(path)
    except (OSError, ValueError) as error:
        return f"meta cannot be read: {error}"
    if content.get("format") != FORMAT:
        return f"its format is {content.get('format')}, this version reads {FORMAT}"
    return ""


def read_meta(path: pathlib.Path) -> dict[str, Any]:
    """The `meta` item of a step folder: format, step, arrays, run."""
    content = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def newest(directory: pathlib.Path) -> pathlib.Path | None:
    """The newest complete step; a warning names everything that was passed over."""
    found = scan(directory)
    for name, reason in found.skipped.items():
        _logger.warning("%s is not used: %s", directory / name, reason)
    return directory / str(found.complete[-1]) if found.complete else None


def find(asked: str, run_directory: pathlib.Path) -> pathlib.Path | None:
    """The step folder that `--resume_from_checkpoint` means, None to start anew.

    Args:
      asked: `auto` (or `latest`): the newest complete step of this run, if any;
        `none`; or a step folder, a folder of them, or another run's folder.
      run_directory: The run's `output_dir`.

    Raises:
      ConfigError: The path holds no complete checkpoint.
    """
    if asked == "none":
        return None
    if asked in ("auto", "latest"):
        return newest(run_directory / "checkpoints")
    path = pathlib.Path(asked)
    if not path.is_dir():
        raise configs.ConfigError(f"resume_from_checkpoint={asked!r}: no such folder")
    reason = problem(path)
    if not reason:
        return path
    for folder in (path, path / "checkpoints"):
        if step := newest(folder):
            return step
    siblings = scan(path.parent).complete
    hint = f"; complete steps beside it: {list(siblings)}" if siblings else ""
    raise configs.ConfigError(
        f"resume_from_checkpoint={asked!r}: no complete checkpoint ({reason}){hint}"
    )


def set_aside(path: pathlib.Path, *, reason: str) -> None:
    """Renames what stands where a step is to be written; nothing is lost."""
    if not path.exists():
        return
    number = 0
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    path.rename(aside)
    _logger.warning("%s %s: renamed to %s", path, reason, aside.name)


def set_aside_after(directory: pathlib.Path, step: int) -> None:
    """Renames the complete checkpoints of later steps than `step`."""
    for later in scan(directory).complete:
        if later > step:
            reason = f"is later than step {step}, from which the run goes on"
            set_aside(directory / str(later), reason=reason)


def delete(path: pathlib.Path) -> None:
    """Deletes a step folder so that no instant shows half of it as a checkpoint."""
    doomed = path.with_name(path.name + _DELETED)
    path.rename(doomed)
    shutil.rmtree(doomed)
