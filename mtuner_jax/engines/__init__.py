"""Builders of jitted steps from (model, plan, mesh, optimizer)."""
