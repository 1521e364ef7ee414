"""Which samples of which adapters run together; no JAX."""
