"""From a configuration to something that runs: plan, programs, weights.

With `--plan auto` a plan is searched for, compiled, and searched for again with less
memory where XLA needs more than the forecast said. Weights are loaded for a plan that
fits.
"""

import dataclasses
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from models import llama, llama_hf_names
from mtuner_jax.adapters import lora
from mtuner_jax.checkpoints import hf_import
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.devices import detection, meshes
from mtuner_jax.engines import compiling, profile_guided
from mtuner_jax.engines.elastic import steps
from mtuner_jax.inspection import compile_only
from mtuner_jax.numbers import sizes
from mtuner_jax.ops import attention
from mtuner_jax.planning import plans, reports
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.protocols.states import Params
from mtuner_jax.training import executors, run_dirs
from mtuner_jax.weights import layouts, random_weights
from scripts import opening, planning_inputs

_logger = logging.getLogger("scripts.train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What stays the same whichever plan runs.

    Attributes:
      config: The run's.
      opened: The model.
      mesh: The devices.
      mesh_spec: Their mesh by name.
      memory_fraction: Share of a card's memory in XLA's pool; 0 on CPUs.
      rows: Rows in an optimizer step.
      optimizer: Of the adapters.
      learning_rate: Optimizer steps done -> the next step's rate.
      run: Where the plan is written.
    """

    config: RunConfig
    opened: opening.Opened
    mesh: Mesh
    mesh_spec: meshes.MeshSpec
    memory_fraction: float
    rows: int
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    run: run_dirs.RunDir

    @property
    def on_gpu(self) -> bool:
        """Whether the mesh is one of GPUs."""
        return self.mesh.devices.flat[0].platform != "cpu"

    @property
    def dtype(self) -> str:
        """Of the frozen weights and of computation."""
        if self.config.dtype == "auto":
            return "bfloat16" if self.on_gpu else "float32"
        return self.config.dtype


class Builder:
    """Builds a job's setup, again with less memory where that is asked for.

    Attributes:
      job: What is built.
      model: The decoder.
      adapters: Which linears have adapters of which rank.
      workload: Sizes of model, adapters and batch.
      inputs: What the plan is priced by; None where the machine's figures are unknown
        and the plan needs none.
    """

    def __init__(self, job: Job):
        config = job.config
        implementation = attention.choose(
            config.attention,
            on_gpu=job.on_gpu,
            packing=config.packing,
            dtype=job.dtype,
        )
        self.job = job
        self.model = llama.Llama(
            job.opened.config, attention_implementation=implementation
        )
        self.adapters = lora.resolve(
            config.lora, self.model.linears(), num_layers=self.model.num_layers
        )
        request = self._request(implementation)
        self.workload = planning_inputs.make_workload(job.opened.config, request)
        self.inputs = self._price(request)
        # What a searched plan's forecast may come to, and what the last one's did.
        self._limit_bytes = self._forecast_bytes = self.budget_bytes
        self._expected = "not priced"
        _logger.info("model %s: %s", job.opened.name, job.opened.path)
        _logger.info(
            "%s", lora.describe(self.adapters, num_frozen=self.model.num_parameters)
        )
        _logger.info("attention: %s", implementation)

    @property
    def budget_bytes(self) -> int:
        """Bytes that a compiled step may take on a device; 0 if nobody knows."""
        return self.inputs.budget_bytes if self.inputs else 0

    def describe(self) -> str:
        """What the last plan was expected to take."""
        return self._expected

    def executor(self, setup: executors.Setup) -> executors.Executor:
        """What runs a setup, and has another one built where that is allowed."""
        config = self.job.config
        may_replan = config.plan == "auto" and not config.strict_plan
        return executors.Executor(
            setup,
            # XLA's figures for CPUs are too high to hold a run to.
            budget_bytes=self.budget_bytes if self.job.on_gpu else 0,
            rebuild=self.build if may_replan and self.job.on_gpu else None,
            strict=config.strict_plan,
        )

    def build(self, missing_bytes: int = 0) -> executors.Setup:
        """Plans, compiles, checks, and loads the weights.

        Args:
          missing_bytes: By which the plan before it exceeded the budget.

        Raises:
          ConfigError: No plan fits.
          OverBudgetError: It needs more than the budget, with `strict_plan`.
        """
        self._lower(missing_bytes)
        programs = self._programs(self._plan())
        over_bytes = self._over(programs)
        replans = executors.MAX_REPLANS if self.job.config.plan == "auto" else 0
        while over_bytes > 0 and replans:
            _logger.warning(
                "the plan takes %s more than the budget: planning again with that "
                "much less",
                sizes.gib(over_bytes),
            )
            replans -= 1
            self._lower(over_bytes)
            programs = self._programs(self._plan())
            over_bytes = self._over(programs)
        if over_bytes > 0:
            needed = self.budget_bytes + over_bytes
            executors.warn_over_budget(needed, self.budget_bytes)
        weights = self._load(programs.spec)
        arenas = steps.init_arenas(
            programs.spec, weights, max_length=self.job.config.max_length
        )
        return executors.Setup(programs=programs, weights=weights, arenas=arenas)

    def _lower(self, missing_bytes: int) -> None:
        """Has the next plan predicted to take that much less than the last one."""
        if missing_bytes > 0:
            self._limit_bytes = self._forecast_bytes - missing_bytes

    def _request(self, implementation):
        job, config = self.job, self.job.config
        return planning_inputs.Request(
            name=job.opened.name,
            mesh=job.mesh_spec,
            global_batch_size=job.rows,
            max_length=config.max_length,
            lora=config.lora,
            dtype=job.dtype,
            attention=implementation,
            hardware=config.hardware,
            memory_budget=config.memory_budget,
            memory_fraction=job.memory_fraction,
            device_kind=job.mesh.devices.flat[0].device_kind if job.on_gpu else "",
        )

    def _price(self, request):
        config = self.job.config
        try:
            return planning_inputs.make(self.job.opened.config, request)
        except ConfigError as error:
            if config.plan == "auto" or config.hardware != "auto":
                raise
            _logger.info("the plan has no price: %s", error)
            return None

    def _plan(self) -> plans.Plan:
        """The plan to run, the same on all processes, written to the run's folder."""
        plan = self._chosen()
        if jax.process_count() > 1:
            plan = plans.from_json(_from_first(plans.to_json(plan)))
        if plan.rows > self.job.rows:
            _logger.warning(
                "%d rows of each step are padding", plan.rows - self.job.rows
            )
        return plan

    def _chosen(self):
        """The plan that was asked for, told and written with its price."""
        config, inputs = self.job.config, self.inputs
        if inputs is None:
            plan = self._static()
            _logger.info("plan %s:\n%s", config.plan, plans.table(plan))
            self._write(plans.to_json(plan), None)
            return plan
        if config.plan == "auto":
            report = planning_inputs.search_plan(
                dataclasses.replace(inputs, budget_bytes=self._limit_bytes)
            )
            report = planning_inputs.compared(report)
        else:
            report = planning_inputs.price(self._static(), inputs)
        _logger.info("plan %s\n%s", config.plan, reports.text(report))
        self._forecast_bytes = report.forecast.total_bytes
        played, needs = report.timeline, sizes.gib(self._forecast_bytes)
        self._expected = (
            f"{1e3 * played.step_s:,.1f} ms a step and {needs} per device predicted "
            f"for {report.hardware.name}"
        )
        self._write(plans.to_json(report.plan), timelines.to_json(played))
        return report.plan

    def _static(self) -> plans.Plan:
        """The plan by name, or from a file."""
        config, mesh = self.job.config, self.job.mesh
        if config.plan.endswith(".json"):
            mesh_sizes = tuple(mesh.devices.shape)
            return planning_inputs.read_plan(config.plan, self.workload, mesh_sizes)
        per_device = -(-self.job.rows // mesh.size)
        microbatch = min(config.per_device_train_batch_size, per_device)
        saved = (
            plans.Saved.LAYER_INPUT
            if config.gradient_checkpointing
            else plans.Saved.ATTENTION_AND_GATES
        )
        tokens = mesh.size * microbatch * config.max_length
        several_gpus = self.job.on_gpu and mesh.size > 1
        return plans.static(
            name=config.plan,
            num_layers=self.model.num_layers,
            mesh_sizes=tuple(mesh.devices.shape),
            rows=(microbatch, -(-per_device // microbatch)),
            saved=saved,
            prefetch=several_gpus,
            merge_gathers=several_gpus,
            # Moving the tokens' vectors is cheaper than moving the table.
            embedding=(
                plans.Table.SPLIT
                if tokens < self.model.vocab_size
                else plans.Table.GATHERED
            ),
            weight_dtype=self.job.dtype,
            model=self.workload.shape_name,
        )

    def _write(self, plan: str, played: str | None) -> None:
        if jax.process_index() == 0:
            self.job.run.plan.write_text(plan)
            if played is not None:
                self.job.run.timeline.write_text(played)

    def _programs(self, plan: plans.Plan) -> executors.Programs:
        """The programs of a plan; on several GPUs the step is compiled by a profile."""
        job = self.job
        spec = steps.StepSpec(
            model=self.model,
            plan=plan,
            mesh=job.mesh,
            adapters=self.adapters,
            dropout_rate=job.config.lora.lora_dropout,
            seed=job.config.seed,
        )
        options = compiling.options(on_gpu=job.on_gpu, merge_gathers=plan.merge_gathers)
        guided = job.on_gpu and job.mesh.size > 1 and job.config.profile_guided
        cache = detection.jax_option("jax_compilation_cache_dir") or ""
        return executors.Programs(
            spec=spec,
            train=profile_guided.GuidedStep(
                steps.build_train(spec, job.optimizer),
                compiler_options=options,
                profile_directory=pathlib.Path(cache, "profiles") if guided else None,
            ),
            evaluate=steps.build_eval(spec, compiler_options=options),
            state_shardings=steps.state_shardings(spec, job.optimizer),
            learning_rate=job.learning_rate,
        )

    def _over(self, programs: executors.Programs) -> int:
        """Bytes by which the compiled step exceeds the budget, if that is known."""
        inputs = self.inputs
        needed = self._compiled_bytes(programs, inputs.hardware) if inputs else None
        if inputs is None or needed is None:
            return 0
        predicted = forecasts.forecast(programs.spec.plan, inputs.workload)
        over_bytes = needed - self.budget_bytes
        _logger.info(
            "memory per device: %s predicted, %s compiled, budget %s",
            sizes.gib(predicted.total_bytes),
            sizes.gib(needed),
            sizes.gib(self.budget_bytes),
        )
        if over_bytes > 0 and self.job.config.strict_plan:
            raise executors.OverBudgetError(needed, self.budget_bytes)
        return over_bytes

    def _compiled_bytes(self, programs, hardware) -> int | None:
        """What the step takes on a GPU; None where that cannot be known."""
        job = self.job
        arguments = compile_only.abstract_arguments(
            programs.spec,
            job.optimizer,
            max_length=job.config.max_length,
            dtype=jnp.dtype(job.dtype),
        )
        if job.on_gpu:
            compiled = programs.train.compile(*arguments)
            return compiling.compiled_bytes(compiled).total
        if not job.config.verify_plan:
            return None
        try:
            target = compile_only.target_of(hardware.device)
            mesh = compile_only.topology_mesh(target, programs.spec.plan.mesh_sizes)
        except ConfigError as error:
            _logger.info("memory was not checked by compiling: %s", error)
            return None
        result = compile_only.compile_train(
            dataclasses.replace(programs.spec, mesh=mesh),
            job.optimizer,
            max_length=job.config.max_length,
            dtype=jnp.dtype(job.dtype),
        )
        return result.allocated.total + result.cudnn_workspace_bytes

    def _load(self, spec: steps.StepSpec) -> Params:
        """The frozen weights in their shardings, from disk or random."""
        job = self.job
        dtype = jnp.dtype(job.dtype)
        abstract = layouts.layout(spec.model, spec.plan, spec.mesh, dtype=dtype)
        _logger.info(
            "frozen weights: %s in %s per device",
            sizes.gib(layouts.num_bytes(abstract)),
            dtype.name,
        )
        if job.config.random_init:
            key = jax.random.key(job.config.seed)
            table = layouts.table(spec.model, spec.plan, spec.mesh, dtype=dtype)
            return random_weights.draw(table, spec.mesh, key)
        names = layouts.locate(llama_hf_names.tensors(job.opened.config), spec.plan)
        return hf_import.load(job.opened.source, names, abstract)


def _from_first(text: str) -> str:
    """Process 0's text, on all processes."""
    data = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int64(data.size)))
    buffer = np.zeros(length, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = data
    sent: Any = multihost_utils.broadcast_one_to_all(buffer)
    return np.asarray(sent).tobytes().decode()
