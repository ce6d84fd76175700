"""Measured candidates of one GPU with one cuDNN: a profile, as planning sees it.

A profile is a value, and a plan made with the same profile is the same plan.
`mbc.profile.schema` says how it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mbc.hardware.collective_times import CollectiveModel, CollectiveSlowdown, CollectiveTime, Link
from mbc.hardware.host_sharing import measured_sharing, shared_link
from mbc.hardware.spec import DeviceSpec, spec_like
from mbc.hardware.transfers import measured_link, measured_peer_link
from mbc.ir.types import Layout
from mbc.kernels import runs
from mbc.kernels.base import Candidate, Request
from mbc.profile.interpolate import candidates_at, rank
from mbc.profile.other_gpu import Scaling
from mbc.profile.signature import Shelf, read_signature, rows_of, shelf_of, shelf_of_signature, with_rows
from mbc.profile.signature import signature as signature


@dataclass(frozen=True, slots=True)
class Identity:
    """What a profile was measured on. `cudnn` is its version number (91900); clocks in MHz, 0 where unknown."""

    gpu: str  # as the driver names it
    architecture: str  # sm_90
    multiprocessors: int
    driver: str
    cudnn: int
    date: str  # of the first measurement, YYYY-MM-DD
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0

    def alike(self, other: Identity) -> bool:
        """Whether times measured on both are comparable: patches of cuDNN and drivers may differ."""
        return (self.gpu, self.multiprocessors, self.cudnn // 100) == (
            other.gpu,
            other.multiprocessors,
            other.cudnn // 100,
        )

    def __str__(self) -> str:
        return f"{self.gpu} ({self.multiprocessors} multiprocessors) with cuDNN {version_text(self.cudnn)}"


def version_text(cudnn: int) -> str:
    """`9.19.0` for 91900."""
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate as measured, or why it was refused (then no time is known and `time_us` is 0).

    `time_us` is the median over repetitions, `spread_us` the distance between their quartiles. `error` is the
    normalised L2 distance from the reference result, negative where there was none to compare with. `accumulate_us` is
    its time when it adds to its output, 0 where that was not measured. `dominated`: run once only, being far slower
    than another candidate.
    """

    provider: str
    name: str
    settings: tuple[tuple[str, int], ...]
    layouts: tuple[Layout, ...]
    workspace_bytes: int
    time_us: float
    spread_us: float
    deterministic: bool
    accumulates: bool
    notes: tuple[str, ...]
    error: float
    refused: str = ""
    accumulate_us: float = 0.0
    dominated: bool = False

    def candidate(self) -> Candidate:
        return Candidate(
            self.provider,
            self.name,
            self.settings,
            self.layouts,
            self.workspace_bytes,
            self.time_us,
            True,
            self.deterministic,
            self.accumulates,
            self.accumulate_us,
        )


@dataclass(frozen=True, slots=True)
class Overhead:
    """Device memory in use outside the arena. `what`: context | libraries | step | collectives; `subject` names what
    ran (`collective_subject` for the last)."""

    what: str
    subject: str
    size_bytes: int


def collective_subject(ranks: int, max_ctas: int) -> str:
    return f"{ranks} ranks, {max_ctas} thread blocks"


