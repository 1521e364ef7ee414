"""The frozen weights: where each array lies, loading, random ones."""
