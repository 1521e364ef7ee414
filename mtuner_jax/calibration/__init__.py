"""Measures a machine: rates, links, overlap, host transfers."""
