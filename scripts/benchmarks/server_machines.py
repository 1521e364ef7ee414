"""What a comparison on a server covers, and the machine that each setting stands for.

A setting is a link and a cap on memory: `slow` takes all traffic through host memory,
`fast` takes NVLink.
"""

import dataclasses

from mtuner_jax.configs import ConfigError
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.hardware.machines import Hardware
from mtuner_jax.runs import requests
from scripts.benchmarks import grids
from scripts.benchmarks.run_lists import Setting

SLOW, FAST = "slow", "fast"
# Of a cap, given to the planner: the slow link's program holds up to a layer more than
# the forecast says (docs/benchmarks/h200-planned.md).
BUDGET_SHARE = 0.97


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListConfig(grids.GridConfig):
    """What a comparison covers.

    Attributes:
      folder: Where list, plans and machines are written.
      devices: GPUs of the server: 2, 4, 8, ...
      platform: `gpu`, or `cpu` for a rehearsal.
      settings: `slow`, `fast` or both.
      tail_rows: Rows per device to try tails with.
      slow_cap: GiB per device on the slow link; 0 for none.
      fast_cap: GiB per device on the fast link; 0 for none.
      uncapped_fraction: Of a card's memory, where there is no cap.
      slow_hardware: Preset, name or file; `auto` is H200.
      fast_hardware: Preset, name or file; `auto` is H200.
      seconds: Of timed steps.
      layers: Fewer layers, for rehearsals; 0 for all.
    """

    folder: str = "runs/server"
    devices: int = 8
    platform: str = "gpu"
    settings: tuple[str, ...] = (SLOW, FAST)
    global_batch_sizes: tuple[int, ...] = (8, 32, 128)
    tail_rows: tuple[int, ...] = (14, 16)
    slow_cap: float = 40.0
    fast_cap: float = 0.0
    uncapped_fraction: float = 0.92
    slow_hardware: str = "auto"
    fast_hardware: str = "auto"
    seconds: float = 3.0
    layers: int = 0

    def __post_init__(self):
        if set(self.settings) - {SLOW, FAST} or self.devices < 2:
            raise ConfigError(
                f"settings={list(self.settings)}, devices={self.devices}: slow, fast "
                "or both, on 2 devices or more"
            )
        if self.platform not in ("gpu", "cpu"):
            raise ConfigError(f"platform={self.platform!r}: gpu or cpu")


def mesh_text(devices: int) -> str:
    """The mesh of so many devices in axes as small as possible, for `--mesh`."""
    return "x".join(map(str, meshes.parse("auto", num_devices=devices).sizes))


def machine_file(setting: str) -> str:
    """Name of the file with a setting's machine."""
    return f"hardware-{setting}.json"


def machine(config: ListConfig, mesh: meshes.MeshSpec, setting: str) -> Hardware:
    """The machine of a setting, its pool the cap.

    Raises:
      ConfigError: Nothing of that name, or a cap that the card does not have.
    """
    name = getattr(config, f"{setting}_hardware")
    if name == "auto":
        slow = {"NCCL_P2P_DISABLE": str(int(setting == SLOW))}
        # Fewer cards of a larger machine are priced as they are in it.
        count = config.devices if config.devices == 2 else 8
        name = machines.name_for("NVIDIA H200", count, environ=slow)
    found = machines.find(name, mesh_sizes=mesh.sizes, mesh=mesh.name)
    most_gib = found.memory_bytes / 2**30
    cap_gib = getattr(config, f"{setting}_cap") or config.uncapped_fraction * most_gib
    pool_bytes = int(cap_gib * 2**30)
    if not requests.LEAST_BUDGET_BYTES <= pool_bytes <= found.memory_bytes:
        raise ConfigError(
            f"{setting}_cap={pool_bytes / 2**30:g} GiB per device: {found.device} has "
            f"{most_gib:.1f}; from 1/16 to that, or 0 for no cap"
        )
    margin = f"{1 - BUDGET_SHARE:.0%} of the pool, see docs/server-runs.md"
    return dataclasses.replace(
        found,
        pool_fraction=pool_bytes / found.memory_bytes,
        reserve_bytes=pool_bytes - int(BUDGET_SHARE * pool_bytes),
        sources={**found.sources, "pool_fraction": "the cap", "reserve_bytes": margin},
    )


def setting(config: ListConfig, name: str, found: Hardware) -> Setting:
    """What processes of a setting get."""
    return Setting(
        name=name,
        environment={
            "NCCL_P2P_DISABLE": str(int(name == SLOW)),
            "NCCL_NVLS_ENABLE": "0",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{found.pool_fraction:.4f}",
        },
        pool_gib=round(found.pool_fraction * found.memory_bytes / 2**30, 2),
        capped=bool(getattr(config, f"{name}_cap")),
        hardware=found.name,
    )
