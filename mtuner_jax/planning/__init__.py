"""What a step holds, when, and for how long; numpy only, no JAX."""
