"""Stands in for the package `dew_flash_attn`: same calls, computed on the host."""

import itertools

import jax
import numpy as np


def _forward3(query, key, value, starts, longest, scale, causal, window):
    """Packed [T, N, H] -> output, log-sum-exp [N, T], by foreign code."""
    assert causal
    assert longest[0] == longest[1]
    results = (
        jax.ShapeDtypeStruct(query.shape, query.dtype),
        jax.ShapeDtypeStruct((query.shape[1], query.shape[0]), np.float32),
    )

    def run(query, key, value, starts):
        out, stats = np.zeros_like(query), np.zeros(results[1].shape, np.float32)
        for document in _slices(starts):
            weights, lse = _weights(query, key, document, scale, window)
            groups = query.shape[1] // key.shape[1]
            values = np.repeat(value[document], groups, axis=1)
            out[document] = np.einsum("nts,snh->tnh", weights, values)
            stats[:, document] = lse
        return out, stats

    return jax.pure_callback(run, results, query, key, value, starts[0])


def _backward3(
    grad, query, key, value, out, lse, starts, longest, scale, causal, window
):
    """Gradients of queries, keys and values."""
    assert causal
    assert longest[0] == longest[1]
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (query, key, value))

    def run(grad, query, key, value, out, lse, starts):
        dq, dk, dv = (np.zeros_like(x) for x in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        for document in _slices(starts):
            weights, again = _weights(query, key, document, scale, window)
            np.testing.assert_allclose(lse[:, document], again, rtol=1e-5, atol=1e-5)
            keys, values = (
                np.repeat(x[document], groups, axis=1) for x in (key, value)
            )
            d_weights = np.einsum("tnh,snh->nts", grad[document], values)
            delta = np.einsum("tnh,tnh->nt", grad[document], out[document])
            d_scores = weights * (d_weights - delta[:, :, None]) * scale
            dq[document] = np.einsum("nts,snh->tnh", d_scores, keys)
            split = (-1, key.shape[1], groups, key.shape[2])
            dk_all = np.einsum("nts,tnh->snh", d_scores, query[document])
            dv_all = np.einsum("nts,tnh->snh", weights, grad[document])
            dk[document] = dk_all.reshape(split).sum(axis=2)
            dv[document] = dv_all.reshape(split).sum(axis=2)
        return dq, dk, dv

    operands = (grad, query, key, value, out, lse, starts[0])
    return jax.pure_callback(run, results, *operands)


def _slices(starts):
    starts = np.asarray(starts)
    return [slice(a, b) for a, b in itertools.pairwise(starts) if b > a]


def _weights(query, key, document, scale, window):
    """Softmax weights [N, T, S] and their log-sum-exp within a document."""
    keys = np.repeat(key[document], query.shape[1] // key.shape[1], axis=1)
    scores = scale * np.einsum("tnh,snh->nts", query[document], keys)
    back = np.arange(len(keys))[:, None] - np.arange(len(keys))[None, :]
    seen = (back >= 0) & ((back <= window[0]) | (window[0] < 0))
    scores = np.where(seen[None], scores, -np.inf)
    top = scores.max(axis=-1)
    lse = top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))
    return np.exp(scores - lse[..., None]), lse
