"""Decoders in Flax NNX and what ties them to Hugging Face checkpoints."""
