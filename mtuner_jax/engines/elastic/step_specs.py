"""What a step is built from, and how its weights and memory are laid out."""

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import shardings
from mtuner_jax.planning.costs import arena_layouts
from mtuner_jax.planning.plans import AdapterState, Plan, Saved, Table
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.protocols.states import Params

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
    """

    model: Decoder
    plan: Plan
    mesh: Mesh
    adapters: tuple[lora.AdapterSpec, ...]
    dropout_rate: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if self.plan.num_layers != self.model.num_layers:
            raise ConfigError(
                f"the plan has {self.plan.num_layers} layers, the model "
                f"{self.model.num_layers}; plan again for this model"
            )
        sizes = tuple(self.mesh.devices.shape)
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
    def axes(self) -> tuple[str, ...]:
        """All mesh axes, slowest link first."""
        return self.mesh.axis_names

    def segments(self, part: str) -> range:
        """Indices of the plan's segments in the `main` part or the `tail`."""
        start, end = self.plan.tail_start, len(self.plan.segments)
        return range(start) if part == "main" else range(start, end)


def weight_specs(spec: StepSpec) -> Params:
    """PartitionSpecs of the frozen weights' tree."""
    shapes, axes = spec.model.shapes(), spec.axes
    specs: Params = {"segments": {}}
    for part, table in (("embed", spec.plan.embedding), ("head", spec.plan.head)):
        rules = shardings.rules(axes, rest_axes=0)
        if table is Table.RESIDENT:
            rules = dataclasses.replace(rules, vocab_rows=())
        specs[part] = _specs(shapes[part], rules, stacked=False)
    for index, segment in enumerate(spec.plan.segments):
        rules = shardings.rules(axes, rest_axes=segment.rest_axes)
        specs["segments"][str(index)] = _specs(shapes["layers"], rules, stacked=True)
    return specs


def adapter_specs(spec: StepSpec) -> Params:
    """PartitionSpecs of the adapters: A is split by input, B by output features."""
    split = spec.plan.adapters is AdapterState.SHARDED
    axes = tuple(reversed(spec.axes)) if split else None
    for adapter in spec.adapters if split else ():
        for name in ("in_dim", "out_dim"):
            if getattr(adapter, name) % spec.mesh.size:
                raise ConfigError(
                    f"plan: adapters=sharded, but {name}={getattr(adapter, name)} of "
                    f"{adapter.module} does not divide by {spec.mesh.size} devices; "
                    "use adapters=replicated"
                )
    return {
        adapter.module: {
            "lora_a": P(None, axes) if split else P(),
            "lora_b": P(None, None, axes) if split else P(),
        }
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
    layer_size = sum(
        math.prod(shape[1:])
        for leaves in spec.model.shapes()["layers"].values()
        for leaf, shape in leaves.items()
        if shardings.is_sharded(leaf)
    )
    inputs, copies = [], []
    for index in spec.segments(part):
        segment = plan.segments[index]
        on_host = segment.saved is Saved.LAYER_INPUT_ON_HOST
        keeps = segment.bwd_keep_axes > segment.rest_axes
        copy_size = layer_size // math.prod(plan.mesh_sizes[segment.bwd_keep_axes :])
        inputs += segment.num_layers * [0 if on_host else input_size]
        copies += segment.num_layers * [copy_size if keeps else 0]
    return arena_layouts.layout(inputs, copies)


def named(spec: StepSpec, specs: Params) -> Params:
    """PartitionSpecs -> shardings on the spec's mesh."""
    return jax.tree.map(
        lambda leaf: NamedSharding(spec.mesh, leaf),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, P),
    )


def _specs(node, rules, *, stacked, leaf=""):
    if isinstance(node, dict):
        return {
            name: _specs(child, rules, stacked=stacked, leaf=name)
            for name, child in node.items()
        }
    dims = shardings.LOGICAL_DIMS[leaf]
    return rules.spec(*((None, *dims) if stacked else dims))
