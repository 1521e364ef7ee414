import os

# Tests compile far more than they compute.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ON_GPU = os.environ.get("MTUNER_TEST_PLATFORM") == "gpu"
if not ON_GPU:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """GPU tests run with MTUNER_TEST_PLATFORM=gpu, and then nothing else does."""
    for item in items:
        if (item.get_closest_marker("gpu") is not None) != ON_GPU:
            reason = "runs on GPUs" if not ON_GPU else "runs on CPUs"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def x64():
    """float64 everywhere, where a wrong term cannot hide in rounding."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
