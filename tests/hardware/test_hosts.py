import pytest

from mtuner_jax.hardware import hosts

GROUP = "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"
OLD_GROUP = (
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
)
MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 5000 kB\n"}


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 0),
        (MEMINFO, 5000 * 1024),
        ({**MEMINFO, GROUP[0]: "3000\n", GROUP[1]: "1000\n"}, 2000),
        ({**MEMINFO, GROUP[0]: "max\n", GROUP[1]: "1000\n"}, 5000 * 1024),
        ({**MEMINFO, GROUP[0]: "3000\n", GROUP[1]: "4000\n"}, 1),
        ({OLD_GROUP[0]: "700\n", OLD_GROUP[1]: "500\n"}, 200),
    ],
)
def test_what_may_still_be_taken_is_the_least_of_machine_and_group(
    tmp_path, files, want
):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert hosts.available_bytes(root=tmp_path) == want
