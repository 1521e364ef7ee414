"""The training step: what a plan says, as one jitted program.

The global batch is cut into accumulation x devices x microbatch rows. A device sums
the gradients of its rows' token losses over its microbatches; one reduction per step
adds them up, and one division by the trained tokens of the whole global step makes
the mean. Nothing else normalises.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax import shardings
from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError
from mtuner_jax.engines import layer_passes
from mtuner_jax.engines.protocols import Decoder
from mtuner_jax.engines.states import Batch, Params, StepMetrics, TrainState
from mtuner_jax.ops import arena as arenas
from mtuner_jax.ops import dropout, elastic, lora_linear, losses
from mtuner_jax.planning.plans import Plan


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


def cut(batch: Batch, plan: Plan) -> Batch:
    """Arranges a batch's rows as the plan runs them.

    Args:
      batch: numpy fields [B, T], B at most `plan.rows`.
      plan: The plan.

    Returns:
      numpy fields [accumulation, devices * microbatch, T]; missing rows are padding
      without loss.
    """
    missing = plan.rows - batch.input_ids.shape[0]
    if missing < 0:
        raise ConfigError(
            f"a batch of {batch.input_ids.shape[0]} rows does not fit into a plan of "
            f"{plan.rows} ({plan.accumulation} x {plan.num_devices} x "
            f"{plan.microbatch})"
        )
    return Batch(
        *(
            np.pad(np.asarray(field), ((0, missing), (0, 0))).reshape(
                plan.accumulation, -1, field.shape[-1]
            )
            for field in batch
        )
    )


def put(batch: Batch, mesh: Mesh) -> Batch:
    """Sends a cut batch to the devices, rows split over all of them."""
    sharding = NamedSharding(mesh, P(None, mesh.axis_names))
    return Batch(
        *(
            jax.make_array_from_callback(
                field.shape, sharding, lambda index, field=field: field[index]
            )
            for field in batch
        )
    )


def init_state(spec: StepSpec, optimizer: optax.GradientTransformation) -> TrainState:
    """Fresh adapters and optimizer state, replicated over the mesh."""
    replicated = NamedSharding(spec.mesh, P())

    def init(key):
        adapters = lora.init(spec.adapters, key)
        return TrainState(adapters, optimizer.init(adapters), jnp.int32(0))

    key = jax.random.fold_in(jax.random.key(spec.seed), dropout.stable_hash("init"))
    return jax.jit(init, out_shardings=replicated)(key)


def build_train(
    spec: StepSpec,
    optimizer: optax.GradientTransformation,
    *,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Builds the jitted step (state, weights, batch) -> (state, metrics).

    `state` is donated. `weights` is the tree of `base_weights.layout`, `batch` that
    of `put`.
    """
    mesh = spec.mesh
    axes = mesh.axis_names

    def local_sums(adapters, step, weights, batch):
        adapters = _varying(adapters, axes)
        zeros = jax.tree.map(jnp.zeros_like, adapters)

        def body(total, microbatch):
            sums = _microbatch(spec, adapters, weights, (step, microbatch))
            return jax.tree.map(jnp.add, total, sums), None

        no_loss = losses.TokenLoss(*_varying((_zero(weights), _zero(weights)), axes))
        sums, _ = jax.lax.scan(body, (zeros, no_loss), batch)
        return jax.lax.psum(sums, axes)

    sharded_sums = jax.shard_map(
        local_sums,
        mesh=mesh,
        in_specs=(P(), P(), weight_specs(spec), P(None, axes)),
        out_specs=P(),
    )

    def train_step(state, weights, batch):
        grads, total = sharded_sums(state.adapters, state.step, weights, batch)
        share = 1.0 / jnp.maximum(total.tokens, jnp.ones_like(total.tokens))
        grads = jax.tree.map(lambda grad: grad * share.astype(grad.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.adapters)
        metrics = StepMetrics(
            loss=total.loss * share,
            grad_norm=optax.tree.norm(grads),
            trained_tokens=total.tokens,
        )
        adapters: Any = optax.apply_updates(state.adapters, updates)
        return TrainState(adapters, opt_state, state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0, compiler_options=compiler_options)


def build_eval(
    spec: StepSpec, *, compiler_options: dict[str, Any] | None = None
) -> Any:
    """Builds the jitted (adapters, weights, batch) -> `losses.TokenLoss` sums."""
    axes = spec.mesh.axis_names

    def local_sums(adapters, weights, batch):
        adapters = _varying(adapters, axes)

        def body(total, microbatch):
            sums = _microbatch_loss(spec, adapters, weights, microbatch)
            return jax.tree.map(jnp.add, total, sums), None

        no_loss = losses.TokenLoss(*_varying((_zero(weights), _zero(weights)), axes))
        return jax.lax.psum(jax.lax.scan(body, no_loss, batch)[0], axes)

    sharded_sums = jax.shard_map(
        local_sums,
        mesh=spec.mesh,
        in_specs=(P(), weight_specs(spec), P(None, axes)),
        out_specs=P(),
    )
    return jax.jit(sharded_sums, compiler_options=compiler_options)


def weight_specs(spec: StepSpec) -> Params:
    """PartitionSpecs of the frozen weights' tree."""
    axes, shapes = spec.mesh.axis_names, spec.model.shapes()
    whole = shardings.rules(axes, rest_axes=0)
    specs: Params = {
        "embed": _specs(shapes["embed"], whole, stacked=False),
        "head": _specs(shapes["head"], whole, stacked=False),
        "segments": {},
    }
    for index, segment in enumerate(spec.plan.segments):
        rules = shardings.rules(axes, rest_axes=segment.rest_axes)
        specs["segments"][str(index)] = _specs(shapes["layers"], rules, stacked=True)
    return specs


def _specs(node, rules, *, stacked, leaf=""):
    if isinstance(node, dict):
        return {
            name: _specs(child, rules, stacked=stacked, leaf=name)
            for name, child in node.items()
        }
    dims = shardings.LOGICAL_DIMS[leaf]
    return rules.spec(*((None, *dims) if stacked else dims))


def _varying(tree, axes):
    """Marks arrays as different on each device: their sums are ours to place."""
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axes, to="varying"), tree)


