"""Networks from their sources to running modules, and the gradients of one of their steps."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.hardware.target import find_device
from mbc.ir.graph import Network, Optimizer, Role, TrainingGraph
from mbc.ir.types import DType
from mbc.measure.need import Need
from mbc.options import Options, Policy
from mbc.passes.training_step import differentiate
from mbc.plan.model import Plan
from mbc.source import Source

Settings = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Job:
    """One network with settings, to be compiled for one GPU. `options`: further options of the compilation."""

    name: str
    source: Source
    settings: Settings = ()
    network: str | None = None
    gpu: str = "auto"
    options: Options = field(default_factory=Options)

    def lowered(self) -> Lowered:
        """Return the network and its training graph."""
        return lower(parse(self.source), self.settings, self.network)

    def plan(self) -> Plan:
        """Return the plan."""
        options = replace(self.options, gpu=self.gpu, settings=self.settings, network=self.network)
        return compile_plan(self.source, options)

    def needs(self, policy: Policy) -> tuple[Need, ...]:
        """Return the measurements that plans of this job can use under `policy`."""
        from mbc.optimize.search.profiling_requests import needs

        lowered = self.lowered()
        graph = differentiate(lowered.network, lowered.optimizer, lowered.precision)
        return needs(graph, find_device(self.gpu), policy)

    def with_settings(self, *pairs: tuple[str, str]) -> Job:
        """Return the job with more settings."""
        return replace(self, settings=(*self.settings, *pairs))

    def with_options(self, **changes: Any) -> Job:
        """Return the job with changed options."""
        return replace(self, options=replace(self.options, **changes))


@dataclass(frozen=True)
class Built:
    """A package on disk, or the reason why there is none."""

    job: Job
    folder: Path | None
    failed: str = ""
    plan_s: float = 0.0
    build_s: float = 0.0


def examples() -> list[Job]:
    """Return every network of `examples/`, with its own defaults."""
    jobs: list[Job] = []
    for path in sorted((ROOT / "examples").rglob("*.mbc")):
        source = Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for network in parse(source).networks:
            name = str(network.name)
            jobs.append(Job(name, source, (), name))
    return jobs


def example(name: str, *settings: tuple[str, str]) -> Job:
    """Return the example network `name`, or the only network of the file `name`.mbc."""
    jobs = examples()
    for job in jobs:
        if job.name == name or Path(job.source.name).stem == name:
            return job.with_settings(*settings)
    raise SystemExit(f"no example is called {name}; there are {', '.join(j.name for j in jobs)}")


SIZES = {"size", "image", "side", "pixels", "resolution", "image_size", "height", "width_pixels"}


def small(job: Job, batch: int = 2) -> Job:
    """Return the job with a small batch, few classes and the smallest image that the network takes."""
    names = {name for name, _ in job.lowered().settings}
    fixed = [("batch", str(batch))] if "batch" in names else []
    fixed += [("classes", "10")] if "classes" in names else []
    sized = sorted(names & SIZES)
    last: MbcError | None = None
    for pixels in (64, 75, 96, 128, 160, 227, 299) if sized else (0,):
        candidate = job.with_settings(*fixed, *((name, str(pixels)) for name in sized))
        try:
            candidate.lowered()
        except MbcError as error:
            last = error
        else:
            return candidate
    raise SystemExit(f"{job.name} takes no small image: {last}")


def with_full_norms(job: Job, values: int = 32) -> Job:
    """Return the job with a batch so large that every batch norm has at least `values` values for each channel.

    The variance of a handful of values may be near zero. Its reciprocal then magnifies rounding errors without limit,
    and a comparison would measure luck instead of arithmetic.
    """
    network = job.lowered().network
    counts: list[int] = []
    for operation in network.operations:
        if operation.kind == "batch_norm":
            kind = network.values[operation.inputs[0]].type
            counts.append(kind.elements // kind.shape[1])
    rows = network.values[network.inputs[0]].type.shape[0]
    if not counts or min(counts) >= values:
        return job
    return job.with_settings(("batch", str(-(-rows * values // min(counts)))))


def with_momentum(job: Job) -> Job:
    """Return the job with an optimizer that keeps the gradient of its first step (see `module_gradients`)."""
    rule = job.lowered().optimizer
    if rule.kind == "sgd" and not rule.momentum:
        return job.with_settings(("train.optimizer", "sgd(momentum=0.9)"))
    return job


def build(job: Job, folder: Path) -> Built:
    """Plan and build one job into `folder`; failures are returned, not raised."""
    from mbc.codegen.build import write_package
    from mbc.codegen.toolchain import find_toolchain

    started = time.perf_counter()
    try:
        plan = job.plan()
        planned = time.perf_counter()
        package = write_package((plan,), folder, find_toolchain(), overwrite=True)
        done = time.perf_counter()
    except Exception as error:
        return Built(job, None, f"{type(error).__name__}: {error}")
    if package.library is None:
        return Built(job, folder, "not built: " + ", ".join(m.name for m in package.missing))
    return Built(job, folder, "", planned - started, done - planned)


def build_all(jobs: Iterable[tuple[Job, Path]], workers: int) -> list[Built]:
    """Build several jobs side by side. A job whose process dies is a failure like any other."""
    # New processes, not copies of this one: a CUDA context and threads of BLAS do not survive a fork.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: list[tuple[Job, Future[Built]]] = [(job, pool.submit(build, job, folder)) for job, folder in jobs]
        return [_result(job, future) for job, future in waiting]


def _result(job: Job, future: Future[Built]) -> Built:
    try:
        return future.result()
    except Exception as error:
        return Built(job, None, f"{type(error).__name__}: {error}")


def open_module(where: Any, device: str, **options: Any) -> Any:
    """Open a module. `where` is a package's folder, or a plan for the interpreter."""
    from mbc.runtime.module import Module

    return Module(where, device=device, **options)


