"""A profile in memory: measured candidates of one GPU with one cuDNN.

A profile is a value: a plan made with an equal profile is the same plan. `mbc.profile.schema` defines how it is stored.
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
from mbc.kernels.base import Candidate, Request
from mbc.kernels.providers import runs
from mbc.profile.interpolate import candidates_at, rank
from mbc.profile.other_gpu import Scaling
from mbc.profile.signature import Shelf, read_signature, rows_of, shelf_of, shelf_of_signature, with_rows
from mbc.profile.signature import signature as signature


@dataclass(frozen=True, slots=True)
class Identity:
    """The machine on which a profile was measured.

    `cudnn` is its version number (91900); clocks are in MHz, 0 if unknown.
    """

    gpu: str  # as the driver names it
    architecture: str  # sm_90
    multiprocessors: int
    driver: str
    cudnn: int
    date: str  # of the first measurement, YYYY-MM-DD
    sm_clock_mhz: int = 0
    memory_clock_mhz: int = 0

    def alike(self, other: Identity) -> bool:
        """Return whether times of both machines are comparable: patch versions of cuDNN and drivers may differ."""
        return (self.gpu, self.multiprocessors, self.cudnn // 100) == (
            other.gpu,
            other.multiprocessors,
            other.cudnn // 100,
        )

    def __str__(self) -> str:
        """Return the GPU and cuDNN as a text."""
        return f"{self.gpu} ({self.multiprocessors} multiprocessors) with cuDNN {version_text(self.cudnn)}"


def version_text(cudnn: int) -> str:
    """Return a version number of cuDNN as text: `9.19.0` for 91900."""
    return f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured candidate, or the reason why it was refused (then `time_us` is 0).

    `time_us` is the median over repetitions, `spread_us` the distance between their quartiles. `error` is the
    normalised L2 distance from the reference result, negative if there was no reference. `accumulate_us` is the time of
    adding to the output, 0 if it was not measured. `dominated`: the candidate ran only once, because it is far slower
    than another.
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
        """Return the candidate with its measured time."""
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
    """Device memory in use outside the arena.

    `what` is context, libraries, step or collectives. `subject` names the program that ran (for collectives,
    `collective_subject`).
    """

    what: str
    subject: str
    size_bytes: int


def collective_subject(ranks: int, max_ctas: int) -> str:
    """Return `Overhead.subject` of a communicator."""
    return f"{ranks} ranks, {max_ctas} thread blocks"


# `Extent.left_out` in a file for the requests of `Profile.left_to_estimate`.
LEFT_TO_ESTIMATE = "left to its estimate"


@dataclass(frozen=True, slots=True)
class Extent:
    """The range within which the candidates of one request were measured.

    Candidates that need more than `workspace_limit_bytes` were not measured. `left_out` names other omissions in words:
    engines after the best eight, sizes that no division can use. `date` is that of the last measurement, in UTC such as
    `2026-11-21T10:55:03`; the writer of a file sets it. `micro_batches_only`: candidates from which a micro-batch gains
    nothing were left out, so that a whole batch of as many rows must still be measured.
    """

    workspace_limit_bytes: int
    left_out: str = ""
    date: str = ""
    micro_batches_only: bool = False

    def covers(self, workspace_limit_bytes: int, whole: bool) -> bool:
        """Return whether nothing is missing up to a limit of workspace, for a whole batch or a part of one."""
        return self.workspace_limit_bytes >= workspace_limit_bytes and not (whole and self.micro_batches_only)


WHOLE_EXTENT = Extent(1 << 62)  # nothing was left out


@dataclass(frozen=True, slots=True)
class Outdated:
    """Measurements of one request by earlier kernel versions, as in the file, and their extent."""

    rows: tuple[Measurement, ...]
    extent: Extent


@dataclass(frozen=True)
class Profile:
    """Measurements of one GPU with one cuDNN, and what may be estimated from them.

    `measurements` and `extents` have the signature of a request (`signature`) as key.

    `constants` are values of the machine: `graph_gap_us`, the time from one node of a CUDA graph to the next,
    `mma_sync_tflops`, the rate of matrix products by mma.sync in 16 bits (`benchmarks/posed_kernels.py`), and those of
    `mbc.hardware.transfers.link_constants` and `mbc.hardware.host_sharing.sharing_constants`. `stale`: the profile
    is of another machine than the plan's, and its times count as estimates. `earlier` are times that also count as
    estimates: those of earlier versions of today's own kernels (`mbc.profile.kernel_versions`), or those of the whole
    GPU of which this is a part (`mbc.profile.partial_gpu`); `outdated` are the former as in the file. `scaling` adapts
    a stale profile of another GPU to the GPU of the plan (`scaled_to`). `left_to_estimate` are requests, by signature,
    that a compilation did not measure, because its plan did not depend on them
    (`mbc.optimize.search.decisive_requests`) or because its time was over: their estimates may be compared with
    measurements. `similar` is the profile of the most similar GPU, scaled to this one, from which missing times are
    estimated.
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
        """Version number of cuDNN, 91900 for 9.19.0."""
        return self.identity.cudnn

    @property
    def origin(self) -> str:
        """Place and time of the first measurement: `NVIDIA H200, driver 580.159.04, cuDNN 9.19.0, 2026-11-21`."""
        on = self.identity
        origin = f"{on.gpu}, driver {on.driver}, cuDNN {version_text(on.cudnn)}, {on.date}"
        if self.scaling is not None:
            return f"{origin} (scaled to {self.scaling.target.name}: estimates)"
        return f"{origin} (another machine's: as estimates)" if self.stale else origin

    @property
    def overhead_bytes(self) -> int:
        """The largest measured memory of a step outside the arena, 0 if none was measured."""
        return max((o.size_bytes for o in self.overheads if o.what == "step"), default=0)

    def collective_model(self, link: Link) -> CollectiveModel:
        """Return the model of collectives over this kind of link, with estimates if none were measured."""
        return CollectiveModel(link, self.collectives, self.collective_slowdowns, self.stale)

    def collective_bytes(self, ranks: int) -> int | None:
        """Return the device memory of a communicator and its connections: the largest with any number of thread blocks.

        If `ranks` ranks were not measured, it is the largest for any number of ranks; None if none were measured.
        """
        seen = {o.subject: o.size_bytes for o in self.overheads if o.what == "collectives"}
        of_ranks = [size for subject, size in seen.items() if subject.startswith(f"{ranks} ")]
        return max(of_ranks or seen.values(), default=None)

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """Return the candidates for `request`, fastest first, measured or interpolated between measured sizes.

        Interpolated ones are not marked as `measured`. There are none if neither is possible.
        """
        return candidates_at(self.family(request), rows_of(request))

    def compares_estimate(self, request: Request) -> bool:
        """Return whether the estimate of a request may be compared with measurements (`left_to_estimate`)."""
        return bool(self.left_to_estimate) and signature(request) in self.left_to_estimate

    def family(self, request: Request) -> Mapping[int, tuple[Candidate, ...]]:
        """Return the candidates of every measured size of the operation of `request`, by number of rows, ascending.

        A size of which all candidates were refused has none. Candidates that today's kernels would not accept are left
        out (`mbc.kernels.runs`).
        """
        accepted = self._accepted.get(request)
        if accepted is None:
            accepted = self._accepted[request] = self._accepted_of(with_rows(request, 0))
        return accepted

    def _accepted_of(self, family: Request) -> Mapping[int, tuple[Candidate, ...]]:
        """Return the candidates of `family`, a request for 0 rows."""
        accepted = self._accepted.get(family)
        if accepted is None:
            shelf = shelf_of(family)
            families = self._families.get(shelf)
            if families is None:
                families = self._families[shelf] = self._families_on(shelf)
            accepted = self._accepted[family] = {
                rows: tuple(c for c in candidates if runs(c, with_rows(family, rows), self._device))
                for rows, candidates in families.get(family, {}).items()
            }
        return accepted

    @cached_property
    def _device(self) -> DeviceSpec:
        return spec_like(self.identity.gpu, self.identity.architecture)

    @cached_property
    def _accepted(self) -> dict[Request, Mapping[int, tuple[Candidate, ...]]]:
        """Cache of `family`."""
        return {}

    @cached_property
    def _families(self) -> dict[Shelf, Mapping[Request, Mapping[int, tuple[Candidate, ...]]]]:
        """Cache of the families on each shelf: a step has few of all kinds, and one precision."""
        return {}

    @cached_property
    def _shelves(self) -> Mapping[Shelf, Sequence[str]]:
        shelves: dict[Shelf, list[str]] = {}
        for key in dict.fromkeys((*self.measurements, *self.earlier, *self.extents)):
            shelves.setdefault(shelf_of_signature(key), []).append(key)
        return shelves

    def _families_on(self, shelf: Shelf) -> Mapping[Request, Mapping[int, tuple[Candidate, ...]]]:
        families: dict[Request, dict[int, tuple[Candidate, ...]]] = {}
        for key in self._shelves.get(shelf, ()):
            try:
                request = read_signature(key)
            except ValueError:
                continue  # this version of mbc does not have the operation
            candidates = [m.candidate() for m in self.measurements.get(key, ()) if not m.refused]
            usable = candidates if not self.stale else [replace(c, measured=False) for c in candidates]
            usable += [replace(m.candidate(), measured=False) for m in self.earlier.get(key, ())]
            if self.scaling is not None:
                usable = [self.scaling.scaled(candidate, request) for candidate in usable]
            # Two requests of a family may have equal numbers of rows: a part of a mini-batch and a whole one.
            sizes = families.setdefault(with_rows(request, 0), {})
            sizes[rows_of(request)] = tuple(sorted((*sizes.get(rows_of(request), ()), *usable), key=rank))
        return {family: dict(sorted(sizes.items())) for family, sizes in families.items()}


