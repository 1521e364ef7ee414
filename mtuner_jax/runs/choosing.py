"""The model that export and generation are about: a run's, an adapter's, or a base."""

import dataclasses
import logging
import pathlib
from typing import Any

from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_export, json_files, step_dirs
from mtuner_jax.configs import (
    ConfigError,
    DatasetConfig,
    LoraConfig,
    ModelChoice,
    RunConfig,
)
from mtuner_jax.runs import opening
from mtuner_jax.runs.families import Family
from mtuner_jax.settings import cli
from mtuner_jax.training import run_dirs

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """An adapter on its model.

    Attributes:
      config: As it was trained.
      specs: Rank and scaling of each module in each layer.
      adapters: {module: {"lora_a": [L, D, R], "lora_b": [L, R, F]}}, float32.
    """

    config: LoraConfig
    specs: tuple[lora.AdapterSpec, ...]
    adapters: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A model, opened, with what was trained on it.

    Attributes:
      opened: The base.
      trained: None without an adapter.
      dataset: Settings of data with which it was trained; defaults without a run.
    """

    opened: opening.OpenedModel
    trained: Trained | None
    dataset: DatasetConfig


def choose(choice: ModelChoice, family: Family) -> Chosen:
    """Opens what was chosen.

    Raises:
      ConfigError: No such run, checkpoint or adapter, or random weights.
      UserError: As `opening.open_model` and the readers of adapters.
    """
    folder = adapter_folder(choice)
    model, dataset = choice.model, DatasetConfig()
    if choice.run:
        settings = cli.load_yaml(run_dirs.RunDir(root=_root(choice)).config, RunConfig)
        if settings.random_init:
            raise ConfigError(
                f"run={choice.run!r} has random base weights (random_init); there is "
                "nothing to be made of it"
            )
        model, dataset = model or settings.model, settings.dataset
    elif folder is not None and not model:
        content = json_files.read(folder / "adapter_config.json")
        model = str(content.get("base_model_name_or_path") or "")
        model = "" if model == opening.DEFAULT_MODEL else model
    opened = opening.open_model(family, RunConfig(model=model, max_length=1))
    _logger.info("model: %s", opened.name)
    trained = None
    if folder is not None:
        trained = _read(folder, opened)
        _logger.info("adapter: %s", folder)
    return Chosen(opened=opened, trained=trained, dataset=dataset)


def adapter_folder(choice: ModelChoice) -> pathlib.Path | None:
    """The folder of the adapter, None if none was chosen.

    Raises:
      ConfigError: There is none where it should be.
    """
    if choice.adapter:
        folder = pathlib.Path(choice.adapter).expanduser()
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"adapter={choice.adapter!r}: no adapter_config.json there; a run's "
                "folder is given as run"
            )
        return folder
    if not choice.run:
        return None
    run = run_dirs.RunDir(root=_root(choice))
    steps = step_dirs.scan(run.checkpoints).complete
    folder = run.adapter
    if choice.checkpoint:
        folder = run.checkpoints / str(choice.checkpoint) / "adapter"
    if (folder / "adapter_config.json").is_file():
        return folder
    told = f"; checkpoints: {', '.join(map(str, steps))}" if steps else ""
    raise ConfigError(
        f"run={choice.run!r}: no adapter in {folder}{told}; choose one with checkpoint"
    )


def _root(choice: ModelChoice) -> pathlib.Path:
    root = pathlib.Path(choice.run).expanduser()
    if not (root / "config.yaml").is_file():
        raise ConfigError(
            f"run={choice.run!r}: no run's folder, it has no config.yaml; an adapter's "
            "folder is given as adapter"
        )
    return root


def _read(folder: pathlib.Path, opened: opening.OpenedModel) -> Trained:
    config = hf_export.read_adapter_config(folder)
    linears = opened.shape.decoder(attention="xla").linears()
    specs = lora.resolve(config, linears, num_layers=opened.shape.num_layers)
    return Trained(
        config=config, specs=specs, adapters=hf_export.read_adapter(folder, specs)
    )
