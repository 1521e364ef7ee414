"""Causal attention within documents; `api` chooses, each back end is one file."""
