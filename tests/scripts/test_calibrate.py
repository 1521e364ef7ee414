import json
import pathlib
import subprocess
import sys

from mtuner_jax.hardware import machines

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "calibrate.py"
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def calibrate(*arguments, folder):
    command = [sys.executable, str(SCRIPT), "--platform", "cpu", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={
            "MTUNER_CACHE_DIR": str(folder / "cache"),
            "MTUNER_HARDWARE_DIR": str(folder),
            "XLA_FLAGS": FLAGS,
        },
    )


def test_a_cpu_gets_a_file_of_its_own_and_a_table(tmp_path):
    done = calibrate("--mesh", "2x2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = machines.find("cpux4", mesh_sizes=(2, 2), directory=tmp_path)
    assert (found.name, found.device, found.mesh_sizes) == ("cpux4", "cpu", (2, 2))
    assert f"{found.kernel_s:.4g}" in done.stdout
    assert "tier1 bytes_per_s" in done.stdout
    assert "forward and backward:" in done.stdout
    assert "small sizes: these figures say nothing" in done.stdout
    assert "--hardware cpux4" in done.stdout
    record = json.loads((tmp_path / "cpux4.raw.json").read_text())
    assert record["sections"]["links"]["details"]["tier0"]["group"] == 4


def test_a_cpu_cannot_take_the_name_of_a_preset(tmp_path):
    done = calibrate("--mesh", "2", "--name", "h200x2", folder=tmp_path)
    assert done.returncode == 2
    text = "error: --name h200x2 is the preset of NVIDIA H200, this is cpu"
    assert text in done.stderr
    assert not list(tmp_path.glob("*.json"))


def test_the_output_has_to_be_found_as_json(tmp_path):
    done = calibrate("--mesh", "2", "--output", "box", folder=tmp_path)
    assert done.returncode == 2
    assert "--output box: --hardware knows files as .json" in done.stderr