def set_states(module: Any, states: Mapping[str, np.ndarray]) -> None:
    """Set the module's parameters and statistics to `states`, and all other states to 0."""
    for name, shape in module.states.items():
        module.set_state(name, states.get(name, np.zeros(shape, np.float32)))


def random_inputs(network: Network | TrainingGraph, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return standard normal images, and labels of all classes that the outputs have."""
    random = np.random.default_rng(seed)
    classes = min((network.values[o].type.shape[1] for o in network.outputs if _is_class_map(network, o)), default=2)
    items: list[np.ndarray] = []
    for name in network.inputs:
        tensor = network.values[name].type
        if tensor.dtype is DType.INT32:
            items.append(random.integers(0, classes, tensor.shape).astype(np.int32))
        else:
            items.append(random.standard_normal(tensor.shape).astype(np.float32))
    return tuple(items)


def _is_class_map(network: Network | TrainingGraph, output: str) -> bool:
    return len(network.values[output].type.shape) >= 2


def initial_states(module: Any, network: Network) -> dict[str, np.ndarray]:
    """Return the parameters and statistics of the module, without the further states of a training graph."""
    held = set(module.states)
    return {s.value: np.asarray(module.state(s.value), np.float64) for s in network.states if s.value in held}


def module_gradients(
    module: Any, network: Network, rule: Optimizer, inputs: Sequence[np.ndarray]
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return loss, gradients and statistics of a step with fresh optimizer states.

    The gradient is read from the optimizer's state, which starts at zero and to which the step adds the gradient at
    full precision. The difference of two parameters would lose digits.
    """
    before = initial_states(module, network)
    loss = float(module.step(*inputs, lr=1e-3))
    gradients: dict[str, np.ndarray] = {}
    for state in network.states:
        name = state.value
        if network.values[name].role is not Role.PARAMETER:
            continue
        if f"{name}.momentum" not in module.states and f"{name}.m" not in module.states:
            continue  # no gradient reaches it
        if rule.kind == "sgd":
            moved = np.asarray(module.state(f"{name}.momentum"), np.float64)
            gradients[name] = moved - rule.weight_decay * before[name]
        else:
            gradients[name] = np.asarray(module.state(f"{name}.m"), np.float64) / (1 - rule.beta1)
    statistics = {
        s.value: np.asarray(module.state(s.value), np.float64)
        for s in network.states
        if network.values[s.value].role is Role.STATISTIC
    }
    return loss, gradients, statistics


# A parameter whose gradient is this much smaller than the largest has none: a bias before batch norm.
NO_GRADIENT = 1e-9


def errors(outcome: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the relative L2 distance for each parameter that has a gradient."""
    largest = max((float(np.linalg.norm(g)) for g in reference.values()), default=0.0)
    result: dict[str, float] = {}
    for name, expected in reference.items():
        norm = float(np.linalg.norm(expected))
        if norm > NO_GRADIENT * largest:
            result[name] = float(np.linalg.norm(np.asarray(outcome[name], np.float64) - expected)) / norm
    return result


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return float(np.median(list(values)))
