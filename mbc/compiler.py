"""The compiler: a source becomes a plan. This page is the list of its stages and nothing else."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import TypeVar

from mbc.collection import uncollected
from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.hardware.target import find_device, free_bytes, free_host_bytes
from mbc.ir.text import network_text, training_text
from mbc.ir.transforms.training_step import differentiate
from mbc.ir.types import Precision
from mbc.ir.verify import verify_network, verify_training
from mbc.kernels import PROVIDERS
from mbc.kernels.interpreter import INTERPRETER
from mbc.measuring import can_measure, measure_missing, measure_requests
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.profiling_requests import unmeasured, untried
from mbc.optimize.search.search import Limits, may_fit, search
from mbc.options import Options, Policy
from mbc.plan.file import dump_plan
from mbc.plan.model import Plan
from mbc.plan.verify import verify_plan
from mbc.profile.locate import find_profile
from mbc.profile.measured_workspace import measured_workspace
from mbc.profile.model import calibrated
from mbc.source import Source
from mbc.units import show_size

T = TypeVar("T")
UNLIMITED_BYTES = 1 << 60  # a budget of so much asks for a plan without one


@uncollected()
def compile_plan(source: Source, options: Options, stages: Stages | None = None) -> Plan:
    """Plan the training step and the inference pass of one network. Raises MbcError for anything a user can mend."""
    stages = stages or Stages(options.dump_stages)

    # What the source says, with the user's settings put in.
    program = stages.run("parse", lambda: parse(source), lambda tree: pformat(tree, width=120))
    lowered = stages.run("lower", lambda: lower(program, options.settings, options.network))
    network = lowered.network
    stages.run("verify network", lambda: verify_network(network), lambda _: network_text(network))

    # One whole step: forward, backward and update; and inference.
    graph = stages.run(
        "differentiate", lambda: differentiate(network, lowered.optimizer, lowered.precision), training_text
    )
    stages.run("verify training graph", lambda: verify_training(graph))

    # What could run each operation on this GPU, and how fast.
    device = stages.run("find device", lambda: find_device(options.gpu), repr)
    policy = Policy.UNDIVIDED if "micro_batches" in options.without else options.policy
    rules = Rules(policy, lowered.deterministic, options.providers, options.micro_batch)
    providers = (INTERPRETER,) if graph.precision is Precision.FP64 else PROVIDERS
    host_bytes = free_host_bytes(device, options.gpu) if lowered.host_bytes is None else lowered.host_bytes
    limits = Limits(options.workspace_limit_bytes, options.workspace_total_bytes, options.without, host_bytes)
    budget_bytes = lowered.device_bytes or free_bytes(device, options.gpu)
    if device.memory_bytes < budget_bytes < UNLIMITED_BYTES and graph.precision is not Precision.FP64:
        warnings.warn(
            f"memory.device = {show_size(budget_bytes)} is more than the {device.name} has, "
            f"{show_size(device.memory_bytes)}: a plan that takes more than that cannot be loaded there",
            RuntimeWarning,
            stacklevel=2,
        )

    def worth_measuring() -> bool:
        """Nothing is measured for what cannot fit by its shapes: the search refuses it."""
        return not can_measure(device, options) or may_fit(
            CandidateTable(graph, device, providers, None, rules), limits, budget_bytes
        )

    if stages.run("bound", worth_measuring):
        stages.run("measure", lambda: measure_missing(graph, device, options, stages.announce))

    def tabulate() -> CandidateTable:
        profile = find_profile(device, options.profile, options.stale_profile)
        return CandidateTable(graph, calibrated(device, profile), providers, profile, rules)

    table = stages.run("find profile", tabulate)

    # Every decision: kernels, layouts, order, addresses, waits.
    plan = stages.run("search", lambda: search(table, limits, budget_bytes), dump_plan)
    # What was chosen by times between two measured sizes is measured, and chosen again; so is what cuDNN may not run,
    # since it was tried on more rows only.
    wanted = unmeasured if policy is Policy.ALL else untried
    while stages.run(
        "measure again", lambda plan=plan: measure_requests(wanted(plan), device, options, stages.announce)
    ):
        table = stages.run("find profile again", tabulate)
        plan = stages.run("search again", lambda table=table: search(table, limits, budget_bytes), dump_plan)

    # Nothing leaves the compiler that the independent verifier has not accepted.
    stages.run("verify plan", lambda: verify_plan(plan, measured_workspace(table.profile)))
    return plan


@dataclass
class Stages:
    """Runs stages by name, adds up how long each took, and writes down what each run gave when asked to."""

    dump_folder: str | None = None
    announce: Callable[[str], None] = lambda name: None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    runs: int = 0

    @property
    def measuring_seconds(self) -> float:
        return self.seconds.get("measure", 0.0) + self.seconds.get("measure again", 0.0)

    def run(self, name: str, stage: Callable[[], T], text: Callable[[T], str] | None = None) -> T:
        self.announce(name)
        started = time.perf_counter()
        result = stage()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.runs += 1
        if self.dump_folder and text is not None:
            self._dump(Path(self.dump_folder), name, text(result))
        return result

    def _dump(self, folder: Path, name: str, text: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.runs:02}_{name.replace(' ', '_')}.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            raise MbcError(
                "MBC187",
                f"cannot write stages to '{folder}': {error.strerror or error}",
                "choose another --dump-stages",
            ) from error
