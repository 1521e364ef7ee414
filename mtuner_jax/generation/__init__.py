"""Answers of a model: decoding with a cache of keys and values, and sampling."""
