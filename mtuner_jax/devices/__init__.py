"""Accelerators, platforms, meshes and how arrays lie on them."""
