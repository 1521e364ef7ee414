"""Bytes as people write them."""


def gib(num_bytes: float) -> str:
    """Formats bytes for people: `1.5 GiB`, `300.0 MiB`."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
