"""Plans a training step for a machine that need not be there, and prices it.

python scripts/plan.py --model llama2-70b --mesh pcie8 --max_length 4096 \
    --global_batch_size 32 --output plan.json
python scripts/plan.py --model llama2-70b --mesh pcie8 --max_length 4096 \
    --global_batch_size 32 --plan plan.json --verify

Exit codes: 0 the plan fits; 2 something asked for cannot be; 3 it does not fit.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from mtuner_jax.configs import PlanConfig
from mtuner_jax.settings import programs

DOES_NOT_FIT = 3


def main(argv: list[str]) -> int:
    """Plans, prints and writes; returns the exit code."""
    return programs.run(argv, PlanConfig, plan, description=__doc__)


def plan(config: PlanConfig) -> int:
    """Plans; JAX is imported here, so that a wrong setting is told without it."""
    from models import llama_family
    from mtuner_jax.runs import plan_only
    from mtuner_jax.training import logs

    with logs.to_console():
        fits = plan_only.plan(config, llama_family.FAMILY, say=print)
    return 0 if fits else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
