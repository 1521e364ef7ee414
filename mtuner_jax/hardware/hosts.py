"""The memory of this host, which virtual devices share."""

import pathlib

ROOT = pathlib.Path("/")
# (limit, in use) of a control group, of both versions.
_GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_bytes(*, root: pathlib.Path = ROOT) -> int:
    """Bytes that this process may still take; 0 where nobody says.

    Args:
      root: Where proc/ and sys/ are.
    """
    found = [*_of_machine(root / "proc/meminfo")]
    for limit, used in _GROUPS:
        most, taken = _number(root / limit), _number(root / used)
        if most is not None and taken is not None:
            found.append(max(1, most - taken))
    return min(found, default=0)


def _of_machine(meminfo: pathlib.Path) -> list[int]:
    if not meminfo.is_file():
        return []
    lines = meminfo.read_text().splitlines()
    return [
        1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
    ]


def _number(path: pathlib.Path) -> int | None:
    """What a file says; None for no file, and for `max`, which is no limit."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
