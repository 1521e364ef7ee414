"""The edge: configuration, data, metrics and the training loop."""
