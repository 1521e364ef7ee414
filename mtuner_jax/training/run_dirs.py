"""The folder of a run: what lies where, and who may write there.

config.yaml  run_info.json  data_rows.npz  train.log  metrics.jsonl  plan.json
timeline.json  training_loss.png  tensorboard/  profile/  samples.jsonl
checkpoints/<step>/  adapter/  adapter_best/  merged/
"""

import collections
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import operator
import os
import pathlib
import platform
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

import mtuner_jax
from mtuner_jax import configs
from mtuner_jax.checkpoints import folders, step_dirs
from mtuner_jax.settings import cli, config_fields
from mtuner_jax.training import logs

_logger = logging.getLogger(__name__)
_PACKAGES = "mtuner-jax jax jaxlib flax optax orbax-checkpoint numpy".split()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDir:
    """Where things of a run lie.

    Attributes:
      root: The run's `output_dir`.
    """

    root: pathlib.Path

    rows = property(lambda self: self.root / "data_rows.npz")
    config = property(lambda self: self.root / "config.yaml")
    info = property(lambda self: self.root / "run_info.json")
    log = property(lambda self: self.root / "train.log")
    metrics = property(lambda self: self.root / "metrics.jsonl")
    plan = property(lambda self: self.root / "plan.json")
    timeline = property(lambda self: self.root / "timeline.json")
    loss_plot = property(lambda self: self.root / "training_loss.png")
    tensorboard = property(lambda self: self.root / "tensorboard")
    profile = property(lambda self: self.root / "profile")
    samples = property(lambda self: self.root / "samples.jsonl")
    checkpoints = property(lambda self: self.root / "checkpoints")
    adapter = property(lambda self: self.root / "adapter")
    adapter_best = property(lambda self: self.root / "adapter_best")
    merged = property(lambda self: self.root / "merged")


def claim(output_dir: str, *, resume_from: pathlib.Path | None) -> RunDir:
    """The run's folder, if it is free or holds the run that is to go on.

    Nothing is written: what a refused start finds there stays as it is.

    Args:
      output_dir: As configured.
      resume_from: What `step_dirs.find` returned.

    Raises:
      ConfigError: It holds checkpoints that this run neither wrote nor goes on from.
    """
    run = RunDir(root=pathlib.Path(output_dir))
    if run.root.exists() and not run.root.is_dir():
        raise configs.ConfigError(f"output_dir={output_dir!r} is a file")
    folders.check_writable(run.root, name="output_dir")
    complete = step_dirs.scan(run.checkpoints).complete
    goes_on = (
        resume_from is not None
        and resume_from.resolve().parent == run.checkpoints.resolve()
    )
    if complete and not goes_on:
        raise configs.ConfigError(
            f"output_dir={output_dir!r} holds another run's checkpoints up to step "
            f"{complete[-1]}: go on from there with --resume_from_checkpoint auto, or "
            "choose another --output_dir"
        )
    return run


def accept(
    run: RunDir, config: configs.RunConfig, log: logs.RunLog, *, argv: Sequence[str]
) -> None:
    """Makes the folder, and writes log, config and info; on process 0 only."""
    if jax.process_index() != 0:
        return
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        log.open(run.log)
        write_config(run, config)
        write_info(run, argv)
    except OSError as error:
        raise configs.ConfigError(
            f"output_dir={config.output_dir!r} cannot be written: {error.strerror} "
            f"({error.filename}); check free space and permissions there, or choose "
            "another --output_dir"
        ) from error


def write_config(run: RunDir, config: configs.RunConfig) -> None:
    """Writes `config.yaml`; a resumed run logs the settings that have changed."""
    if jax.process_index() != 0:
        return
    if run.config.is_file():
        for change in _changes(run, config):
            _logger.info("changed since the last start: %s", change)
    replace(run.config, cli.dump_yaml(config))


def write_info(run: RunDir, argv: Sequence[str]) -> None:
    """Writes `run_info.json`: versions, commit, devices, command line, host.

    What an earlier start of the same run wrote moves to its `earlier_starts`.
    """
    if jax.process_index() != 0:
        return
    info = describe(argv)
    if run.info.is_file():
        try:
            earlier = json.loads(run.info.read_text(encoding="utf-8"))
        except ValueError:
            earlier = {}
            _logger.warning("%s cannot be read and is written anew", run.info)
        info["earlier_starts"] = [*earlier.pop("earlier_starts", []), earlier]
    replace(run.info, json.dumps(info, indent=2) + "\n")


def describe(argv: Sequence[str]) -> dict[str, Any]:
    """What a run stands on, for `run_info.json`; starts JAX if it has not."""
    devices = jax.devices()
    kinds = collections.Counter(device.device_kind for device in devices)
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "argv": list(argv),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "backend": jax.default_backend(),
        "backend_version": devices[0].client.platform_version,
        "git_commit": _git_commit(),
        "devices": dict(sorted(kinds.items())),
        "processes": jax.process_count(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("JAX_", "XLA_", "CUDA_VISIBLE", "NCCL_"))
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Commit of the source tree that runs, `+changes` if it has been edited."""
    root = pathlib.Path(mtuner_jax.__file__).parent.parent
    # Not for an installed package that happens to lie inside some repository.
    if not (root / ".git").exists():
        return None
    options = "--always --exclude=* --abbrev=40 --dirty=+changes".split()
    command = ["git", "-C", str(root), "describe", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _changes(run: RunDir, config: configs.RunConfig) -> list[str]:
    try:
        before = cli.load_yaml(run.config, configs.RunConfig)
    except configs.ConfigError as error:
        return [f"config.yaml could not be read ({error})"]
    values = {
        name: (operator.attrgetter(name)(before), operator.attrgetter(name)(config))
        for name in config_fields.of(configs.RunConfig)
    }
    return [f"{name} {a!r} -> {b!r}" for name, (a, b) in values.items() if a != b]


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file so that no instant shows half of it."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
