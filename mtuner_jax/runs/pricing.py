"""Plans with their prices: searched for, named, or read from a file."""

import dataclasses
import pathlib
from typing import Any

from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.devices import meshes
from mtuner_jax.hardware import machines
from mtuner_jax.planning import plans, reports
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.plans import Plan
from mtuner_jax.planning.searching import search, static_plans
from mtuner_jax.planning.workloads import Workload
from mtuner_jax.runs.requests import PlanningInputs


def search_plan(inputs: PlanningInputs) -> reports.Report:
    """The fastest plan that fits, beside the static settings.

    Raises:
      ConfigError: No plan fits.
    """
    found = search.fastest(
        inputs.workload,
        inputs.hardware,
        mesh_sizes=inputs.mesh_sizes,
        budget_bytes=inputs.budget_bytes,
    )
    report = reports.Report(
        workload=inputs.workload,
        hardware=inputs.hardware,
        budget_bytes=inputs.budget_bytes,
        plan=found.plan,
        timeline=found.timeline,
        forecast=found.forecast,
        found=found,
    )
    return compared(report)


def price(plan: Plan, inputs: PlanningInputs) -> reports.Report:
    """A given plan with its price; the plan has to be one for these inputs."""
    return reports.Report(
        workload=inputs.workload,
        hardware=inputs.hardware,
        budget_bytes=inputs.budget_bytes,
        plan=plan,
        timeline=timelines.replay(plan, inputs.workload, inputs.hardware),
        forecast=forecasts.forecast(plan, inputs.workload),
    )


def compared(report: reports.Report) -> reports.Report:
    """The same beside the best static settings of the same batch and budget."""
    statics = static_plans.best(
        report.workload,
        report.hardware,
        mesh_sizes=report.plan.mesh_sizes,
        budget_bytes=report.budget_bytes,
    )
    return dataclasses.replace(report, statics=statics)


def given_plan(
    name: str,
    workload: Workload,
    *,
    mesh_sizes: tuple[int, ...],
    rows: tuple[int, int],
    **choices: Any,
) -> Plan:
    """The plan that a user gives instead of a search.

    Args:
      name: `fsdp`, `replicated`, or of a plan's JSON file.
      workload: What the plan has to fit.
      mesh_sizes: Devices along each axis of the mesh it has to fit.
      rows: (rows that a device runs at once, times it does) of a static plan.
      **choices: Fields of a static plan and of its segment, as in `plans.static`.

    Raises:
      ConfigError: No such plan, or a file that `read_plan` refuses.
    """
    if name.endswith(".json"):
        return read_plan(name, workload, mesh_sizes)
    return plans.static(
        name=name,
        num_layers=workload.num_layers,
        mesh_sizes=mesh_sizes,
        rows=rows,
        weight_dtype=workload.weight_dtype,
        model=workload.shape_name,
        **choices,
    )


def check_named(config: RunConfig, mesh: meshes.MeshSpec, *, device_kind: str) -> None:
    """Looks for the plan and the machine that a run names, before data is read.

    Args:
      config: The run's.
      mesh: Its devices.
      device_kind: What JAX calls its GPUs; empty for virtual devices.

    Raises:
      ConfigError: No such file or name, or one that cannot be read.
    """
    if config.plan.endswith(".json"):
        open_plan(config.plan)
    if config.hardware != "auto":
        machines.find(
            config.hardware,
            mesh_sizes=mesh.sizes or (1,),
            mesh=mesh.name,
            device_kind=device_kind,
        )


def open_plan(name: str) -> Plan:
    """The plan of a file.

    Raises:
      ConfigError: No such file, or no plan.
    """
    path = pathlib.Path(name)
    if not path.is_file():
        raise ConfigError(f"plan={name!r}: no such file")
    return plans.read(path)


def read_plan(name: str, workload: Workload, mesh_sizes: tuple[int, ...]) -> Plan:
    """Reads a plan's file and refuses one that was made for something else.

    Args:
      name: Of the file.
      workload: What the plan has to fit.
      mesh_sizes: Devices along each axis of the mesh it has to fit.

    Raises:
      ConfigError: No such file, no plan, one for another model or mesh, of too few
        rows, or of another dtype.
    """
    plan = open_plan(name)
    asked, found = ("x".join(map(str, axes)) for axes in (mesh_sizes, plan.mesh_sizes))
    rows, dtype = workload.global_batch_size, workload.weight_dtype
    refusals = {
        f"has {plan.num_layers} layers, {workload.model} {workload.num_layers}; plan "
        "again for this model": plan.num_layers != workload.num_layers,
        f"is for a model of {plan.model}, {workload.model} is one of "
        f"{workload.shape_name}; plan again for this model": (
            plan.model not in ("", workload.shape_name)
        ),
        f"is for mesh {found}, this one is {asked}; plan again for this mesh, or "
        f"--mesh {found}": asked != found,
        f"runs {plan.rows} rows a step, the global batch is {rows}; plan again, or "
        f"--global_batch_size {plan.rows}": plan.rows < rows,
        f"is for weights in {plan.weight_dtype}, not {dtype}; --dtype "
        f"{plan.weight_dtype}, or plan again": plan.weight_dtype != dtype,
    }
    for refusal, applies in refusals.items():
        if applies:
            raise ConfigError(f"plan {name} {refusal}")
    return plan
