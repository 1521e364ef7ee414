"""Weights in, adapters out, and resumable run checkpoints."""
