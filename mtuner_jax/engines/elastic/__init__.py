"""The engine that executes plans of elastic weights."""