# What `Extent.left_out` says in a file of the requests of `Profile.left_to_estimate`.
LEFT_TO_ESTIMATE = "left to its estimate"


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the candidates of one request were looked for.

    `workspace_limit_bytes`: candidates that need more were not measured. `left_out` says in words what else was not:
    engines after the best eight, sizes that no division can use. `date` of the last measurement, in UTC as
    `2026-11-21T10:55:03`; the writer of a file fills it in. `micro_batches_only`: what a micro-batch of so many rows
    gains nothing by was left out, so that a batch of as many rows has still to be measured.
    """

    workspace_limit_bytes: int
    left_out: str = ""
    date: str = ""
    micro_batches_only: bool = False

    def covers(self, workspace_limit_bytes: int, whole: bool) -> bool:
        """Whether nothing is missed up to a limit of workspace, for a whole batch or a part of one."""
        return self.workspace_limit_bytes >= workspace_limit_bytes and not (whole and self.micro_batches_only)


WHOLE_EXTENT = Extent(1 << 62)  # everything was looked for


@dataclass(frozen=True, slots=True)
class Outdated:
    """Measurements of one request by earlier versions of kernels, as a file has them, and how far was looked then."""

    rows: tuple[Measurement, ...]
    extent: Extent


@dataclass(frozen=True)
class Profile:
    """`measurements` and `extents` by the signature of their request (`signature`).

    `constants` are figures of the machine: `graph_gap_us`, the time from one node of a CUDA graph to the next, and
    those of `mbc.hardware.transfers.link_constants` and `mbc.hardware.host_sharing.sharing_constants`. `stale`: of
    another machine than the one planned for, and used all the same: its times count as estimates. `earlier`: likewise
    times of today's own kernels, measured before they were rewritten (`mbc.profile.kernel_versions`), or on the whole
    of which this is a part (`profile.partial_gpu`); `outdated`: the former as a file has them. `scaling`: to the GPU
    that is planned for, of a stale profile of another (`scaled_to`). `left_to_estimate`: requests, by signature, that
    a compilation did not measure, since its plan did without them (`mbc.optimize.search.decisive_requests`) or its
    time was over: nothing is known of them, but their estimates may be compared with measurements. `similar`: the
    profile of the GPU most like this one, scaled to it, by whose times is estimated what this one does not know.
    """

    identity: Identity
    measurements: Mapping[str, tuple[Measurement, ...]]
    overheads: tuple[Overhead, ...] = ()
    source: str = field(default="", compare=False)
    extents: Mapping[str, Extent] = field(default_factory=dict[str, Extent])
    constants: Mapping[str, float] = field(default_factory=dict[str, float])
    stale: bool = False
    earlier: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict[str, tuple[Measurement, ...]])
    outdated: Mapping[str, Outdated] = field(default_factory=dict[str, Outdated])
    collectives: tuple[CollectiveTime, ...] = ()
    collective_slowdowns: tuple[CollectiveSlowdown, ...] = ()
    scaling: Scaling | None = None
    left_to_estimate: frozenset[str] = frozenset()
    similar: Profile | None = field(default=None, compare=False)

    @property
    def cudnn(self) -> int:
        return self.identity.cudnn

    @property
    def origin(self) -> str:
        """`NVIDIA H200, driver 580.159.04, cuDNN 9.19.0, 2026-11-21`: where and since when it was measured."""
        on = self.identity
        origin = f"{on.gpu}, driver {on.driver}, cuDNN {version_text(on.cudnn)}, {on.date}"
        if self.scaling is not None:
            return f"{origin} (scaled to {self.scaling.target.name}: estimates)"
        return f"{origin} (another machine's: as estimates)" if self.stale else origin

    @property
    def overhead_bytes(self) -> int:
        """The most that a step was seen to take outside the arena; 0 when none was measured."""
        return max((o.size_bytes for o in self.overheads if o.what == "step"), default=0)

    def collective_model(self, link: Link) -> CollectiveModel:
        """Of collectives over this kind of link; estimates where none were measured."""
        return CollectiveModel(link, self.collectives, self.collective_slowdowns, self.stale)

    def collective_bytes(self, ranks: int) -> int | None:
        """Device memory of a communicator and its connections, the most that was seen with any number of thread blocks,
        or of any number of ranks where it was not measured for so many; None where none was."""
        seen = {o.subject: o.size_bytes for o in self.overheads if o.what == "collectives"}
        of_ranks = [size for subject, size in seen.items() if subject.startswith(f"{ranks} ")]
        return max(of_ranks or seen.values(), default=None)

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """The candidates for `request`, fastest first, measured or between measured sizes (then not `measured`); none
        where neither is known."""
        return candidates_at(self.family(request), rows_of(request))

    def compares_estimate(self, request: Request) -> bool:
        """Whether the estimate of a request may be compared with what was measured (`left_to_estimate`)."""
        return bool(self.left_to_estimate) and signature(request) in self.left_to_estimate

    def family(self, request: Request) -> Mapping[int, tuple[Candidate, ...]]:
        """The candidates of every size at which the operation of `request` was measured, by their number of rows,
        ascending. A size all of whose candidates were refused is there, with none; so are those left out that the
        kernels of today would not take (`mbc.kernels.runs`)."""
        family = with_rows(request, 0)
        found = self._accepted.get(family)
        if found is None:
            shelf = shelf_of(request)
            known = self._families.get(shelf)
            if known is None:
                known = self._families[shelf] = self._families_on(shelf)
            found = self._accepted[family] = {
                rows: tuple(c for c in candidates if runs(c, with_rows(family, rows), self._device))
                for rows, candidates in known.get(family, {}).items()
            }
        return found

    @cached_property
    def _device(self) -> DeviceSpec:
        return spec_like(self.identity.gpu, self.identity.architecture)

    @cached_property
    def _accepted(self) -> dict[Request, Mapping[int, tuple[Candidate, ...]]]:
        """Families that were asked for, as `family` gives them."""
        return {}

    @cached_property
    def _families(self) -> dict[Shelf, Mapping[Request, Mapping[int, tuple[Candidate, ...]]]]:
        """Those that were asked for: a step has few of the kinds that are known, and one precision."""
        return {}

    @cached_property
    def _shelves(self) -> Mapping[Shelf, Sequence[str]]:
        found: dict[Shelf, list[str]] = {}
        for key in dict.fromkeys((*self.measurements, *self.earlier, *self.extents)):
            found.setdefault(shelf_of_signature(key), []).append(key)
        return found

    def _families_on(self, shelf: Shelf) -> Mapping[Request, Mapping[int, tuple[Candidate, ...]]]:
        found: dict[Request, dict[int, tuple[Candidate, ...]]] = {}
        for key in self._shelves.get(shelf, ()):
            try:
                request = read_signature(key)
            except ValueError:
                continue  # of an operation that this version of mbc does not have
            known = [m.candidate() for m in self.measurements.get(key, ()) if not m.refused]
            usable = known if not self.stale else [replace(c, measured=False) for c in known]
            usable += [replace(m.candidate(), measured=False) for m in self.earlier.get(key, ())]
            if self.scaling is not None:
                usable = [self.scaling.scaled(candidate, request) for candidate in usable]
            # Requests of one family may have as many rows: parts of a mini-batch, and whole ones.
            sizes = found.setdefault(with_rows(request, 0), {})
            sizes[rows_of(request)] = tuple(sorted((*sizes.get(rows_of(request), ()), *usable), key=rank))
        return {family: dict(sorted(sizes.items())) for family, sizes in found.items()}


def scaled_to(profile: Profile, source: DeviceSpec, target: DeviceSpec) -> Profile:
    """`profile`, of `source`, as estimates for `target`. What it knows of links is left out: they are another
    machine's, and of GPUs that may be joined otherwise."""
    gap = {name: value for name, value in profile.constants.items() if name == "graph_gap_us"}
    return replace(
        profile,
        constants=gap,
        stale=True,
        collectives=(),
        collective_slowdowns=(),
        scaling=Scaling(calibrated(source, profile), target),
        left_to_estimate=frozenset(),
    )


