"""Runs: a model family, a plan, an engine and data joined as a user asks for it."""
