"""The step of many adapters: one run through the model, each at its own pace.

A step runs rows that hold tokens of several adapters. Their gradients are added to
those of the steps before; an adapter whose global batch ends with this step is
updated with the mean over the batch's trained tokens, exactly as in a run of its own.
An adapter without tokens keeps parameters and moments untouched.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtuner_jax.engines.elastic import step_specs, steps
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.engines.many.optimizers import ManyAdamW, Moments
from mtuner_jax.engines.many.states import ManyMetrics, ManyState
from mtuner_jax.protocols.states import Batch, Params


def init_state(spec: StepSpec) -> ManyState:
    """Fresh adapters, placed as the plan says."""
    return jax.jit(lambda: _fresh(spec), out_shardings=state_shardings(spec))()


def abstract_state(spec: StepSpec) -> ManyState:
    """Shapes, dtypes and shardings of what `init_state` returns."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        jax.eval_shape(lambda: _fresh(spec)),
        state_shardings(spec),
    )


def state_shardings(spec: StepSpec) -> Any:
    """A `ManyState` of shardings: moments and sums lie where their adapters lie."""
    adapters = step_specs.named(spec, step_specs.adapter_specs(spec))
    whole: Any = NamedSharding(spec.mesh, P())
    return ManyState(adapters, adapters, adapters, adapters, whole, whole, whole, whole)


def build_train(
    spec: StepSpec,
    optimizer: ManyAdamW,
    *,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """Builds (state, weights, batch, arenas, ends) -> (state, metrics, arenas), jitted.

    `ends` is bool [A]: whose global batch ends with this step. `state` and `arenas` are
    donated; the others are those of `elastic.steps.build_train`. A step whose sums are
    not all finite changes nothing but its counter: one adapter's overflow may have
    reached the others', and whose it was is seen by running them one by one.
    """
    sums = steps.sharded_sums(spec)

    def train_step(
        state: ManyState,
        weights: Params,
        batch: Batch,
        kept: steps.Arenas,
        ends: jax.Array,
    ) -> tuple[ManyState, ManyMetrics, steps.Arenas]:
        grads, total, kept = sums(state.adapters, state.steps, weights, batch, kept)
        grads = jax.tree.map(jnp.add, state.grads, grads)
        added = state._replace(
            grads=grads,
            loss=state.loss + total.loss,
            tokens=state.tokens + total.tokens,
        )
        norms = optimizer.norms(grads)
        finite = jnp.all(jnp.isfinite(norms)) & jnp.all(jnp.isfinite(added.loss))
        after, metrics = _updated(optimizer, added, norms, ends)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state)
        metrics = metrics._replace(finite=finite)
        return new._replace(step=state.step + 1), metrics, kept

    whole = NamedSharding(spec.mesh, P())
    return jax.jit(
        train_step,
        donate_argnums=(0, 3),
        out_shardings=(
            state_shardings(spec),
            whole,
            NamedSharding(spec.mesh, P(spec.data_axes)),
        ),
        compiler_options=compiler_options,
    )


def _updated(
    optimizer: ManyAdamW, state: ManyState, norms: jax.Array, ends: jax.Array
) -> tuple[ManyState, ManyMetrics]:
    """The state after the optimizer steps of the adapters whose batches end."""
    share = 1 / jnp.maximum(state.tokens, 1)
    means = optimizer.scaled(state.grads, share.astype(norms.dtype))
    norms = norms * share.astype(norms.dtype)
    moments = optimizer.update(
        optimizer.clipped(means, norms),
        Moments(state.adapters, state.first_moments, state.second_moments),
        jnp.asarray(state.steps),
        ends,
    )
    metrics = ManyMetrics(
        loss=jnp.where(ends, state.loss * share, 0),
        grad_norm=jnp.where(ends, norms, 0),
        trained_tokens=jnp.where(ends, state.tokens, 0),
        finite=jnp.bool_(True),
    )
    left = (~ends).astype(norms.dtype)
    after = state._replace(
        adapters=moments.adapters,
        first_moments=moments.first,
        second_moments=moments.second,
        grads=optimizer.scaled(state.grads, left),
        loss=jnp.where(ends, 0, state.loss),
        tokens=jnp.where(ends, 0, state.tokens),
        steps=state.steps + ends.astype(jnp.int32),
    )
    return after, metrics


def _fresh(spec: StepSpec) -> ManyState:
    assert spec.stack is not None
    adapters = spec.stack.init()
    wide = jnp.promote_types(spec.dtype, jnp.float32)
    first, second, grads = (jax.tree.map(jnp.zeros_like, adapters) for _ in range(3))
    num = len(spec.stack.members)
    return ManyState(
        adapters=adapters,
        first_moments=first,
        second_moments=second,
        grads=grads,
        loss=jnp.zeros(num, wide),
        tokens=jnp.zeros(num, wide),
        steps=jnp.zeros(num, jnp.int32),
        step=jnp.int32(0),
    )
