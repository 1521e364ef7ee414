"""The training step: what a plan says, as one jitted program.

The global batch is cut into accumulation x devices x microbatch rows. A device sums
the gradients of its rows' token losses over its microbatches; one reduction per step
adds them up, and one division by the trained tokens of the whole global step makes
the mean. Nothing else normalises.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.adapters import lora
from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.engines.elastic import microbatches, step_specs
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.ops.cross_entropy.operands import TokenLoss
from mtuner_jax.planning.plans import Plan
from mtuner_jax.protocols.states import Batch, Params, StepMetrics, TrainState

Arenas = dict[str, Any]


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
    return jax.tree.map(
        lambda field: np.pad(np.asarray(field), ((0, missing), (0, 0))).reshape(
            plan.accumulation, -1, field.shape[-1]
        ),
        batch,
    )


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Where a cut batch lies: its rows, dim 1, are split over the data axes."""
    return NamedSharding(mesh, P(None, meshes.roles(mesh).data))


def put(batch: Batch, mesh: Mesh) -> Batch:
    """Sends a cut batch to the devices, rows split over them."""
    sharding = rows_sharding(mesh)
    return jax.tree.map(
        lambda field: jax.make_array_from_callback(
            field.shape, sharding, lambda index: field[index]
        ),
        batch,
    )


def init_state(spec: StepSpec, optimizer: optax.GradientTransformation) -> TrainState:
    """Fresh adapters and optimizer state, placed as the plan says."""

    def init(key: jax.Array) -> TrainState:
        adapters = lora.init(spec.adapters, key)
        return TrainState(adapters, optimizer.init(adapters), jnp.int32(0))

    shardings = state_shardings(spec, optimizer)
    return jax.jit(init, out_shardings=shardings)(lora.init_key(spec.seed))


def state_shardings(spec: StepSpec, optimizer: Any) -> Any:
    """A `TrainState` of shardings: moments lie where their adapters lie."""
    adapters = step_specs.named(spec, step_specs.adapter_specs(spec))
    replicated: Any = NamedSharding(spec.mesh, P())
    abstract = jax.eval_shape(lambda: lora.init(spec.adapters, jax.random.key(0)))
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, abstract),
        adapters,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(adapters, opt_state, replicated)


def init_arenas(spec: StepSpec, weights: Params, *, max_length: int) -> Arenas:
    """Memory that crosses the border of steps: copies kept by `bwd_keep`.

    It is never part of a checkpoint: at start and resume this gathers it anew.

    Returns:
      {part: [devices, rows, width]}, a device's own rows on each; empty where the plan
      keeps nothing.
    """
    parts = _kept_parts(spec, max_length=max_length)

    def fill(weights: Params) -> Arenas:
        return {
            part: microbatches.fill_arena(spec, weights, part, max_length=max_length)[
                None
            ]
            for part in parts
        }

    sharded = jax.shard_map(
        fill,
        mesh=spec.mesh,
        in_specs=(step_specs.weight_specs(spec),),
        out_specs=P(spec.data_axes),
    )
    return jax.jit(sharded)(weights) if parts else {}


def abstract_arenas(spec: StepSpec, *, max_length: int) -> Arenas:
    """Shapes and shardings of what `init_arenas` returns."""
    sharding = NamedSharding(spec.mesh, P(spec.data_axes))
    layouts = {
        part: step_specs.arena_layout(spec, part, max_length=max_length)
        for part in _kept_parts(spec, max_length=max_length)
    }
    return {
        part: jax.ShapeDtypeStruct(
            (spec.plan.num_devices, layout.rows, layout.width),
            spec.dtype,
            sharding=sharding,
        )
        for part, layout in layouts.items()
    }