def unmeasured(similar: Profile) -> Profile:
    """The profile of a GPU of which nothing was measured, with that of a `similar` one, scaled to it."""
    return replace(
        similar, measurements={}, extents={}, earlier={}, outdated={}, stale=False, scaling=None, similar=similar
    )


# Device memory of a communicator where it was not measured.
UNMEASURED_COMMUNICATOR_BYTES = 400_000_000


def for_ranks(device: DeviceSpec, profile: Profile | None, ranks: int, host_gpus: int = 1) -> DeviceSpec:
    """The spec with the device memory of a communicator of so many ranks, and with what the link to the host carries
    while `host_gpus` of a machine copy at a time (`mbc.hardware.host_sharing`)."""
    known = profile.collective_bytes(ranks) if profile is not None else None
    rates = measured_sharing(profile.constants) if profile is not None else ()
    return replace(
        device,
        communicator_bytes=UNMEASURED_COMMUNICATOR_BYTES if known is None else known,
        host_link=shared_link(device.host_link, rates, host_gpus),
    )


def calibrated(device: DeviceSpec, profile: Profile | None) -> DeviceSpec:
    """The spec with what the profile saw of the machine: the overhead, the gap between two launches of a graph, the way
    to the host's memory and to other GPUs."""
    if profile is None:
        return device
    return replace(
        device,
        overhead_bytes=profile.overhead_bytes or device.overhead_bytes,
        launch_us=profile.constants.get("graph_gap_us", device.launch_us),
        host_link=measured_link(profile.constants, profile.stale) or device.host_link,
        peer_link=measured_peer_link(profile.constants, profile.stale) or device.peer_link,
        collectives=profile.collective_model(device.collectives.link),
    )
