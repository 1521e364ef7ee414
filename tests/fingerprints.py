"""Programs and plans as text, to show that a change leaves behaviour as it was.

python -m tests.fingerprints programs FOLDER   # lowered steps of 45 random plans
python -m tests.fingerprints plans FOLDER      # plan.json of a grid of settings

Run it before and after the change and compare the folders with `diff -r`: a change
that claims to change nothing shows no difference, or says what each one is.
"""

import itertools
import json
import os
import pathlib
import sys

import numpy as np

NUM_PROGRAMS = 45
# 70B: meshes with two budgets in GiB each (0 is the pool), lengths, rows of a step.
LARGE = {"pcie8": (20, 0), "nvlink8": (40, 0), "h200x8": (60, 100)}
LARGE_ROWS = ((1024, 4096, 8192), (8, 32, 128))
SMALL_MODELS = ("llama2-7b", "llama2-13b", "llama2-30b", "smollm2-135m")
SMALL_MESHES = ("pcie8", "l40sx8", "h200x2", "h200x1", "2x3", "4")
SMALL_ROWS = ((512, 8), (1024, 16), (4096, 8))
ATTENTION = (("cudnn", 0.0), ("xla", 0.05))  # with lora_dropout


def cells():
    """(model, mesh, max_length, rows, budget, attention, dropout) of all settings."""
    for mesh, budgets in LARGE.items():
        for length, rows, budget in itertools.product(*LARGE_ROWS, budgets):
            yield "llama2-70b", mesh, length, rows, budget, "cudnn", 0.0
    for model, mesh, (length, rows), (attention, dropout) in itertools.product(
        SMALL_MODELS, SMALL_MESHES, SMALL_ROWS, ATTENTION
    ):
        if length < 4096 or attention == "cudnn" or mesh == "h200x2":
            yield model, mesh, length, rows, 0, attention, dropout


def write_programs(folder):
    """Lowered text of the training and the evaluation step of random plans."""
    from mtuner_jax.engines.elastic import engine, steps
    from tests.engines.elastic import plan_cases

    dtype = np.dtype("float64")
    for seed in range(NUM_PROGRAMS):
        case = plan_cases.random_case(seed)
        model, specs, *_ = plan_cases.setting(case.variant, dtype)
        spec = steps.StepSpec(
            model=model,
            plan=case.plan,
            mesh=plan_cases.mesh_of(case.mesh),
            adapters=specs,
            dropout_rate=case.dropout,
            seed=7,
        )
        optimizer = plan_cases.OPTIMIZER
        given = engine.abstract_arguments(spec, optimizer, max_length=plan_cases.TOKENS)
        train = steps.build_train(spec, optimizer).lower(*given)
        evaluate = steps.build_eval(spec).lower(
            given.state.adapters, given.weights, given.batch
        )
        (folder / f"train{seed}.txt").write_text(train.as_text())
        (folder / f"eval{seed}.txt").write_text(evaluate.as_text())


def write_plans(folder):
    """Plan files of the grid, and what is forecast of each; errors where none fits."""
    from models import llama_family
    from mtuner_jax.configs import ConfigError, LoraConfig
    from mtuner_jax.devices import meshes
    from mtuner_jax.planning import plans
    from mtuner_jax.runs import pricing, requests, shapes

    for cell in cells():
        model, mesh, length, rows, budget, attention, dropout = cell
        text, told = "", {}
        try:
            request = requests.StepRequest(
                name=model,
                mesh=meshes.parse(mesh),
                global_batch_size=rows,
                max_length=length,
                lora=LoraConfig(lora_dropout=dropout),
                attention=attention,
                memory_budget=budget,
            )
            inputs = requests.make(shapes.shape(llama_family.FAMILY, model), request)
            report = pricing.search_plan(inputs)
            text = plans.to_json(report.plan)
            told = {
                "total": report.forecast.total_bytes,
                "step_s": report.timeline.step_s,
                "binds": report.limit.binds,
                "reason": report.limit.reason,
            }
        except ConfigError as error:
            text = f"ERROR {error}"
        name = "-".join(map(str, cell))
        (folder / f"{name}.plan.json").write_text(text)
        (folder / f"{name}.extra.json").write_text(json.dumps(told, sort_keys=True))


def main(what, name):
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_enable_x64", True)
    folder = pathlib.Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    {"programs": write_programs, "plans": write_plans}[what](folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
