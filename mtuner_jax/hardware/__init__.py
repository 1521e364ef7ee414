"""What machines can do, as data; no JAX."""