def build_train(
    spec: StepSpec,
    optimizer: optax.GradientTransformation,
    *,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Builds the jitted (state, weights, batch, arenas) -> (state, metrics, arenas).

    `state` and `arenas` are donated. `weights` is the tree of `layouts.layout`,
    `batch` that of `put`, `arenas` that of `init_arenas`.
    """
    sums = sharded_sums(spec)

    def train_step(
        state: TrainState, weights: Params, batch: Batch, kept: Arenas
    ) -> tuple[TrainState, StepMetrics, Arenas]:
        adapters, opt_state = state.adapters, state.opt_state
        grads, total, kept = sums(adapters, state.step, weights, batch, kept)
        share = 1.0 / jnp.maximum(total.tokens, jnp.ones_like(total.tokens))
        grads = jax.tree.map(lambda grad: grad * share.astype(grad.dtype), grads)
        updates, opt_state = optimizer.update(grads, opt_state, adapters)
        metrics = StepMetrics(
            loss=total.loss * share,
            grad_norm=optax.tree.norm(grads),
            trained_tokens=total.tokens,
        )
        new_adapters: Any = optax.apply_updates(adapters, updates)
        return TrainState(new_adapters, opt_state, state.step + 1), metrics, kept

    return jax.jit(
        train_step,
        donate_argnums=(0, 3),
        out_shardings=(
            state_shardings(spec, optimizer),
            NamedSharding(spec.mesh, P()),
            NamedSharding(spec.mesh, P(spec.data_axes)),
        ),
        compiler_options=compiler_options,
    )


def build_eval(
    spec: StepSpec, *, compiler_options: dict[str, Any] | None = None
) -> Any:
    """Builds the jitted (adapters, weights, batch) -> `TokenLoss` sums."""
    axes = spec.data_axes
    adapter_specs = step_specs.adapter_specs(spec)

    def local_sums(adapters: Params, weights: Params, batch: Batch) -> TokenLoss:
        adapters = _whole(adapters, adapter_specs, axes)
        inputs = microbatches.Inputs(adapters, weights, None)

        def body(total: TokenLoss, microbatch: Batch) -> tuple[TokenLoss, None]:
            sums = microbatches.evaluate(spec, inputs, microbatch)
            return jax.tree.map(jnp.add, total, sums), None

        return jax.lax.psum(jax.lax.scan(body, _no_loss(spec), batch)[0], axes)

    sharded_sums = jax.shard_map(
        local_sums,
        mesh=spec.mesh,
        in_specs=(adapter_specs, step_specs.weight_specs(spec), P(None, axes)),
        out_specs=P(),
    )
    return jax.jit(sharded_sums, compiler_options=compiler_options)


def sharded_sums(spec: StepSpec) -> Any:
    """(adapters, step, weights, batch, kept) -> (gradients, `TokenLoss`, kept).

    Gradients and loss are sums over all tokens of the step and over all devices. With
    a stack of adapters, `step` is the steps of each and the loss that of each, [A].
    """
    axes = spec.data_axes
    adapter_specs = step_specs.adapter_specs(spec)

    def local_sums(
        adapters: Params, step: jax.Array, weights: Params, batch: Batch, kept: Arenas
    ) -> tuple[Params, TokenLoss, Arenas]:
        adapters = _whole(adapters, adapter_specs, axes)
        inputs = microbatches.Inputs(adapters, weights, step)
        max_length = batch.input_ids.shape[-1]
        sums = microbatches.Sums(
            grads=jax.tree.map(jnp.zeros_like, adapters),
            total=_no_loss(spec),
            arenas=_open_arenas(spec, kept, max_length=max_length),
        )

        def body(
            sums: microbatches.Sums, microbatch: Batch
        ) -> tuple[microbatches.Sums, None]:
            return microbatches.add(spec, inputs, sums, microbatch), None

        sums, _ = jax.lax.scan(body, sums, batch)
        grads, total = _reduced(sums, adapter_specs, axes)
        return grads, total, {part: sums.arenas[part][None] for part in kept}

    weight_specs = step_specs.weight_specs(spec)
    return jax.shard_map(
        local_sums,
        mesh=spec.mesh,
        in_specs=(adapter_specs, P(), weight_specs, P(None, axes), P(axes)),
        out_specs=(adapter_specs, P(), P(axes)),
    )


def _kept_parts(spec: StepSpec, *, max_length: int) -> list[str]:
    """Parts whose arena crosses the border of steps."""
    return [
        part
        for part in step_specs.PARTS
        if step_specs.arena_layout(spec, part, max_length=max_length).has_copies
    ]


def _open_arenas(spec: StepSpec, kept: Arenas, *, max_length: int) -> Arenas:
    """Arenas that came from the step before, and empty ones for the other parts."""
    opened = {}
    for part in step_specs.PARTS:
        if part in kept:
            opened[part] = kept[part][0]
        else:
            layout = step_specs.arena_layout(spec, part, max_length=max_length)
            opened[part] = microbatches.empty_arena(spec, layout)
    return opened


def _split_dim(spec: P) -> int | None:
    """The dim of an adapter that is split over devices, or None."""
    dims = [dim for dim, axes in enumerate(spec) if axes]
    return dims[0] if dims else None


def _whole(adapters: Params, specs: Params, axes: tuple[str, ...]) -> Params:
    """Whole adapters, marked as different on each device."""

    def whole(leaf: jax.Array, spec: P) -> jax.Array:
        dim = _split_dim(spec)
        if dim is None:
            # Else differentiating adds gradients up over devices layer by layer; we
            # do it once a step.
            return jax.lax.pcast(leaf, axes, to="varying")
        return jax.lax.all_gather(leaf, spec[dim], axis=dim, tiled=True)

    return jax.tree.map(whole, adapters, specs)


def _reduced(
    sums: microbatches.Sums, specs: Params, axes: tuple[str, ...]
) -> tuple[Params, TokenLoss]:
    """The one reduction of a step: gradients and loss over the data axes."""

    def reduced(leaf: jax.Array, spec: P) -> jax.Array:
        dim = _split_dim(spec)
        if dim is None:
            return jax.lax.psum(leaf, axes)
        return jax.lax.psum_scatter(leaf, spec[dim], scatter_dimension=dim, tiled=True)

    return jax.tree.map(reduced, sums.grads, specs), jax.lax.psum(sums.total, axes)


def _no_loss(spec: StepSpec) -> TokenLoss:
    """Zero sums, in at least float32; of each adapter where there is a stack."""
    shape = () if spec.stack is None else (len(spec.stack.members),)
    zero = jnp.zeros(shape, jnp.promote_types(spec.dtype, jnp.float32))
    zero = jax.lax.pcast(zero, spec.data_axes, to="varying")
    return TokenLoss(zero, zero)
