"""Lists of benchmark runs: what is measured, with which plan, in which order.

A list is made without the machine (`server_runs.py plan`) and carried to it. It lies
in a folder, with plans and machine descriptions beside it.
"""

import dataclasses
import enum
import hashlib
import pathlib
from typing import NamedTuple

from mtuner_jax.configs import ConfigError
from mtuner_jax.numbers import records

FILE = "runs.json"
FORMAT = records.Format(what="list of runs", version=1, again="plan it anew")


class Kind(enum.StrEnum):
    """What a run measures: gathers over each axis, a step of ours, or a peer."""

    LINKS = "links"
    STEP = "step"
    PEER = "peer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A link and a cap on memory, which a process cannot change once it runs.

    Attributes:
      name: `slow` or `fast`.
      environment: Variables of its processes.
      pool_gib: Of the allocator, per device.
      capped: Whether that is a cap, which peers get as well.
      hardware: Name of the machine whose figures plans were made with.
    """

    name: str
    environment: dict[str, str]
    pool_gib: float
    capped: bool
    hardware: str


class Case(NamedTuple):
    """What runs that are compared have in common; fields as in `ListedRun`."""

    setting: str
    model: str
    max_length: int
    global_batch_size: int

    @property
    def shape(self) -> str:
        """The model without the folder that it lies in."""
        return pathlib.PurePath(self.model).name

    def __str__(self) -> str:
        return (
            f"{self.setting} {self.shape} {self.global_batch_size} x {self.max_length}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One thing to measure.

    Attributes:
      name: Unique in its list.
      kind: What is measured.
      setting: Name of its link and cap.
      model: Shape; empty for links.
      max_length: Tokens in a row.
      global_batch_size: Rows in a step; of a peer, the largest.
      roles: What its plan is in a comparison, such as `planned` or `static fsdp`; of a
        peer, its mode.
      plan: Its file in the folder; empty without one.
      arguments: For the program that measures.
      predicted_ms: Of a step; 0 if nothing is predicted.
      predicted_gib: Per device.
      predicted_communication_ms: In which collectives run.
      expected_s: That the whole run takes, start of the process not counted.
    """

    name: str
    kind: Kind
    setting: str
    model: str = ""
    max_length: int = 0
    global_batch_size: int = 0
    roles: tuple[str, ...] = ()
    plan: str = ""
    arguments: tuple[str, ...] = ()
    predicted_ms: float = 0.0
    predicted_gib: float = 0.0
    predicted_communication_ms: float = 0.0
    expected_s: float = 60.0

    @property
    def case(self) -> Case:
        """What it is compared with has the same."""
        return Case(self.setting, self.model, self.max_length, self.global_batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunList:
    """Runs in the order in which they are worth most, and what they share.

    Attributes:
      mesh: As `--mesh` takes it.
      num_devices: Of the mesh.
      platform: `gpu`, or `cpu` for a rehearsal.
      settings: Links and caps.
      runs: Most deciding first.
      unplanned: (case, reason) where no plan fits.
    """

    mesh: str
    num_devices: int
    platform: str
    settings: tuple[Setting, ...]
    runs: tuple[ListedRun, ...]
    unplanned: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """Tells this list from others; results carry it."""
        return hashlib.sha256(FORMAT.to_json(self).encode()).hexdigest()[:12]

    def setting(self, name: str) -> Setting:
        """The setting of that name."""
        return next(setting for setting in self.settings if setting.name == name)

    def named(self, name: str) -> ListedRun:
        """The run of that name.

        Raises:
          ConfigError: None.
        """
        for run in self.runs:
            if run.name == name:
                return run
        raise ConfigError(f"run {name!r} is not in the list of {len(self.runs)} runs")


def read(folder: pathlib.Path) -> RunList:
    """Reads a folder's list.

    Raises:
      ConfigError: There is none, or it is not what `FORMAT` writes.
    """
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; make it with `server_runs.py plan`")
    try:
        return FORMAT.from_json(path.read_text(encoding="utf-8"), RunList)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; make it again") from error
