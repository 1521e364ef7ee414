"""What was compiled: memory, programs for absent GPUs."""
