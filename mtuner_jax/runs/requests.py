"""From what a user asks for to what the planner takes, checked."""

import dataclasses
import math

from mtuner_jax.adapters import lora
from mtuner_jax.adapters.stacks import Stack
from mtuner_jax.configs import ConfigError, LoraConfig
from mtuner_jax.devices import meshes, shardings
from mtuner_jax.hardware import machines
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.numbers import sizes
from mtuner_jax.numbers.documents import UNKNOWN, RowDocuments
from mtuner_jax.planning import workloads
from mtuner_jax.planning.workloads import Workload
from mtuner_jax.protocols.decoders import Decoder
from mtuner_jax.runs.families import ModelShape

LEAST_BUDGET_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A step to be planned.

    Attributes:
      name: The model's, for messages.
      mesh: The devices.
      global_batch_size: Rows in an optimizer step.
      max_length: Tokens in a row.
      lora: The adapters.
      dtype: Of frozen weights and activations.
      attention: Implementation that computes it, a key of `attention.BACK_ENDS`.
      documents: What the rows hold.
      hardware: A machine's name or file, or `auto`.
      memory_budget: GiB per device that the compiled step may take; 0 for the pool of
        XLA's allocator less the hardware's reserve.
      answers_bytes: Per device, that `generation_steps` takes beside the step.
      memory_fraction: Share of a card's memory in that pool; 0 for the hardware's.
      device_kind: What JAX calls the GPUs of this machine; empty if the step is not
        for them.
    """

    name: str
    mesh: meshes.MeshSpec
    global_batch_size: int
    max_length: int
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    dtype: str = "bfloat16"
    attention: str = "cudnn"
    documents: RowDocuments = UNKNOWN
    hardware: str = "auto"
    memory_budget: float = 0.0
    answers_bytes: int = 0
    memory_fraction: float = 0.0
    device_kind: str = ""

    def __post_init__(self):
        for field in ("global_batch_size", "max_length"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: at least 1")
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype={self.dtype!r}: bfloat16 or float32")

    @property
    def mesh_sizes(self) -> tuple[int, ...]:
        """Devices along each mesh axis, slowest link first; (1,) for one."""
        return self.mesh.sizes or (1,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A decoder with its adapters and a step's rows, whatever the machine.

    Attributes:
      decoder: With the attention that was asked for.
      adapters: Which linear of which layer has an adapter of which rank.
      workload: Their sizes.
    """

    decoder: Decoder
    adapters: tuple[lora.AdapterSpec, ...]
    workload: Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningInputs:
    """What search and models take.

    Attributes:
      workload: Sizes of the model, its adapters and the step's rows.
      hardware: The machine's figures.
      mesh_sizes: Devices along each mesh axis, slowest link first; (1,) for one.
      budget_bytes: Per device, that the compiled step may take.
    """

    workload: Workload
    hardware: Hardware
    mesh_sizes: tuple[int, ...]
    budget_bytes: int


def dtype_of(asked: str, *, on_gpu: bool) -> str:
    """The dtype that `auto` stands for: bfloat16 on GPUs, float32 on CPUs."""
    if asked == "auto":
        return "bfloat16" if on_gpu else "float32"
    return asked


