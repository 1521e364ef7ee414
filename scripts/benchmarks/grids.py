"""The steps that a campaign goes through: models, lengths and batches."""

import dataclasses
import itertools
from collections.abc import Iterator

from models import llama_family
from mtuner_jax.devices import meshes
from mtuner_jax.runs import requests, shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig:
    """The steps of a campaign.

    Attributes:
      models: Shapes by name, the largest last.
      max_lengths: Tokens in a row.
      global_batch_sizes: Rows in an optimizer step.
    """

    models: tuple[str, ...] = ("llama2-7b", "llama2-13b", "llama2-30b", "llama2-70b")
    max_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    global_batch_sizes: tuple[int, ...] = (8, 32)

    def cells(self) -> Iterator[tuple[str, int, int]]:
        """Each model with each length and each batch."""
        return itertools.product(self.models, self.max_lengths, self.global_batch_sizes)


def inputs(
    config: GridConfig, mesh: meshes.MeshSpec, *, hardware: str
) -> Iterator[requests.PlanningInputs]:
    """What plans of each step are searched with.

    Raises:
      ConfigError: An unknown model or machine, or a length or batch below 1.
    """
    for model, length, rows in config.cells():
        request = requests.StepRequest(
            name=model,
            mesh=mesh,
            global_batch_size=rows,
            max_length=length,
            hardware=hardware,
        )
        yield requests.make(shapes.shape(llama_family.FAMILY, model), request)
