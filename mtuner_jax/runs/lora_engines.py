"""The engine of a LoRA run: its plan, its compiled step, its weights.

With `plan: auto` a plan is searched for, compiled, and searched for again with less
memory where XLA needs more than the forecast said. Weights are loaded for a plan that
fits.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from mtuner_jax.adapters import lora
from mtuner_jax.adapters.stacks import Stack
from mtuner_jax.checkpoints import hf_import
from mtuner_jax.configs import ConfigError, RunConfig
from mtuner_jax.devices import detection, meshes
from mtuner_jax.devices.starting import StartedDevices
from mtuner_jax.engines.elastic.engine import ElasticEngine
from mtuner_jax.engines.elastic.step_specs import StepSpec
from mtuner_jax.hardware import hosts
from mtuner_jax.inspection import compile_only
from mtuner_jax.numbers import sizes
from mtuner_jax.numbers.documents import RowDocuments
from mtuner_jax.ops.attention import api as attention
from mtuner_jax.planning import plans, reports
from mtuner_jax.planning.costs import forecasts, timelines
from mtuner_jax.planning.plans import Plan
from mtuner_jax.protocols.states import Params
from mtuner_jax.runs import planned, pricing, requests
from mtuner_jax.runs.opening import OpenedModel
from mtuner_jax.training import executors, run_dirs
from mtuner_jax.weights import layouts, random_weights

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraJob:
    """What stays the same whichever plan runs.

    Attributes:
      config: The run's.
      opened: The model.
      devices: Those it runs on.
      rows: Rows in an optimizer step.
      documents: What they hold.
      optimizer: Of the adapters.
      learning_rate: Optimizer steps done -> the next step's rate.
      run: Where the plan is written.
    """

    config: RunConfig
    opened: OpenedModel
    devices: StartedDevices
    rows: int
    documents: RowDocuments
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    run: run_dirs.RunDir

    @property
    def stack(self) -> Stack | None:
        """Adapters that train together; None for a run of one."""
        return None

    def engine(
        self,
        spec: StepSpec,
        *,
        load_weights: Callable[[], Params],
        profile_directory: pathlib.Path | None,
    ) -> ElasticEngine:
        """The engine of a plan; nothing is loaded."""
        return ElasticEngine(
            spec=spec,
            optimizer=self.optimizer,
            max_length=self.config.max_length,
            load_weights=load_weights,
            profile_directory=profile_directory,
        )

    @property
    def dtype(self) -> str:
        """Of the frozen weights and of computation."""
        return requests.dtype_of(self.config.dtype, on_gpu=self.devices.on_gpu)

    @property
    def copy_dtype(self) -> str:
        """Of the copy of the base that answers: what one device computes fast in."""
        return "bfloat16" if self.devices.on_gpu else "float32"

    @property
    def copy_bytes(self) -> int:
        """Memory of that copy, on one device."""
        itemsize = jnp.dtype(self.copy_dtype).itemsize
        return self.opened.shape.num_parameters * itemsize

    def request(self) -> requests.StepRequest:
        """The step that is to be planned."""
        config, devices = self.config, self.devices
        answers = bool(config.generation_steps) and devices.on_gpu
        return requests.StepRequest(
            name=self.opened.name,
            mesh=devices.spec,
            global_batch_size=self.rows,
            max_length=config.max_length,
            lora=config.lora,
            dtype=self.dtype,
            attention=attention.choose(
                config.attention,
                device=attention.Device(
                    on_gpu=devices.on_gpu, capability=devices.capability
                ),
                packing=config.packing,
                dtype=self.dtype,
                head_dim=self.opened.shape.head_dim,
            ),
            documents=self.documents,
            hardware=config.hardware,
            memory_budget=config.memory_budget,
            answers_bytes=self.copy_bytes if answers else 0,
            memory_fraction=devices.memory_fraction,
            device_kind=devices.gpu_kind,
        )


class EngineBuilder:
    """Builds a job's engine, again with less memory where that is asked for.

    Attributes:
      job: What is built.
      model: The decoder with its adapters.
      expected: What the last plan is predicted to take, as a sentence.
    """

    def __init__(self, job: LoraJob):
        self.job = job
        request = job.request()
        self.model = requests.resolve(job.opened.shape, request, stack=job.stack)
        self.expected = "not priced"
        self._inputs = self._priced(request)
        self._host_bytes = 0 if job.devices.on_gpu else hosts.available_bytes()
        self._planner: planned.Planner | None = None
        self._accepted = False
        self._files: dict[pathlib.Path, str] = {}
        decoder, adapters = self.model.decoder, self.model.adapters
        _logger.info("model %s: %s", job.opened.name, job.opened.path)
        _logger.info("%s", lora.describe(adapters, num_frozen=decoder.num_parameters))
        _logger.info("attention: %s", request.attention)

    @property
    def budget_bytes(self) -> int:
        """Bytes that a compiled step may take on a device; 0 if nobody knows."""
        return self._inputs.budget_bytes if self._inputs else 0

    def executor(self, engine: ElasticEngine) -> executors.Executor:
        """What runs an engine, and has another one built where that is allowed."""
        on_gpu, strict = self.job.devices.on_gpu, self.job.config.strict_plan
        may_replan = self._planner is not None and on_gpu and not strict
        return executors.Executor(
            engine,
            # XLA's figures for CPUs are too high to hold a run to.
            budget_bytes=self.budget_bytes if on_gpu else 0,
            replan=self.replan if may_replan else None,
            strict=strict,
        )

    def build(self, accept: Callable[[], None]) -> ElasticEngine:
        """Plans, compiles, checks, and loads the weights.

        Args:
          accept: Called when nothing can be refused any more, before anything is
            written or loaded.

        Raises:
          ConfigError: No plan fits.
          OverBudgetError: It needs more than the budget, with `strict_plan`.
        """
        if self.job.config.plan == "auto":
            assert self._inputs is not None
            self._planner = planned.Planner(self._inputs, host_bytes=self._host_bytes)
            self._planner.fastest()
            engine, over_bytes = self._settled(self._planner)
        else:
            engine = self._engine(self._given())
            over_bytes = self._over_bytes(engine)
        if over_bytes > 0:
            needed = self.budget_bytes + over_bytes
            executors.warn_over_budget(needed, self.budget_bytes)
        accept()
        self._accepted = True
        self._write_files()
        engine.load()
        return engine

    def replan(self, missing_bytes: int, free: Callable[[], None]) -> ElasticEngine:
        """The loaded engine of a plan that fits (`executors.Replan`).

        Raises:
          NoSmallerPlanError: There is none; the plan that ran is the run's again.
        """
        planner = self._planner
        assert planner is not None
        running = planner.report
        try:
            planner.smaller(missing_bytes)
            free()  # compiling takes memory, too
            engine, over_bytes = self._settled(planner)
            if over_bytes > 0:
                planner.smaller(over_bytes)  # says why there is no other one
        except executors.NoSmallerPlanError:
            planner.report = running
            self._tell(running)
            raise
        engine.load()
        return engine

    def _settled(self, planner: planned.Planner) -> planned.Settled[ElasticEngine]:
        return planner.settle(
            lambda report: self._engine(self._tell(report)),
            over_bytes=self._over_bytes,
            tell=lambda missing_bytes: _logger.warning(
                "the plan takes %s more than the budget: planning again with that "
                "much less",
                sizes.gib(missing_bytes),
            ),
        )

    def _priced(self, request: requests.StepRequest) -> requests.PlanningInputs | None:
        """What plans are priced by; None where nobody knows and no plan needs it."""
        config = self.job.config
        try:
            return requests.priced(self.model.workload, request)
        except ConfigError as error:
            if config.plan == "auto" or config.hardware != "auto":
                raise
            _logger.info("the plan has no price: %s", error)
            return None

    def _given(self) -> Plan:
        """The plan by name or from a file, told and written."""
        job, config, workload = self.job, self.job.config, self.model.workload
        mesh = job.devices.mesh
        per_device = -(-job.rows // mesh.size)
        microbatch = min(config.per_device_train_batch_size, per_device)
        several_gpus = job.devices.on_gpu and mesh.size > 1
        # Moving the tokens' vectors can be cheaper than moving the table.
        few_tokens = mesh.size * microbatch * config.max_length < workload.vocab_size
        plan = pricing.given_plan(
            config.plan,
            workload,
            mesh_sizes=tuple(mesh.devices.shape),
            rows=(microbatch, -(-per_device // microbatch)),
            saved=(
                plans.Saved.LAYER_INPUT
                if config.gradient_checkpointing
                else plans.Saved.ATTENTION_AND_GATES
            ),
            prefetch=several_gpus,
            merge_gathers=several_gpus,
            embedding=plans.Table.SPLIT if few_tokens else plans.Table.GATHERED,
        )
        if self._inputs is not None:
            report = pricing.price(plan, self._inputs)
            planned.warn_of_host(report, self._host_bytes, name=config.plan)
            return self._tell(report)
        _logger.info("plan %s:\n%s", config.plan, plans.table(plan))
        self._write(plans.to_json(plan), None)
        return plan

    def _tell(self, report: reports.Report) -> Plan:
        """Logs a plan and writes it into the run's folder with its timeline."""
        played, config = report.timeline, self.job.config
        needed = sizes.gib(report.forecast.total_bytes)
        self.expected, text = f"{needed} per device", plans.table(report.plan)
        if self.job.devices.on_gpu or _asks_for_prices(config):
            text = reports.text(report)
            self.expected = (
                f"{1e3 * played.step_s:,.1f} ms a step and {needed} per device "
                f"predicted for {report.hardware.name}"
            )
        _logger.info("plan %s\n%s", config.plan, text)
        self._write(plans.to_json(report.plan), timelines.to_json(played))
        return report.plan

    def _write(self, plan: str, played: str | None) -> None:
        self._files[self.job.run.plan] = plan
        if played is not None:
            self._files[self.job.run.timeline] = played
        if self._accepted:
            self._write_files()

    def _write_files(self) -> None:
        """Writes the last plan, once the run's folder may be written to."""
        if jax.process_index() == 0:
            for path, text in self._files.items():
                run_dirs.replace(path, text)

    def _engine(self, plan: Plan) -> ElasticEngine:
        """The engine of a plan, the same on all processes; nothing is loaded."""
        job = self.job
        if jax.process_count() > 1:
            plan = plans.from_json(_from_first(plans.to_json(plan)))
        if plan.rows > job.rows:
            _logger.warning("%d rows of each step are padding", plan.rows - job.rows)
        spec = StepSpec(
            model=self.model.decoder,
            plan=plan,
            mesh=job.devices.mesh,
            adapters=self.model.adapters,
            dropout_rate=job.config.lora.lora_dropout,
            seed=job.config.seed,
            stack=job.stack,
        )
        several_gpus = job.devices.on_gpu and spec.mesh.size > 1
        cache = detection.jax_option("jax_compilation_cache_dir") or ""
        profiles = pathlib.Path(cache, "profiles")
        guided = several_gpus and job.config.profile_guided
        return job.engine(
            spec,
            load_weights=lambda: _load(job, spec),
            profile_directory=profiles if guided else None,
        )

    def _over_bytes(self, engine: ElasticEngine) -> int:
        """Bytes by which the compiled step exceeds the budget, if that is known."""
        inputs = self._inputs
        needed = self._needed_bytes(engine, inputs.hardware.device) if inputs else None
        if inputs is None or needed is None:
            return 0
        predicted = forecasts.forecast(engine.spec.plan, inputs.workload)
        _logger.info(
            "memory per device: %s predicted, %s compiled, budget %s",
            sizes.gib(predicted.total_bytes),
            sizes.gib(needed),
            sizes.gib(inputs.budget_bytes),
        )
        if needed > inputs.budget_bytes and self.job.config.strict_plan:
            raise executors.OverBudgetError(needed, inputs.budget_bytes)
        return needed - inputs.budget_bytes

    def _needed_bytes(self, engine: ElasticEngine, device: str) -> int | None:
        """What the step takes on a GPU; None where that cannot be known."""
        if self.job.devices.on_gpu:
            return engine.compiled_bytes()
        if not self.job.config.verify_plan:
            return None
        spec = engine.spec
        try:
            target = compile_only.target_of(device)
            mesh = compile_only.topology_mesh(target, spec.plan.mesh_sizes)
        except ConfigError as error:
            _logger.info("memory was not checked by compiling: %s", error)
            return None
        result = compile_only.compile_engine(engine.on(mesh))
        return result.allocated.total + result.cudnn_workspace_bytes


def _asks_for_prices(config: RunConfig) -> bool:
    """Whether a run on virtual devices names the machine that it stands in for.

    Without, the figures of some card say nothing of it.
    """
    return config.mesh in meshes.PRESETS or config.hardware != "auto"


def _load(job: LoraJob, spec: StepSpec) -> Params:
    """The frozen weights in their shardings, from disk or random."""
    abstract = jax.tree.map(lambda row: row.abstract(spec.mesh), spec.table)
    held = sizes.gib(layouts.num_bytes(abstract))
    _logger.info("frozen weights: %s in %s per device", held, job.dtype)
    if job.opened.source is None:
        key = jax.random.key(job.config.seed)
        return random_weights.draw(spec.table, spec.mesh, key)
    names = layouts.locate(job.opened.shape.tensors(), spec.plan)
    return hf_import.load(job.opened.source, names, abstract)


def _from_first(text: str) -> str:
    """Process 0's text, on all processes."""
    data = np.frombuffer(text.encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int64(data.size)))
    buffer = np.zeros(length, np.uint8)
    if jax.process_index() == 0:
        buffer[:] = data
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes().decode()
