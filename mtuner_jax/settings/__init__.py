"""Flags and YAML files -> configs."""
