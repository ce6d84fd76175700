"""Measured candidates of one GPU with one cuDNN: a profile, as planning sees it.

A profile is a value: reading needs the standard library only, and a plan made with the same profile is the same plan.
`mbc.device.profile_file` says how it is stored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mbc.device.spec import DeviceSpec
from mbc.errors import MbcError
from mbc.ir.types import Layout
from mbc.kernels.base import Candidate, Request

SHIPPED = Path(__file__).resolve().parent / "data" / "profiles"


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
    """Device memory in use outside the arena. `what`: context | libraries | step; `subject` names what ran."""

    what: str
    subject: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the candidates of one request were looked for.

    `workspace_limit_bytes`: candidates that need more were not measured. `left_out` says in words what else was not:
    engines after the best eight, sizes that no division can use.
    """

    workspace_limit_bytes: int
    left_out: str = ""


@dataclass(frozen=True)
class Profile:
    """`measurements` and `extents` by the signature of their request (`signature`).

    `constants` are figures of the machine: `graph_gap_us`, the time from one node of a CUDA graph to the next.
    """

    identity: Identity
    measurements: Mapping[str, tuple[Measurement, ...]]
    overheads: tuple[Overhead, ...] = ()
    source: str = field(default="", compare=False)
    extents: Mapping[str, Extent] = field(default_factory=dict[str, Extent])
    constants: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def cudnn(self) -> int:
        return self.identity.cudnn

    @property
    def overhead_bytes(self) -> int:
        """The most that a step was seen to take outside the arena; 0 when none was measured."""
        return max((o.size_bytes for o in self.overheads if o.what == "step"), default=0)

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        """The measured ways to run `request`, fastest first; none where it was never measured."""
        known = self.measurements.get(signature(request), ())
        usable = (m.candidate() for m in known if not m.refused)
        return tuple(sorted(usable, key=lambda c: (c.time_us, c.workspace_bytes, c.settings)))


def signature(request: Request) -> str:
    """A text that equal requests have in common, and only they: JSON, keys sorted."""
    return json.dumps(
        {
            "kind": request.kind,
            "attributes": asdict(request.attributes),
            "inputs": [str(t) for t in request.inputs],
            "outputs": [str(t) for t in request.outputs],
            "precision": request.precision.value,
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def calibrated(device: DeviceSpec, profile: Profile | None) -> DeviceSpec:
    """The spec with the overhead that the profile's measurements saw, where it has any."""
    if profile is None or not profile.overhead_bytes:
        return device
    return replace(device, overhead_bytes=profile.overhead_bytes)


def file_name(gpu: str) -> str:
    """File name of the profile of the GPU that the driver calls `gpu`."""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower().replace("nvidia", "")).split()
    return "-".join(words) + ".sqlite"


def user_path(gpu: str) -> Path:
    """Where a user's own measurements of a GPU are kept: under XDG_DATA_HOME, else ~/.local/share."""
    root = os.environ.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "mbc" / "profiles" / file_name(gpu)


def find_profile(device: DeviceSpec, path: str | None = None) -> Profile | None:
    """The profile at `path`; without one, the user's own of this GPU, else the one shipped with mbc, else None.

    Raises MBC072 to MBC075 for a file that cannot be read, MBC076 when `path` is of another GPU.
    """
    from mbc.device.profile_file import read_profile

    if path is not None:
        profile = read_profile(Path(path))
        if profile.identity.gpu != device.name:
            raise MbcError(
                "MBC076",
                f"the profile '{path}' was measured on {profile.identity.gpu}, the plan is for {device.name}",
                "name a profile of that GPU, or leave --profile out to plan with estimates",
            )
        return profile
    for known in (user_path(device.name), SHIPPED / file_name(device.name)):
        if known.is_file():
            return read_profile(known)
    return None