def _zero(weights):
    """A scalar zero of the loss's dtype."""
    dtype = weights["head"]["norm"]["scale"].dtype
    return jnp.zeros((), np.promote_types(dtype, jnp.float32))


def _layer_run(spec, batch, step):
    drop = None
    if step is not None and spec.dropout_rate > 0.0:
        key = dropout.fold_in(dropout.key(spec.seed), step)
        places = dropout.Places(batch.sample_ids, batch.positions)
        drop = lora_linear.Dropout(key, places, spec.dropout_rate)
    return layer_passes.LayerRun(
        model=spec.model,
        axes=spec.mesh.axis_names,
        context=spec.model.context(batch),
        drop=drop,
    )


def _segment_inputs(spec, adapters, weights):
    scalings = lora.scaling_arrays(spec.adapters)
    inputs = []
    for index, start in enumerate(spec.plan.starts):
        end = start + spec.plan.segments[index].num_layers
        inputs.append(
            layer_passes.SegmentInputs(
                shards=weights["segments"][str(index)],
                adapters=jax.tree.map(lambda a, s=start, e=end: a[s:e], adapters),
                scalings={name: value[start:end] for name, value in scalings.items()},
                layer=jnp.arange(start, end, dtype=jnp.int32),
            )
        )
    return inputs


def _table(spec, weights, part):
    """The whole vocabulary table of the embedding or the head, [V, D]."""
    if "table" not in weights[part]:
        part = "embed"
    table = elastic.gather(weights[part]["table"], axes=spec.mesh.axis_names)
    return table[: spec.model.vocab_size]


def _head_inputs(x_BTD, batch):
    width = x_BTD.shape[-1]
    return (
        x_BTD.reshape(-1, width),
        batch.targets.reshape(-1),
        batch.weights.reshape(-1),
    )


def _tokens(batch, dtype):
    return jnp.sum(batch.weights).astype(dtype)


def _microbatch(spec, adapters, weights, inputs):
    """Gradient and loss sums of one microbatch of this device."""
    step, batch = inputs
    run = _layer_run(spec, batch, step)
    segments = _segment_inputs(spec, adapters, weights)
    x_BTD = spec.model.embed(_table(spec, weights, "embed"), batch.input_ids)
    arena = arenas.empty(spec.model.num_layers, x_BTD, axes=spec.mesh.axis_names)
    carry = (x_BTD, arena)
    saved = []
    for segment, segment_inputs in zip(spec.plan.segments, segments, strict=True):
        carry, kept = layer_passes.forward(run, segment, segment_inputs, carry)
        saved.append(kept)
    x_BTD, arena = carry
    loss, dx_BTD = _loss_and_grad(spec, weights, x_BTD, batch)
    carry, grads = (dx_BTD, arena), []
    for index in reversed(range(len(segments))):
        segment = spec.plan.segments[index]
        carry, segment_grads = layer_passes.backward(
            run, segment, segments[index], saved[index], carry
        )
        grads.insert(0, segment_grads)
    grads = jax.tree.map(lambda *parts: jnp.concatenate(parts), *grads)
    return grads, losses.TokenLoss(loss, _tokens(batch, loss.dtype))


def _loss_and_grad(spec, weights, x_BTD, batch):
    def norm(x_BTD):
        return spec.model.final_norm(weights["head"]["norm"], x_BTD)

    normed_BTD, pullback = jax.vjp(norm, x_BTD)
    x_SD, targets_S, weights_S = _head_inputs(normed_BTD, batch)
    loss, dx_SD = losses.chunked_value_and_grad(
        x_SD, _table(spec, weights, "head"), targets_S, weights_S
    )
    return loss, pullback(dx_SD.reshape(x_BTD.shape))[0]


def _microbatch_loss(spec, adapters, weights, batch):
    run = _layer_run(spec, batch, None)
    x_BTD = spec.model.embed(_table(spec, weights, "embed"), batch.input_ids)
    for segment, inputs in zip(
        spec.plan.segments, _segment_inputs(spec, adapters, weights), strict=True
    ):
        x_BTD = layer_passes.forward_only(run, segment, inputs, x_BTD)
    normed_BTD = spec.model.final_norm(weights["head"]["norm"], x_BTD)
    x_SD, targets_S, weights_S = _head_inputs(normed_BTD, batch)
    loss = losses.chunked(x_SD, _table(spec, weights, "head"), targets_S, weights_S)
    return losses.TokenLoss(loss, _tokens(batch, loss.dtype))
