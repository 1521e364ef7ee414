"""What rooms know of each other's parts: decoders, batches, states."""
