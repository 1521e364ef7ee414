"""Comparison by relative norm, and the tolerance of each dtype, stated once."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

BOUNDS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2}


def assert_trees_close(got, want, *, bound=None):
    """||got - want|| <= bound * ||want|| for each leaf; a zero leaf must be zero."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)

    def scaled(leaf, other):
        norm = np.linalg.norm(np.asarray(other, np.float64))
        return np.asarray(leaf, np.float64) / (norm or 1.0)

    for path, want_leaf in jax.tree_util.tree_leaves_with_path(want):
        got_leaf = _at(got, path)
        limit = bound or BOUNDS[jnp.asarray(want_leaf).dtype.name]
        if not np.any(np.asarray(want_leaf)):
            limit = 0.0
        difference = np.linalg.norm(
            scaled(got_leaf, want_leaf) - scaled(want_leaf, want_leaf)
        )
        chex.assert_trees_all_close(
            difference,
            0.0,
            rtol=0,
            atol=limit,
            custom_message=f"relative norm of {jax.tree_util.keystr(path)}",
        )


def _at(tree, path):
    return dict(jax.tree_util.tree_leaves_with_path(tree))[path]
