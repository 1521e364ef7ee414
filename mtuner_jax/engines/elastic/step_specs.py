"""What a step is built from, and how its weights and memory are laid out."""

import dataclasses
import functools
import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.adapters import lora
from mtuner_jax.adapters.stacks import Stack
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes, shardings
from mtuner_jax.planning.costs import arena_layouts
from mtuner_jax.planning.plans import AdapterState, Plan, Saved, Table
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Params
from mtuner_jax.weights import layouts

PARTS = ("main", "tail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What a step is built from.

    Attributes:
      model: The decoder.
      plan: What is held when, and how the batch is cut.
      mesh: The devices; its sizes must be the plan's.
      adapters: Which linears have adapters of which rank.
      dropout_rate: lora_dropout.
      seed: Seed of the dropout masks.
      activation_dtype: What layers compute in; "" means what weights are stored in.
      stack: Many adapters side by side, `adapters` as its `specs`, each with its own
        dropout and seed; None for one adapter.
    """

    model: Decoder
    plan: Plan
    mesh: Mesh
    adapters: tuple[lora.AdapterSpec, ...]
    dropout_rate: float = 0.0
    seed: int = 0
    activation_dtype: str = ""
    stack: Stack | None = None

    def __post_init__(self):
        if self.plan.num_layers != self.model.num_layers:
            raise ConfigError(
                f"the plan has {self.plan.num_layers} layers, the model "
                f"{self.model.num_layers}; plan again for this model"
            )
        sizes = tuple(self.mesh.shape[axis] for axis in self.data_axes)
        if self.plan.mesh_sizes != sizes:
            raise ConfigError(
                f"the plan is for mesh {self.plan.mesh_sizes}, this one is {sizes}; "
                "plan again for this mesh"
            )
        tied = "table" not in self.model.shapes()["head"]
        resident = Table.RESIDENT in (self.plan.embedding, self.plan.head)
        if tied and resident and self.plan.embedding is not self.plan.head:
            raise ConfigError(
                f"plan: embedding={self.plan.embedding} and head={self.plan.head}, but "
                "this model has one table for both; resident is for both or none"
            )

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that split batch and weights, slowest link first."""
        return meshes.roles(self.mesh).data

    @property
    def dtype(self) -> np.dtype:
        """What layers compute in, and what the arena holds."""
        return np.dtype(self.activation_dtype or self.plan.weight_dtype)

    @functools.cached_property
    def table(self) -> Params:
        """The frozen weights, as a tree of `layouts.FrozenArray`."""
        dtype = self.plan.weight_dtype
        return layouts.table(self.model, self.plan, self.mesh, dtype=dtype)

    def segments(self, part: str) -> range:
        """Indices of the plan's segments in the `main` part or the `tail`."""
        start, end = self.plan.tail_start, len(self.plan.segments)
        return range(start) if part == "main" else range(start, end)


def weight_specs(spec: StepSpec) -> Params:
    """PartitionSpecs of the frozen weights' tree."""
    return jax.tree.map(lambda row: row.spec, spec.table)


def adapter_specs(spec: StepSpec) -> Params:
    """PartitionSpecs of the adapters: A is split by input, B by output features."""
    split = spec.plan.adapters is AdapterState.SHARDED
    axes = tuple(reversed(spec.data_axes))
    specs = {"lora_a": P(None, axes), "lora_b": P(None, None, axes)} if split else {}
    for adapter in spec.adapters if split else ():
        num_layers, rank = len(adapter.ranks), adapter.max_rank
        shapes = {
            "lora_a": (num_layers, adapter.in_dim, rank),
            "lora_b": (num_layers, rank, adapter.out_dim),
        }
        for leaf, shape in shapes.items():
            shardings.check_divides(
                f"{adapter.module}/{leaf}",
                shape,
                NamedSharding(spec.mesh, specs[leaf]),
                remedy="plan with adapters=replicated",
            )
    return {
        adapter.module: {leaf: specs.get(leaf, P()) for leaf in ("lora_a", "lora_b")}
        for adapter in spec.adapters
    }


def arena_layout(
    spec: StepSpec, part: str, *, max_length: int
) -> arena_layouts.ArenaLayout:
    """The arena of the main part or the tail, for one device."""
    plan = spec.plan
    width = spec.model.shapes()["head"]["norm"]["scale"][0]
    chunks = plan.tail_chunks if part == "tail" else 1
    input_size = plan.microbatch // chunks * max_length * width
    inputs, copies = [], []
    for index in spec.segments(part):
        segment = plan.segments[index]
        on_host = segment.saved is Saved.LAYER_INPUT_ON_HOST
        keeps = segment.bwd_keep_axes > segment.rest_axes
        layer_size = sum(
            math.prod(row.stored_shape[1:])
            for row in jax.tree.leaves(spec.table["segments"][str(index)])
            if row.is_split
        )
        copy_size = layer_size // math.prod(plan.mesh_sizes[segment.bwd_keep_axes :])
        inputs += segment.num_layers * [0 if on_host else input_size]
        copies += segment.num_layers * [copy_size if keeps else 0]
    return arena_layouts.layout(inputs, copies)


def named(spec: StepSpec, specs: Params) -> Params:
    """PartitionSpecs -> shardings on the spec's mesh."""
    return jax.tree.map(lambda leaf: NamedSharding(spec.mesh, leaf), specs)
