"""Frozen linears with a low-rank update; `api` dispatches, a back end is one file."""
