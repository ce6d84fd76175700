"""Where profiles are stored, and which of them applies to a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.cudnn_version import installed_cudnn
from mbc.hardware.part import split_name, whole_name
from mbc.hardware.spec import DeviceSpec, device_specs, spec_like
from mbc.hardware.target import LocalGpu, local_gpus
from mbc.profile.edit import merged
from mbc.profile.model import Profile, scaled_to, version_text
from mbc.profile.other_gpu import distance
from mbc.profile.partial_gpu import completed
from mbc.profile.read_profile import read_profile
from mbc.profile.schema import COMPRESSED

MOST_MADE = 8
BUNDLED = Path(__file__).resolve().parent.parent / "data" / "profiles"


def file_name(gpu: str) -> str:
    """File name of the profile of the GPU that the driver calls `gpu`."""
    words = "".join(c if c.isalnum() else " " for c in gpu.lower().replace("nvidia", "")).split()
    return "-".join(words) + ".sqlite"


def user_path(gpu: str) -> Path:
    """Where a user's own measurements of a GPU are kept: under XDG_DATA_HOME, else ~/.local/share."""
    root = os.environ.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "mbc" / "profiles" / file_name(gpu)


def bundled_path(gpu: str) -> Path:
    """The bundled profile of a GPU, if there is one."""
    return BUNDLED / f"{file_name(gpu)}{COMPRESSED}"


def own_path(gpu: str) -> Path:
    """Where this machine's measurements of a GPU go: `user_path`. A file there of another cuDNN than is installed is
    put aside, with a warning: its times are true, but not here."""
    path, installed = user_path(gpu), installed_cudnn()
    if path.is_file() and installed:
        measured = read_profile(path).cudnn
        if measured // 100 != installed // 100:
            aside = path.with_name(f"{path.stem}-cudnn{version_text(measured)}.sqlite")
            path.replace(aside)
            warnings.warn(
                f"the profile '{path}' was measured with cuDNN {version_text(measured)}, here is "
                f"{version_text(installed)}: it is now '{aside}', and a new one begins",
                RuntimeWarning,
                stacklevel=2,
            )
    return path


def find_profile(device: DeviceSpec, path: str | None = None, accept_stale: bool = False) -> Profile | None:
    """The profile at `path`; without one, the user's own of this GPU and the bundled one together, or either, completed
    by that of a similar GPU; or that one; or None.

    A profile is stale when it is of another GPU than `device`, or, on a machine that has such a GPU, of another cuDNN
    than is installed here. A stale `path` is refused (MBC076) unless accepted: then its times count as estimates. Other
    stale profiles are left out with a warning. What is not known of a part of a GPU is estimated from the profile of
    the whole (`profile.partial_gpu`). What is not known of a whole GPU is estimated by the profile of the one most like
    it, of its architecture, scaled to it (`mbc.profile.other_gpu`): `Profile.similar`, or that profile itself where
    nothing is known. Raises MBC072 to MBC075 for a file that cannot be read.
    """
    here = next((gpu for gpu in local_gpus() if gpu.name == whole_name(device.name)), None)
    if path is not None:
        profile = read_profile(Path(path))
        reason = staleness(profile, device, here)
        if not reason:
            return _noted(profile, here)
        if not accept_stale:
            raise MbcError(
                "MBC076",
                f"the profile '{path}' {reason}",
                "measure again with mbc profile, leave --profile out, or plan with its times as estimates: "
                "--stale-profile",
            )
        return replace(profile, stale=True)
    found = _found(device, here)
    _, multiprocessors = split_name(device.name)
    if multiprocessors is None:
        similar = _of_similar(device)
        return similar if found is None else _completed_by(found, similar)
    whole = spec_like(whole_name(device.name), device.architecture)
    known = _found(whole, here)
    return found if known is None else completed(found, known, whole.multiprocessors / multiprocessors)


def _found(device: DeviceSpec, here: LocalGpu | None) -> Profile | None:
    """The user's own and the bundled profile, as far as they hold."""
    fresh: list[Profile] = []
    for known in (user_path(device.name), bundled_path(device.name)):
        if known.is_file():
            profile = read_profile(known)
            reason = staleness(profile, device, here)
            if reason:
                warnings.warn(f"the profile '{known}' is left out: it {reason}", RuntimeWarning, stacklevel=2)
            else:
                fresh.append(_noted(profile, here))
    if len(fresh) == 2 and fresh[0].identity.alike(fresh[1].identity):
        return _once(_first_wins, *fresh)
    return fresh[0] if fresh else None


def _of_similar(device: DeviceSpec) -> Profile | None:
    """The profile of the GPU that is most like `device`, scaled to it; None where none of its architecture is
    measured."""
    alike = (s for s in device_specs().values() if s.architecture == device.architecture and s.name != device.name)
    for source in sorted(alike, key=lambda spec: distance(spec, device)):
        profile = _found(source, None)
        if profile is not None:
            return _once(scaled_to, profile, source, device)
    return None


def _completed_by(profile: Profile, similar: Profile | None) -> Profile:
    """With a `similar` one that has the engines of the same cuDNN."""
    if similar is None or similar.cudnn // 100 != profile.cudnn // 100:
        return profile
    return _once(_with_similar, profile, similar)


def _with_similar(profile: Profile, similar: Profile) -> Profile:
    return replace(profile, similar=similar)


def _first_wins(first: Profile, second: Profile) -> Profile:
    return merged(first, second, newer_wins=False)


_made: dict[tuple[object, ...], tuple[tuple[Any, ...], Profile]] = {}


def _once(make: Callable[..., Profile], *of: Any) -> Profile:
    """What `make` makes of these objects: the same as before if it is one of the last few, since a profile remembers
    what it was asked."""
    key = (make, *map(id, of))
    if key not in _made:
        _made[key] = of, make(*of)  # with the objects, whose ids are theirs as long as they live
        while len(_made) > MOST_MADE:
            del _made[next(iter(_made))]
    return _made[key][1]


def staleness(profile: Profile, device: DeviceSpec, here: LocalGpu | None) -> str:
    """Why the times of `profile` do not hold on `device`, or nothing. `here`: one such GPU of this machine, if any."""
    if profile.identity.gpu != device.name:
        return f"was measured on {profile.identity.gpu}, the plan is for {device.name}"
    installed = installed_cudnn() if here is not None else 0
    if installed and installed // 100 != profile.cudnn // 100:
        return f"was measured with cuDNN {version_text(profile.cudnn)}, here is {version_text(installed)}"
    return ""


def _noted(profile: Profile, here: LocalGpu | None) -> Profile:
    if here is not None and here.driver != profile.identity.driver:
        warnings.warn(
            f"the profile '{profile.source}' was measured with driver {profile.identity.driver}, this machine has "
            f"{here.driver}: times may differ a little",
            RuntimeWarning,
            stacklevel=3,
        )
    return profile


def known_profiles() -> tuple[Path, ...]:
    """The files of all the user's own profiles and of the bundled ones."""
    own = user_path("any").parent
    return (*sorted(own.glob("*.sqlite")), *sorted(BUNDLED.glob(f"*.sqlite{COMPRESSED}")))
