"""Plans of the paper's grid, compiled for GPUs that are not there: do they fit?"""

import json
import sys

import pytest

from mtuner_jax.inspection import compile_only
from scripts import plan

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.skipif(
        not compile_only.available(), reason=compile_only.unavailable_reason()
    ),
]


@pytest.mark.parametrize("mesh", ["pcie8", "nvlink8"])
@pytest.mark.parametrize("max_length", [1024, 2048, 4096, 8192])
@pytest.mark.parametrize("model", ["7b", "13b", "30b", "70b"])
def test_plan_fits_when_compiled(model, max_length, mesh, tmp_path, capsys):
    output = tmp_path / "plan.json"
    code = plan.main(
        [
            *("--model", f"llama2-{model}"),
            *("--mesh", mesh, "--max_length", str(max_length)),
            *(
                "--packing=false",
                "--global_batch_size",
                "8",
                "--verify",
                "true",
                "--json",
                str(output),
            ),
        ]
    )
    data = json.loads(output.read_text())
    compiled, predicted = data["compiled"], data["forecast"]["total"]
    total = compiled["inputs"] + compiled["outputs"] + compiled["temporaries"]
    gib = 2**30
    segments = " + ".join(
        f"{s['num_layers']}:{s['rest_axes']}{s['fwd_keep_axes']}{s['bwd_keep_axes']} "
        f"{s['saved']}"
        for s in data["plan"]["segments"]
    )
    with capsys.disabled():
        sys.stdout.write(
            f"\n| {model} | {max_length} | {mesh} | {segments} | "
            f"{predicted / gib:.2f} | {total / gib:.2f} | {predicted / total:.3f} | "
            f"{compiled['cudnn_workspace'] / gib:.2f} | "
            f"{data['budget_bytes'] / gib:.2f} | {1e3 * data['timeline']['step_s']:.0f}"
            f" | {data['search_s']:.1f} | {compiled['compile_s']:.0f} |\n"
        )
    assert code == 0
    assert predicted == pytest.approx(total, rel=0.05)
