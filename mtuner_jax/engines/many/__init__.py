"""Many adapters in one run: their state, their optimizer, their step."""
