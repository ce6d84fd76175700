"""Mutants of plans as the search makes them, and their outcome: refused, or shown to change nothing.

There are seven plans: fused, offloading, recomputing, divided into micro-batches, on concurrent streams, of several
mini-batches a step, and one of the digits made with the bundled profile, by which its workspaces are verified. A mutant
that the verifier accepts must compute equal bits in every order of launches that streams and waits allow, and become
code. Mutants that only a library on a GPU can judge (whether it has the engine, or whether the workspace is large
enough) are counted separately, because the interpreter knows no engines.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbc.codegen.view import view
from mbc.errors import MbcError
from mbc.hardware.target import find_device
from mbc.kernels.providers import PROVIDERS
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.search.search import Limits, search
from mbc.plan.model import Kernel, Mode, Plan
from mbc.plan.verify import Verified, verify_plan
from mbc.plan.verify_source import verify_source
from mbc.profile.measured_workspace import measured_workspace
from mbc.profile.model import Profile, calibrated
from mbc.profile.paths import bundled_path
from mbc.profile.read_profile import read_profile
from mbc.runtime.launch_order import Transfers
from mbc.runtime.module import Module
from tests.graphs import training_graph
from tests.optimize.planned import H200, Favouring, kept_plan, planned_table, table
from tests.optimize.search import test_concurrent_stream
from tests.optimize.shared import EXAMPLES
from tests.plan.mutate import KINDS_OF_MUTATIONS, mutate
from tests.plan.mutate_graph import GRAPH_MUTATIONS

KINDS = (*KINDS_OF_MUTATIONS, *GRAPH_MUTATIONS)
OF_ENGINES = frozenset({"change_settings", "change_kernel", "cut_workspace", "drop_workspace"})


class Outcome(StrEnum):
    REFUSED = "refused"
    UNCHANGED = "unchanged"  # the mutation found nothing to change
    EQUAL = "equal"  # by execution, in all orders
    UNPROVABLE = "unprovable"  # equal but for what a library alone can say; listed by the verifier
    WRONG = "wrong"


def _within(network: str, share: float, *without: str) -> Plan:
    """Return a plan within `share` of the arena that keeping all values takes."""
    budget_bytes = int(share * kept_plan(network).predictions.arena_bytes) + H200.overhead_bytes
    return search(table(network), Limits(budget_bytes, without=frozenset(without)))


ACCUMULATING = """
network accumulating(batch = 4, classes = 3) {
  input image[batch, 2, 6, 6] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) @stem |> bn |> relu
  logits = x |> conv(4, 3, pad=1, bias=true) |> relu |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train {
  optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=1e-2)
  no_decay = norm_and_bias
  groups = (group("linear*", rate=2))
  frozen = "stem.*"
  clip_norm = 0.5
  clip_value = 0.1
  ema = 0.9
  accumulate = 2
}
"""


def _accumulating() -> Plan:
    return search(planned_table(ACCUMULATING, "accumulating"), Limits(1 << 40))


def _fused() -> Plan:
    favouring = tuple(Favouring(provider) for provider in PROVIDERS)
    graph = table("residual", "bf16").graph
    return search(CandidateTable(graph, H200, favouring, None, Rules()), Limits(1 << 40))


def _measured() -> Plan:
    device, source = find_device("h200"), EXAMPLES / "01_digits" / "net.mbc"
    graph = training_graph(source.read_text(encoding="utf-8"), ("train.precision", "bf16"))
    candidates = CandidateTable(graph, calibrated(device, profile()), PROVIDERS, profile(), Rules())
    return search(candidates, Limits(1 << 40))


PLANS: Mapping[str, Callable[[], Plan]] = {
    "fused": _fused,
    "offloading": lambda: _within("residual", 0.7, "recompute", "micro_batches"),
    "recomputing": lambda: _within("residual", 0.85, "offload", "micro_batches"),
    "divided": lambda: kept_plan("residual", "fp32", 2),
    "measured": _measured,
    "accumulating": _accumulating,
    "concurrent": lambda: test_concurrent_stream.plans("residual", "fp32")[1],
}


@functools.cache
def profile() -> Profile | None:
    """Return the bundled profile of the H200."""
    return read_profile(bundled_path("NVIDIA H200"))


def verified(name: str, plan: Plan) -> Verified:
    verified = verify_plan(plan, measured_workspace(profile() if name == "measured" else None))
    assert verify_source(plan)
    return verified


@functools.cache
def plan_of_kind(name: str) -> Plan:
    plan = PLANS[name]()
    plan = replace(plan, settings=(("train.precision", str(plan.graph.precision)),))
    verified(name, plan)
    return plan


@functools.cache
def right(name: str) -> dict[str, bytes]:
    plan = plan_of_kind(name)
    return results(plan, Transfers.IN_ORDER, plan.graph.step_batch)


def results(plan: Plan, transfers: Transfers, rows: int) -> dict[str, bytes]:
    """Return every state after two steps, the losses, and the results of inference."""
    with Module(plan, seed=3, device="cpu", transfers=transfers) as net:
        drawn = np.random.default_rng(0)
        shape = (rows, *plan.graph.values["image"].type.shape[1:])
        image = np.zeros(shape, np.float32)
        contents: dict[str, bytes] = {}
        for step in range(2):
            image = drawn.standard_normal(shape).astype(np.float32)
            loss = net.step(image, drawn.integers(0, 3, shape[0]), lr=0.05)
            contents[f"loss {step}"] = np.float64(loss).tobytes()
        outputs = net.forward(image[: plan.graph.batch])
        for number, output in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
            contents[f"output {number}"] = np.asarray(output).tobytes()
        return contents | {name: np.array(net.state(name)).tobytes() for name in net.states}


def outcome(name: str, kind: str, seed: int) -> tuple[Outcome, str]:
    """Return the outcome of one mutant, and the reason."""
    plan = plan_of_kind(name)
    mutant = GRAPH_MUTATIONS[kind](plan, random.Random(seed)) if kind in GRAPH_MUTATIONS else mutate(plan, kind, seed)
    if mutant == plan:
        return Outcome.UNCHANGED, ""
    try:
        unproved = verified(name, mutant).unproved
    except MbcError as error:
        return Outcome.REFUSED, error.code
    try:
        view(mutant)
        reordered = _adds_in_another_order(plan, mutant)
        for transfers in Transfers:
            if not _same(results(mutant, transfers, plan.graph.step_batch), right(name), reordered):
                return Outcome.WRONG, f"other bits with transfers {transfers}"
    except Exception as error:  # any exception means that the verifier missed a fault
        return Outcome.WRONG, f"{type(error).__name__}: {error}"
    if kind not in OF_ENGINES:
        return Outcome.EQUAL, ""
    providers = {work.provider for work in _changed_work(plan, mutant)}
    if providers <= unproved.keys():
        return Outcome.UNPROVABLE, ", ".join(sorted(providers))
    # What runs an operation is another kernel of mbc's that takes it, too.
    return (Outcome.EQUAL if kind == "change_kernel" else Outcome.WRONG), f"kernels of {', '.join(sorted(providers))}"


def _same(actual: Mapping[str, bytes], wanted: Mapping[str, bytes], reordered: bool) -> bool:
    """Return whether results have equal bits, or agree within rounding if a reduction adds in another order."""
    if actual == wanted or not reordered:
        return actual == wanted
    pairs = ((_numbers(key, actual[key]), _numbers(key, wanted[key])) for key in wanted)
    return actual.keys() == wanted.keys() and all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def _numbers(key: str, data: bytes) -> NDArray[Any]:
    """Return stored results as numbers: losses in fp64, the control block as bytes, all other values in fp32."""
    dtype = np.float64 if key.startswith("loss ") else np.uint8 if key == "control" else np.float32
    return np.frombuffer(data, dtype)


def _adds_in_another_order(plan: Plan, mutant: Plan) -> bool:
    before, after = _sums(plan), _sums(mutant)
    return before != after and list(map(sorted, before)) == list(map(sorted, after))


def _sums(plan: Plan) -> list[list[tuple[int, int]]]:
    """Return for every buffer to which launches add the rows of these launches, in order."""
    rows: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for title, program in (("train", plan.train), ("infer", plan.infer)):
        for launch in program.launches:
            for access in launch.accesses:
                if access.mode is Mode.ACCUMULATE:
                    first = launch.accesses[0].rows
                    rows.setdefault((title, access.buffer), []).append((first.start, first.stop))
    return [rows[key] for key in sorted(rows)]


def _changed_work(plan: Plan, mutant: Plan) -> list[Kernel]:
    """Return the kernels of launches that differ, or whose operands have other sizes."""
    changed = {i for i, (a, b) in enumerate(zip(plan.buffers, mutant.buffers, strict=False)) if a != b}
    kernels: list[Kernel] = []
    for before, after in ((plan.train, mutant.train), (plan.infer, mutant.infer)):
        for old, new in zip(before.launches, after.launches, strict=False):
            if old != new or any(access.buffer in changed for access in new.accesses):
                kernels += [launch.work for launch in (old, new) if isinstance(launch.work, Kernel)]
    return kernels