def check_rows(rows: int, num_rows: int, *, num_devices: int) -> None:
    """Refuses a step of many more rows than the data has.

    Args:
      rows: In an optimizer step.
      num_rows: Of the training data.
      num_devices: Which share a step's rows.

    Raises:
      ConfigError: Half of every step or more would be padding.
    """
    enough = -(-num_rows // num_devices) * num_devices
    if rows >= 2 * enough:
        raise ConfigError(
            f"a step takes {rows:,} rows, but the training data has {num_rows:,}: "
            f"{rows - num_rows:,} of every step would be padding; set "
            f"global_batch_size to {enough:,} or less (without it, it is "
            "per_device_train_batch_size x "
            f"gradient_accumulation_steps x {num_devices} devices)"
        )


def make(shape: ModelShape, request: StepRequest) -> PlanningInputs:
    """Joins model, adapters, batch, machine and budget; see `resolve` and `priced`."""
    return priced(resolve(shape, request).workload, request)


def resolve(
    shape: ModelShape, request: StepRequest, *, stack: Stack | None = None
) -> ResolvedModel:
    """Joins model, adapters and batch, whatever the machine.

    Args:
      shape: The model.
      request: The step; its `lora` is not used where there is a stack.
      stack: Many adapters that train together.

    Raises:
      ConfigError: Target modules that the model does not have.
    """
    decoder = shape.decoder(
        attention=request.attention, most_documents=request.documents.most
    )
    if stack is None:
        adapters = lora.resolve(
            request.lora, decoder.linears(), num_layers=shape.num_layers
        )
        rates = [request.lora.lora_dropout]
    else:
        adapters = stack.specs
        rates = [member.dropout_rate for member in stack.members]
    ranks = {spec.module: spec.max_rank for spec in adapters}
    shapes = decoder.shapes()
    workload = Workload(
        model=request.name,
        num_layers=shape.num_layers,
        hidden_size=shapes["embed"]["table"][1],
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=decoder.vocab_size,
        tied_embeddings="table" not in shapes["head"],
        linears=tuple(
            workloads.LinearSizes(
                name=linear.module.rpartition(".")[2],
                in_dim=linear.in_dim,
                out_dim=linear.out_dim,
                reads=linear.reads,
                rank=ranks.get(linear.module, 0),
            )
            for linear in decoder.linears()
        ),
        replicated_layer_weights=sum(
            math.prod(leaf[1:])
            for leaves in shapes["layers"].values()
            for name, leaf in leaves.items()
            if not any(shardings.LOGICAL_DIMS[name])
        ),
        qk_norm=shape.qk_norm,
        max_length=request.max_length,
        global_batch_size=request.global_batch_size,
        weight_dtype=request.dtype,
        activation_dtype=request.dtype,
        attention=request.attention,
        attended=request.documents.attended,
        dropout=any(rates),
        stacked=0 if stack is None else len(stack.members),
    )
    return ResolvedModel(decoder=decoder, adapters=adapters, workload=workload)


def priced(workload: Workload, request: StepRequest) -> PlanningInputs:
    """Joins a workload with the machine and the budget that were asked for.

    Raises:
      ConfigError: An unknown machine, or a budget that the card does not have or that
        holds nothing.
    """
    machine = machines.find(
        request.hardware,
        mesh_sizes=request.mesh_sizes,
        mesh=request.mesh.name,
        device_kind=request.device_kind,
    )
    if request.memory_fraction:
        machine = dataclasses.replace(machine, pool_fraction=request.memory_fraction)
    return PlanningInputs(
        workload=workload,
        hardware=machine,
        mesh_sizes=request.mesh_sizes,
        budget_bytes=budget_bytes(
            machine, request.memory_budget, answers_bytes=request.answers_bytes
        ),
    )


def budget_bytes(
    machine: Hardware, memory_budget: float, *, answers_bytes: int = 0
) -> int:
    """Bytes per device that the compiled step may take.

    Args:
      machine: Whose card and pool.
      memory_budget: GiB per device; 0 for the pool less the reserve and the answers.
      answers_bytes: What the copy of the base that answers while training takes.

    Raises:
      ConfigError: Less than 64 MiB, no number, more than the card has, or more than
        the answers leave.
    """
    given = memory_budget * 2**30
    left = machine.budget_bytes - answers_bytes
    if answers_bytes and left < max(given, LEAST_BUDGET_BYTES):
        raise ConfigError(
            f"generation_steps answers with a copy of the base on one device, which "
            f"takes {sizes.gib(answers_bytes)} and leaves {max(left, 0) / 2**30:.1f} "
            f"GiB, but memory_budget={memory_budget}; lower it, or set "
            "generation_steps=0 and use scripts/generate.py"
        )
    if memory_budget == 0:
        return left
    if not math.isfinite(given) or given < LEAST_BUDGET_BYTES:
        raise ConfigError(
            f"memory_budget={memory_budget} GiB per device: from "
            f"{sizes.gib(LEAST_BUDGET_BYTES)} ({LEAST_BUDGET_BYTES / 2**30}) on, or 0 "
            f"for {sizes.gib(left)}, the pool less the reserve"
        )
    if given > machine.memory_bytes:
        raise ConfigError(
            f"memory_budget={memory_budget} GiB per device, but {machine.device} has "
            f"{sizes.gib(machine.memory_bytes)}; lower it, or 0 for "
            f"{sizes.gib(left)}, the pool less the reserve"
        )
    return int(given)