def scaled_to(profile: Profile, source: DeviceSpec, target: DeviceSpec) -> Profile:
    """Return `profile`, measured on `source`, as estimates for `target`.

    Its links are left out: they are those of another machine, with GPUs that may be connected differently.
    """
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
    """Return the profile of a GPU without measurements, given that of a `similar` GPU, scaled to it."""
    return replace(
        similar, measurements={}, extents={}, earlier={}, outdated={}, stale=False, scaling=None, similar=similar
    )


# Device memory of a communicator if it was not measured.
UNMEASURED_COMMUNICATOR_BYTES = 400_000_000


def for_ranks(device: DeviceSpec, profile: Profile | None, ranks: int, host_gpus: int = 1) -> DeviceSpec:
    """Return the spec for one of several ranks.

    Args:
        device: The GPU.
        profile: Its profile, if any.
        ranks: Number of ranks of the communicator, which determines its device memory.
        host_gpus: Number of GPUs of a machine that copy to the host at a time (`mbc.hardware.host_sharing`).
    """
    measured_bytes = profile.collective_bytes(ranks) if profile is not None else None
    rates = measured_sharing(profile.constants) if profile is not None else ()
    return replace(
        device,
        communicator_bytes=UNMEASURED_COMMUNICATOR_BYTES if measured_bytes is None else measured_bytes,
        host_link=shared_link(device.host_link, rates, host_gpus),
    )


def calibrated(device: DeviceSpec, profile: Profile | None) -> DeviceSpec:
    """Return the spec with the profile's measurements of the machine.

    These are the overhead, the gap between two launches of a graph, the rate of mma.sync, and the links to the host's
    memory and to other GPUs.
    """
    if profile is None:
        return device
    return replace(
        device,
        overhead_bytes=profile.overhead_bytes or device.overhead_bytes,
        launch_us=profile.constants.get("graph_gap_us", device.launch_us),
        mma_sync_tflops=profile.constants.get("mma_sync_tflops", device.mma_sync_tflops),
        host_link=measured_link(profile.constants, profile.stale) or device.host_link,
        peer_link=measured_peer_link(profile.constants, profile.stale) or device.peer_link,
        collectives=profile.collective_model(device.collectives.link),
    )
