"""Integers and texts that every room shares."""
