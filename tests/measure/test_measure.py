"""Measuring on a simulated workbench. Tested is which kernels are tried, left out, or left to a later run."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mbc.errors import MbcError
from mbc.hardware.transfers import HostLink, estimated_link, link_constants, measured_link
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Candidate, Request
from mbc.measure import measure as measuring
from mbc.measure.clock import Times
from mbc.measure.gpu import DoesNotFit
from mbc.measure.measure import Summary, measure_on
from mbc.measure.need import Decision, Need
from mbc.measure.offers import Offer, Offered
from mbc.measure.protocols import Attempt, GpuFailed
from mbc.measure.size_ladder import Ladder
from mbc.measuring import missing
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.profile.model import Identity, Measurement
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import signature

LINK = replace(estimated_link(5, 16), to_host_gb_s=44.0, measured=True)
LIMIT = 1 << 30
MIB = 1 << 20
Time = Callable[[int], float]


@dataclass(frozen=True)
class Kernel:
    """A candidate whose time (us) and workspace (bytes) are functions of the rows."""

    name: str
    time: Time
    workspace: Callable[[int], int] = lambda rows: 0
    layout: Layout = Layout.CHANNELS_FIRST
    refused: str = ""
    deterministic: bool = True
    spread: float = 0.0
    estimate_us: float = 0.0
    asked_to_add: bool = False
    adds: bool = True
    times: list[float] = field(default_factory=list[float])  # factors of one timing after another

    def offer(self, rows: int) -> Offer:
        settings = (("kernel", sum(map(ord, self.name))),)
        layouts = (self.layout,) * 3
        return Offer(
            Candidate("cudnn", "convolution", settings, layouts, self.workspace(rows), self.estimate_us, False,
                      self.deterministic, self.asked_to_add)
        )  # fmt: skip


@dataclass
class Table:
    """A simulated workbench, stand and place in one class. `log`: its actions."""

    kernels: Sequence[Kernel]
    spare: Sequence[Kernel] = ()
    log: list[str] = field(default_factory=list[str])
    seconds: float = 0.0
    rows: int = 0
    stop_at: str = ""
    opened: int = 0
    too_large: bool = False
    no_link: bool = False
    error: MbcError | None = None

    def identity(self) -> Identity:
        return Identity("NVIDIA H200", "sm_90", 132, "580.1", 91900, "2026-11-21")

    def warm(self, precision: Precision) -> None:
        self.log.append("warm")

    def graph_gap_us(self, precision: Precision) -> float:
        return 1.25

    def host_link(self, precision: Precision) -> HostLink:
        self.log.append("link")
        if self.no_link:
            raise DoesNotFit("no pinned memory")
        return LINK

    def offers(self, request: Request, workspace_limit_bytes: int) -> Offered:
        rows = request.inputs[0].shape[0]

        def within(kernels: Sequence[Kernel]) -> tuple[Offer, ...]:
            offers = (k.offer(rows) for k in kernels)
            return tuple(o for o in offers if o.candidate.workspace_bytes <= workspace_limit_bytes)

        return Offered(within(self.kernels), within(self.spare), ("what offers leave out",))

    @contextmanager
    def open(self, need: Need) -> Generator[Table, None, None]:
        if self.error is not None:
            raise self.error
        if self.too_large:
            raise DoesNotFit("1 byte is needed, 0 are left")
        self.opened += 1
        yield self

    @contextmanager
    def at(self, request: Request, offered: Sequence[Offer]) -> Generator[Table, None, None]:
        self.rows = request.inputs[0].shape[0]
        yield self

    def _kernel(self, offer: Offer) -> Kernel:
        return next(k for k in (*self.kernels, *self.spare) if k.offer(1).key == offer.key)

    def attempt(self, offer: Offer, hopeless_us: float, skip_us: float = math.inf) -> Attempt:
        kernel = self._kernel(offer)
        if kernel.time(self.rows) > skip_us:
            self.log.append(f"probe {kernel.name} {self.rows}")
            return Attempt(offer, kernel.time(self.rows), -1.0, skipped=True)
        self.log.append(f"{kernel.name} {self.rows}")
        self.seconds += 1.0
        if self.stop_at == self.log[-1]:
            raise KeyboardInterrupt
        if kernel.refused == "fails":
            raise GpuFailed("an illegal memory access was encountered")
        once_us = kernel.time(self.rows)
        return Attempt(offer, once_us, 1e-7, kernel.refused, once_us > hopeless_us)

    def adds(self, attempt: Attempt) -> bool:
        return self._kernel(attempt.offer).adds

    def time(self, attempt: Attempt, budget_us: float, accumulate: bool = False) -> Times:
        kernel = self._kernel(attempt.offer)
        if accumulate:
            return Times(kernel.time(self.rows) + 1, 0.0)
        self.log.append(f"time {kernel.name} {self.rows} {budget_us:g}")
        factor = kernel.times.pop(0) if kernel.times else 1.0
        return Times(kernel.time(self.rows) * factor, kernel.spread * kernel.time(self.rows))

    def tried(self) -> list[str]:
        return [line for line in self.log if not line.startswith(("time", "warm", "probe", "link"))]


def need(sizes: Sequence[int], weight_us: float = 1.0, channels: int = 8) -> Need:
    def request(rows: int) -> Request:
        x = TensorType((rows, channels, 6, 5), DType.FP32)
        w = TensorType((channels, channels, 3, 3), DType.FP32)
        return Request("convolution", Convolution((6, 5), (3, 3), (1, 1), (1, 1, 1, 1)), (x, w), (x,), Precision.FP32)

    return Need(tuple(request(rows) for rows in sizes), weight_us)


def run(table: Table, path: Path, *needs: Need, limit: int = LIMIT, seconds: float = math.inf, again: bool = False,
        progress: Callable[..., None] = lambda *a: None, link: bool = True,
        decide: Callable[..., Decision] | None = None) -> Summary:  # fmt: skip
    return measure_on(table, needs, path, seconds, limit, progress, again, link, lambda: table.seconds, decide)


def measurements_of(path: Path, asked: Need, place: int = 0) -> dict[int, Measurement]:
    """Return the measurements of a request by the number in their settings."""
    measured = read_profile(path).measurements[signature(asked.requests[place])]
    return {m.settings[0][1]: m for m in measured}


def of(measurements: dict[int, Measurement], kernel: Kernel) -> Measurement:
    return measurements[kernel.offer(1).candidate.settings[0][1]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.sqlite"


FAST = Kernel("fast", lambda rows: 10.0 * rows, lambda rows: rows * MIB)  # its workspace shrinks with the size
LEAN = Kernel("lean", lambda rows: 20.0 * rows)
SLOW = Kernel("slow", lambda rows: 100.0 * rows)


def test_times_and_constants_are_recorded(path: Path) -> None:
    asked = need([8])
    table = Table([FAST, LEAN])
    summary = run(table, path, asked)
    assert summary == Summary(measured=1, candidates=2)
    fast = of(measurements_of(path, asked), FAST)
    assert (fast.time_us, fast.accumulate_us, fast.dominated, fast.error) == (80.0, 0.0, False, 1e-7)
    profile = read_profile(path)
    assert profile.constants["graph_gap_us"] == 1.25
    extent = profile.extents[signature(asked.undivided)]
    assert (extent.workspace_limit_bytes, extent.left_out) == (LIMIT, "what offers leave out")
    assert table.log[0] == "warm"


def test_copies_are_measured_once_a_profile(path: Path) -> None:
    asked = need([8])
    table = Table([FAST])
    run(table, path, asked, link=False)
    assert "link" not in table.log and measured_link(read_profile(path).constants) is None
    # A profile that lacks nothing else gets it too, and what it knows stays.
    before = read_profile(path)
    again = Table([FAST])
    assert run(again, path, asked).measured == 0
    profile = read_profile(path)
    assert again.log == ["warm", "link"] and measured_link(profile.constants) == LINK
    assert profile.constants == {**before.constants, **link_constants(LINK)}
    third = Table([FAST])
    run(third, path, asked)
    assert third.log == []
    run(third, path, asked, again=True)
    assert third.log.count("link") == 1


def test_copies_that_cannot_be_measured_stop_nothing(path: Path) -> None:
    asked = need([8])
    summary = run(Table([FAST], no_link=True), path, asked)
    assert summary.link_failure == "no pinned memory" and summary.measured == 1 and summary.failures == ()
    assert run(Table([FAST]), path, asked).link_failure == ""
    assert measured_link(read_profile(path).constants) == LINK


def test_a_far_slower_candidate_runs_once(path: Path) -> None:
    asked = need([8])
    table = Table([FAST, LEAN, SLOW])
    summary = run(table, path, asked)
    assert (summary.candidates, summary.dominated) == (3, 1)
    slow = of(measurements_of(path, asked), SLOW)
    assert slow.dominated and slow.time_us == 800.0 and slow.spread_us == 0.0
    assert not [line for line in table.log if line.startswith("time slow")]
    # Ten times slower than the fastest, and still timed, because only this kernel needs no workspace.
    alone = replace(SLOW, name="alone")
    table = Table([FAST, alone])
    run(table, path, need([8], channels=16))
    assert "time alone 8 1500" in table.log


def test_conversions_of_other_layouts_dominate_none(path: Path) -> None:
    tensor = TensorType((8, 8, 6, 5), DType.FP32)
    asked = Need((Request("convert", NoAttributes(), (tensor,), (tensor,), Precision.FP32),), 1.0)
    table = Table([LEAN, replace(SLOW, layout=Layout.CHANNELS_LAST), replace(SLOW, name="copy")])
    assert run(table, path, asked).dominated == 1
    measured = read_profile(path).measurements[signature(asked.undivided)]
    assert [m.layouts[0] for m in measured if m.dominated] == [Layout.CHANNELS_FIRST]


def test_certainly_slow_candidates_are_not_run(path: Path) -> None:
    asked = need([256, 128])
    worst = Kernel("worst", lambda rows: 500.0 * rows)
    loose = replace(LEAN, name="loose", time=lambda rows: 1.0 * rows, deterministic=False)
    table = Table([LEAN, worst, SLOW])
    summary = run(table, path, asked)
    assert "probe worst 256" in table.log and "worst 256" not in table.tried() and "slow 256" in table.tried()
    assert summary.refused == 0 and len(measurements_of(path, asked)) == 2
    left_out = read_profile(path).extents[signature(asked.undivided)].left_out
    assert "1 candidates that took over 10 times the best for few rows" in left_out
    # It may be the only deterministic kernel.
    table = Table([loose, worst])
    run(table, path, need([256], channels=16))
    assert "worst 256" in table.tried()
    # What is known from a larger size is not probed.
    far = Kernel("far", lambda rows: 60.0 * rows if rows > 128 else 600.0 * rows, lambda rows: 0)
    table = Table([LEAN, far])
    run(table, path, need([256, 128], channels=32))
    assert "far 128" in table.tried()


def test_a_candidate_beaten_in_every_respect_is_replayed_little(path: Path) -> None:
    behind = Kernel("behind", lambda rows: 25.0 * rows, FAST.workspace)
    leaner = Kernel("leaner", lambda rows: 15.0 * rows)
    elsewhere = replace(behind, name="elsewhere", layout=Layout.CHANNELS_LAST)
    table = Table([behind, leaner, FAST, elsewhere])
    run(table, path, need([8]))
    budgets = {line.split()[1]: line.split()[3] for line in reversed(table.log) if line.startswith("time")}
    assert budgets == {"behind": "0", "leaner": "1500", "fast": "1500", "elsewhere": "1500"}


def test_additions_are_timed_and_believed_only_where_seen(path: Path) -> None:
    asked = need([8])
    adding = replace(FAST, name="adding", asked_to_add=True)
    not_adding = replace(FAST, name="pretending", asked_to_add=True, adds=False)
    # It is slower than kernels that cannot add, which do not beat it.
    last = replace(FAST, name="last", time=lambda rows: 14.0 * rows, asked_to_add=True)
    run(Table([not_adding, last]), path, asked)
    kept = measurements_of(path, asked)
    assert (of(kept, not_adding).accumulates, of(kept, not_adding).accumulate_us) == (False, 0.0)
    assert (of(kept, last).accumulates, of(kept, last).accumulate_us) == (True, 113.0)
    asked = need([8], channels=16)
    run(Table([adding, last]), path, asked)
    kept = measurements_of(path, asked)
    assert (of(kept, adding).accumulates, of(kept, adding).accumulate_us) == (True, 81.0)
    assert (of(kept, last).accumulates, of(kept, last).accumulate_us) == (True, 0.0)  # behind


def test_the_first_of_each_kind_run_first(path: Path) -> None:
    last = [replace(k, name=f"last {k.name}", layout=Layout.CHANNELS_LAST) for k in (FAST, LEAN)]
    table = Table([FAST, LEAN, *last])
    run(table, path, need([8]))
    assert table.tried() == ["fast 8", "last fast 8", "lean 8", "last lean 8"]


def test_sizes_end_where_no_division_gains(path: Path) -> None:
    # Per row smaller sizes are not faster than LEAN at 8, which needs no workspace: 4 shows it, 2 and 1 are not tried.
    asked = need([8, 4, 2, 1])
    table = Table([LEAN, replace(FAST, time=lambda rows: 20.0 * rows)])
    summary = run(table, path, asked)
    assert (summary.measured, summary.ruled_out, summary.left) == (2, 2, 0)
    assert not [line for line in table.log if line.endswith((" 2", " 1"))]
    extents = read_profile(path).extents
    assert "sizes under 4" in extents[signature(asked.requests[1])].left_out
    assert signature(asked.requests[2]) not in extents
    # It is the same for the next run, which has nothing to do.
    again = Table([LEAN, FAST])
    assert run(again, path, asked).ruled_out == 2
    assert again.tried() == []


def test_sizes_go_on_while_less_workspace_buys_speed(path: Path) -> None:
    table = Table([FAST, LEAN])  # FAST is twice as fast at every size, and needs less at smaller ones
    assert run(table, path, need([8, 4, 2, 1])).measured == 4


def test_sizes_go_on_for_those_who_must_be_deterministic(path: Path) -> None:
    loose = replace(LEAN, name="loose", time=lambda rows: 1.0 * rows, deterministic=False)
    strict = Kernel("strict", lambda rows: 10.0 * rows, lambda rows: rows * MIB)
    table = Table([loose, strict])
    assert run(table, path, need([8, 4])).measured == 2
    ladder = Ladder()
    for rows, place in ((8, 0), (4, 1)):
        ladder.add(rows, tuple(measurements_of(path, need([8, 4]), place).values()))
    assert not ladder.closed


def test_layouts_end_apart(path: Path) -> None:
    last = replace(LEAN, name="last", layout=Layout.CHANNELS_LAST)  # ends at once: no workspace, no gain
    table = Table([FAST, LEAN, last])
    asked = need([8, 4, 2])
    assert run(table, path, asked).measured == 3
    assert "last 4" in table.tried() and "last 2" not in table.tried()
    assert "1 candidates in layouts" in read_profile(path).extents[signature(asked.requests[2])].left_out


def test_candidates_skipped_in_a_part_are_measured_in_a_whole(path: Path) -> None:
    last = replace(LEAN, name="last", layout=Layout.CHANNELS_LAST)
    table = Table([FAST, LEAN, last])
    parts, whole = need([8, 4, 2]), need([2])
    run(table, path, parts)
    assert "last 2" not in table.tried() and read_profile(path).extents[signature(whole.undivided)].micro_batches_only
    table.log.clear()
    assert run(table, path, whole).measured == 1
    assert table.tried() == ["last 2"]  # what the part had measured is kept
    assert not read_profile(path).extents[signature(whole.undivided)].micro_batches_only
    assert len(measurements_of(path, whole)) == 3
    assert run(table, path, whole, parts).measured == 0
    # In one run the order does not matter.
    table.log.clear()
    assert run(table, path.with_name("other"), parts, whole).measured == 3
    assert "last 2" in table.tried()
    # Nor where sizes end before it.
    alone = Table([Kernel("linear", lambda rows: 10.0 * rows)])
    summary = run(alone, path.with_name("alone"), parts, whole)
    assert (summary.measured, summary.ruled_out, summary.left) == (3, 0, 0)
    assert alone.tried() == ["linear 8", "linear 2", "linear 4"]


def test_the_hopeless_are_not_tried_at_small_sizes(path: Path) -> None:
    # Slow at 16 and 8 beside one with no more workspace; `thin` too, but it needs less than all others.
    heavy = Kernel("heavy", lambda rows: 50.0 * rows, lambda rows: 2 * rows * MIB)
    table = Table([FAST, heavy])
    asked = need([16, 8, 4])
    run(table, path, asked)
    assert "heavy 8" in table.tried() and "heavy 4" not in table.tried()
    assert (
        "1 candidates that were dominated at larger sizes"
        in read_profile(path).extents[signature(asked.requests[2])].left_out
    )
    quick = replace(FAST, name="quick", time=lambda rows: 1.0 * rows)
    awful = replace(heavy, name="awful", time=lambda rows: 20.0 * rows)
    table = Table([quick, awful])
    run(table, path, need([16, 8, 4], channels=32))
    assert "awful 16" in table.tried() and "awful 8" not in table.tried()
    thin = Kernel("thin", lambda rows: 100.0 * rows, lambda rows: 0 if rows < 8 else rows * MIB)
    table = Table([FAST, thin])
    run(table, path, need([16, 8, 4], channels=16))
    assert "thin 4" in table.tried()


def test_own_kernels_are_tried_where_they_may_win(path: Path) -> None:
    near = Kernel("near", lambda rows: 25.0 * rows, estimate_us=200.0)
    far = Kernel("far", lambda rows: 1.0 * rows, estimate_us=1e6)
    table = Table([FAST], spare=[near, far])
    asked = need([8])
    run(table, path, asked)
    assert table.tried() == ["fast 8", "near 8"]
    assert "1 of mbc's own kernels" in read_profile(path).extents[signature(asked.undivided)].left_out


def test_a_run_is_resumed_and_a_raised_limit_completes(path: Path) -> None:
    asked = need([8, 4])
    low = Table([FAST, LEAN])
    assert run(low, path, asked, limit=5 * MIB).measured == 2
    assert low.tried() == ["lean 8", "fast 4", "lean 4"]
    same = Table([FAST, LEAN])
    assert run(same, path, asked, limit=4 * MIB).already_measured == 2 and same.log == []
    high = Table([FAST, LEAN])
    assert run(high, path, asked, limit=LIMIT).measured == 2
    assert high.tried() == ["fast 8"]  # what the first run measured is kept
    assert {m.time_us for m in measurements_of(path, asked).values()} == {80.0, 160.0}
    assert read_profile(path).extents[signature(asked.undivided)].workspace_limit_bytes == LIMIT
    anew = Table([FAST, LEAN])
    assert run(anew, path, asked, again=True).measured == 2 and len(anew.tried()) == 4


def test_only_outdated_requests_are_completed(path: Path) -> None:
    """Only the kernel that was added later is run. A request that does not fit the memory keeps its earlier results."""
    asked, other = need([8]), need([8], channels=16)
    wrong = replace(SLOW, name="wrong", refused="the result is wrong")
    run(Table([LEAN, wrong]), path, asked, other)
    outdated = frozenset({signature(asked.undivided)})
    before = measurements_of(path, asked)
    none = measure_on(Table([LEAN, FAST, wrong], too_large=True), [asked], path, workspace_limit_bytes=LIMIT,
                      outdated=outdated)  # fmt: skip
    assert none.failures and measurements_of(path, asked) == before
    table = Table([LEAN, FAST, wrong])
    done = measure_on(table, [asked, other], path, workspace_limit_bytes=LIMIT, outdated=outdated)
    assert (done.measured, done.already_measured) == (1, 1) and table.tried() == ["fast 8"]
    assert "link" not in table.log
    after = measurements_of(path, asked)
    assert len(after) == 3 and of(after, FAST).time_us == 80.0
    assert {number: after[number] for number in before} == before


def test_the_time_is_kept_and_the_most_valuable_comes_first(path: Path) -> None:
    small, large = need([8], 1.0), need([8], 5.0, channels=16)
    reports: list[tuple[int, int, float | None]] = []
    table = Table([FAST, LEAN])
    summary = run(table, path, small, large, seconds=1.5, progress=lambda d, t, r, s: reports.append((d, t, s)))
    assert (summary.measured, summary.left) == (1, 1)
    assert set(read_profile(path).measurements) == {signature(large.undivided)}
    assert run(Table([FAST]), path, small, seconds=-1.0).left == 1
    assert reports == [(0, 2, None)]
    rest = run(table, path, small, large, progress=lambda d, t, r, s: reports.append((d, t, s)))
    assert (rest.already_measured, rest.measured, reports[-1]) == (1, 1, (0, 1, None))


def test_time_left_is_estimated(path: Path) -> None:
    remaining: list[float | None] = []
    table = Table([FAST, LEAN])
    run(table, path, need([8, 4, 2]), progress=lambda d, t, r, s: remaining.append(s))
    assert remaining == [None, 4.0, 2.0]  # two seconds a request


@dataclass
class Decide:
    """A decision function that returns `answers` in turn, as numbers of `needs`, and records its arguments."""

    needs: Sequence[Need]
    answers: list[tuple[int, ...]]
    failed: list[list[int]] = field(default_factory=list[list[int]])
    missing: list[list[int]] = field(default_factory=list[list[int]])

    def __call__(self, failed: Sequence[str], missing: Sequence[str]) -> Decision:
        numbers = {signature(need.undivided): number for number, need in enumerate(self.needs)}
        self.failed.append(sorted(numbers[key] for key in failed))
        self.missing.append(sorted(numbers[key] for key in missing))
        chosen = self.answers.pop(0)
        return Decision(tuple(signature(self.needs[number].undivided) for number in chosen), 100.0, 0.5)


def test_only_requests_that_can_decide_a_plan_are_measured(path: Path) -> None:
    needs = [need([8], channels=channels) for channels in (8, 16, 24, 32)]
    table, decide, reports = Table([FAST]), Decide(needs, [(2, 0), (1,), ()]), list[tuple[int, int]]()
    summary = run(table, path, *needs, decide=decide, progress=lambda d, t, r, s: reports.append((d, t)))
    assert (summary.measured, summary.left) == (3, 0) and decide.missing == [[0, 1, 2, 3], [1, 3], [3]]
    assert reports == [(0, 2), (1, 2), (2, 3)]
    profile = read_profile(path)
    assert profile.left_to_estimate == {signature(needs[3].undivided)} and profile.compares_estimate(needs[3].undivided)
    assert missing(needs, profile, LIMIT) == (needs[3],)  # by whom all is to be measured
    assert run(Table([FAST, LEAN]), path, *needs).measured == 1
    assert len(measurements_of(path, needs[3])) == 2 and not read_profile(path).left_to_estimate


@pytest.mark.parametrize("stop_at", ["", "fast 8"])
def test_unreached_requests_are_estimated_and_requested_again(path: Path, stop_at: str) -> None:
    needs = [need([8], channels=channels) for channels in (8, 16, 24)]
    stopped = Table([FAST], stop_at=stop_at)
    summary = run(stopped, path, *needs, decide=Decide(needs, [(1, 0)]), seconds=math.inf if stop_at else 0.5)
    assert (summary.measured, summary.left, summary.interrupted) == ((0, 2, True) if stop_at else (1, 1, False))
    partial = read_profile(path)
    assert partial.left_to_estimate == {signature(one.undivided) for one in needs} - partial.extents.keys()
    decide = Decide(needs, [(0,), ()])
    assert run(Table([FAST]), path, *needs, decide=decide).measured == 1 and {0, 2} <= set(decide.missing[0])


def test_decided_requests_measured_meanwhile_are_skipped(path: Path) -> None:
    """This happens if the process before it failed because of its GPU: it had measured a part."""
    needs = [need([8], channels=channels) for channels in (8, 16)]
    run(Table([FAST]), path, needs[0])
    decide = Decide(needs, [(0, 1), ()])
    assert run(Table([FAST]), path, *needs, decide=decide).measured == 1 and decide.missing == [[1], []]


def test_measurements_of_an_earlier_version_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [need([8], channels=channels) for channels in (8, 16)]
    run(Table([FAST]), path, needs[0])
    complete = read_profile(path)
    key = signature(needs[0].undivided)
    outdated = replace(complete, measurements={}, extents={}, earlier={key: complete.measurements[key]})
    monkeypatch.setattr(measuring, "read_profile", lambda _: outdated)
    run(Table([FAST]), path, *needs, decide=Decide(needs, [()]))
    assert read_profile(path).left_to_estimate == {signature(needs[1].undivided)} and measurements_of(path, needs[0])


def test_failed_measurements_are_passed_to_the_decision(path: Path) -> None:
    needs = [need([8], channels=channels) for channels in (8, 16)]
    decide = Decide(needs, [(0,), ()])
    error = MbcError("MBC150", "it has none", "none")
    assert len(run(Table([FAST], error=error), path, *needs, decide=decide).failures) == 1
    assert decide.failed == [[], [0]] and decide.missing == [[0, 1], [1]]


def test_an_interrupted_run_leaves_a_valid_profile(path: Path) -> None:
    table = Table([FAST, LEAN], stop_at="fast 4")
    summary = run(table, path, need([8, 4, 2]))
    assert (summary.measured, summary.left, summary.interrupted) == (1, 2, True)
    assert len(read_profile(path).measurements) == 1
    assert run(Table([FAST, LEAN]), path, need([8, 4, 2])).measured == 2


def test_wrong_results_are_refused_and_recorded(path: Path) -> None:
    asked = need([8])
    wrong = replace(FAST, name="wrong", refused="its result is 1 off")
    summary = run(Table([wrong, LEAN]), path, asked)
    assert (summary.candidates, summary.refused) == (1, 1)
    assert of(measurements_of(path, asked), wrong).refused == "its result is 1 off"
    assert of(measurements_of(path, asked), LEAN).refused == ""


def test_a_failing_gpu_is_reported_and_its_kernel_skipped(path: Path) -> None:
    broken = replace(FAST, name="broken", refused="fails")
    with pytest.raises(MbcError, match="error MBC088: the GPU failed while convolution was measured: an illegal"):
        run(Table([LEAN, broken]), path, need([8, 4]))
    kept = measurements_of(path, need([8, 4]))
    assert of(kept, broken).refused == "the GPU failed when it ran" and len(kept) == 1
    table = Table([LEAN, broken, SLOW])
    assert run(table, path, need([8])).measured == 1  # all but the kernel at fault
    assert table.tried() == ["lean 8", "slow 8"]
    assert len(measurements_of(path, need([8]))) == 3 and run(table, path, need([8])).already_measured == 1


def test_requests_that_do_not_fit_are_reported_and_not_tried_again(path: Path) -> None:
    asked = need([8, 4])
    summary = run(Table([LEAN], too_large=True), path, asked)
    assert (summary.measured, summary.left) == (0, 0) and "1 byte is needed" in summary.failures[0]
    extents = read_profile(path).extents
    assert [extents[signature(r)].left_out for r in asked.requests] == [
        "could not be measured: 1 byte is needed, 0 are left"
    ] * 2
    again = run(Table([LEAN]), path, asked)
    assert (again.already_measured, again.measured, again.failures) == (2, 0, ())
    assert measure_on(Table([LEAN]), [asked], path, workspace_limit_bytes=LIMIT, again=True).measured == 2


@pytest.mark.parametrize(("code", "asked_again"), [("MBC087", False), ("MBC150", True)])
def test_only_failures_that_would_repeat_are_recorded(path: Path, code: str, asked_again: bool) -> None:
    error = MbcError(code, "it has; no reference", "none")
    summary = run(Table([LEAN], error=error), path, need([8]))
    assert len(summary.failures) == 1 and summary.left == 0
    assert run(Table([LEAN]), path, need([8])).measured == asked_again


def test_a_size_that_could_not_be_measured_closes_no_layout() -> None:
    ladder = Ladder()
    ladder.add(8, ())
    assert not ladder.closed


def test_the_best_are_timed_until_they_settle(path: Path) -> None:
    asked = need([8])
    shaky = replace(FAST, name="shaky", times=[2.0, 1.0, 1.01])
    table = Table([shaky])
    assert run(table, path, asked).unsteady == ()
    assert [line for line in table.log if line.startswith("time")] == ["time shaky 8 1500", *["time shaky 8 4000"] * 2]
    assert of(measurements_of(path, asked), shaky).time_us == pytest.approx(80.8)
    wild = replace(FAST, name="wild", spread=0.2)
    summary = run(Table([wild]), path, need([8], channels=16))
    assert len(summary.unsteady) == 1 and "another process may be using the GPU" in summary.warning


def test_operations_are_measured_undivided_before_their_micro_batches(path: Path) -> None:
    table = Table([FAST])
    run(table, path, need([8, 4, 2]), need([6, 3], 0.5))
    assert table.tried() == ["fast 8", "fast 6", "fast 4", "fast 2", "fast 3"]


def test_operands_are_put_there_once_for_an_operation_and_once_for_its_micro_batches(path: Path) -> None:
    table = Table([FAST, LEAN])
    run(table, path, need([8, 4, 2, 1]))
    assert table.opened == 2
    table = Table([FAST, LEAN])
    run(table, path.with_name("other"), need([8, 4, 2]), need([4, 2], 0.5))  # with no size that the first had not
    assert table.opened == 3


def test_micro_batches_that_are_measured_later_are_those_that_would_have_been_at_once(path: Path) -> None:
    linear, asked = Kernel("linear", lambda rows: 10.0 * rows), need([64, 32, 16, 8])
    later, once = Table([linear]), Table([linear])
    run(later, path, Need(asked.requests[:1], asked.weight_us))
    run(later, path, *missing([asked], read_profile(path), LIMIT))
    run(once, path.with_name("once"), asked)
    assert later.tried() == once.tried() == ["linear 64", "linear 32"]
