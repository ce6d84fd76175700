"""Generated host code of plans that copy and recompute.

Its calls, their streams and their waits are those of the plan, both launch by launch and captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mbc.codegen.view import view
from mbc.hardware.streams import Space
from mbc.plan.model import Copy, Kernel, Launch, Plan, Program
from tests.codegen.fakes import Call, assert_as_planned, compile_against_fake, loaded, run_against_fake
from tests.codegen.plans import EchoProvider
from tests.plan.offload import copies, offloaded_plan, recomputations
from tests.plan.peer import lent

PROVIDERS = {"mbc": EchoProvider()}


def with_kernels(plan: Plan) -> Plan:
    """Return the plan with kernels of mbc in place of all others, because the fakes record their arguments."""

    def replaced(launch: Launch) -> Launch:
        work = launch.work
        return launch if isinstance(work, Copy) else replace(launch, work=Kernel("mbc", work.name, (), 1.0, False))

    def program(old: Program) -> Program:
        return replace(old, launches=tuple(map(replaced, old.launches)))

    return replace(plan, train=program(plan.train), infer=program(plan.infer))


@pytest.mark.parametrize(("seed", "moved"), [(2, None), (5, None), (2, lent)], ids=["2", "5", "2 to a peer"])
def test_copies_run_on_streams_of_their_own_and_wait_as_planned(
    tmp_path: Path, seed: int, moved: Callable[[Plan], Plan] | None
) -> None:
    plan = with_kernels(offloaded_plan(seed))
    plan = plan if moved is None else moved(plan)
    assert copies(plan.train) > 1 and recomputations(plan.train) and plan.train.waits
    run = run_against_fake(plan, tmp_path, PROVIDERS)
    assert_as_planned(run, plan)
    # Which bytes, too: the log's integers of a copy are its size.
    sizes = [
        plan.buffers[a.buffer].size_bytes // plan.buffers[a.buffer].rows.count * a.rows.count
        for launch in plan.train.launches
        if isinstance(launch.work, Copy)
        for a in launch.accesses[:1]
    ]
    copied = [call.integers[0] for call in run.captured["train"] if isinstance(call, Call) and call.name == "copy"]
    assert copied == sizes


@pytest.mark.parametrize(("space", "title"), [(Space.HOST, "host"), (Space.PEER, "peer's")])
def test_too_little_memory_outside_is_refused_by_the_library_too(
    space: Space, title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = with_kernels(offloaded_plan(2))
    plan = plan if space is Space.HOST else lent(plan)
    library = loaded(compile_against_fake(view(plan, PROVIDERS), tmp_path))
    needed = plan.predictions.bytes_of(space)
    assert getattr(library.lib, f"mbc_{space}_bytes")() == needed > 256
    monkeypatch.setattr(library.lib, f"mbc_{space}_bytes", lambda: 256)
    assert library.create() == 1
    text = library.lib.mbc_last_error(None).decode()
    assert text == f"the {title} memory has 256 bytes, the plan needs {needed}"
