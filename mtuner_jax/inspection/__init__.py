"""What was compiled: collectives, memory, programs for absent GPUs."""
