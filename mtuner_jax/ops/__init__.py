"""Pure array functions, each kernel beside its plain-JAX reference."""
