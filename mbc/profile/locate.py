"""Finds the profile that applies to a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.hardware.cudnn_version import installed_cudnn
from mbc.hardware.part import split_name, whole_name
from mbc.hardware.spec import DeviceSpec, device_specs, is_listed_card, spec_like, unlisted_sheet
from mbc.hardware.target import LocalGpu, local_gpus
from mbc.profile.edit import merged
from mbc.profile.model import Profile, scaled_to, version_text
from mbc.profile.other_gpu import distance
from mbc.profile.partial_gpu import completed
from mbc.profile.paths import bundled_path, user_path
from mbc.profile.read_profile import read_profile
from mbc.units import with_article

MOST_CACHED = 8


def own_path(gpu: str) -> Path:
    """Return the path to which this machine's measurements of a GPU are written: `user_path`.

    If the file there is of another cuDNN than the installed one, it is renamed, with a warning: its times are not valid
    here.
    """
    path, installed = user_path(gpu), installed_cudnn()
    if path.is_file() and installed:
        measured = read_profile(path).cudnn
        if measured // 100 != installed // 100:
            aside = path.with_name(f"{path.stem}-cudnn{version_text(measured)}.sqlite")
            path.replace(aside)
            warnings.warn(
                f"the profile '{path}' was measured with cuDNN {version_text(measured)}, but "
                f"{version_text(installed)} is installed: it was renamed to '{aside}', and a new one is started",
                RuntimeWarning,
                stacklevel=2,
            )
    return path


def measured_here(gpu: str) -> Profile:
    """Return this machine's own measurements of a GPU.

    Raises:
        MbcError: MBC072, nothing was measured; MBC072 to MBC075, the file cannot be read.
    """
    path = user_path(gpu)
    if not path.exists():
        raise MbcError(
            "MBC072",
            f"there is no profile '{path}': no kernel was measured here on {with_article(gpu)}",
            "measure some with `mbc profile NET`, or name another GPU with --gpu; `mbc profile list` lists profiles",
        )
    return read_profile(path)


def find_profile(device: DeviceSpec, path: str | None = None, accept_stale: bool = False) -> Profile | None:
    """Return the profile that applies to `device`, or None.

    Without `path` this is the user's own profile of this GPU and the bundled one together, or either of them. What they
    lack is estimated: for a part of a GPU from the profile of the whole (`mbc.profile.partial_gpu`), for a whole GPU
    from the profile of the most similar one of its architecture, scaled to it (`mbc.profile.other_gpu`). That profile
    is `Profile.similar`, or the result itself if there is no other.

    A profile is stale if it is of another GPU than `device`, or if this machine has such a GPU and another cuDNN than
    the profile's. A stale profile at `path` is refused unless accepted; its times then count as estimates. Other stale
    profiles are left out with a warning.

    Args:
        device: The GPU to plan for.
        path: File of a profile; None to look for one.
        accept_stale: Accept a stale profile at `path`.

    Raises:
        MbcError: MBC072 to MBC075, a file cannot be read; MBC076, the profile at `path` is stale.
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
                "measure again with `mbc profile`, leave --profile out, or use its times as estimates with "
                "--stale-profile",
            )
        return replace(profile, stale=True)
    own = _own_or_bundled(device, here)
    name = split_name(device.name)
    if name.multiprocessors is None:
        similar = _of_similar(device)
        return similar if own is None else _completed_by(own, similar)
    whole = spec_like(str(name._replace(multiprocessors=None)), device.architecture, unlisted_sheet(device))
    of_whole = _own_or_bundled(whole, here)
    return own if of_whole is None else completed(own, of_whole, whole.multiprocessors / name.multiprocessors)


def _own_or_bundled(device: DeviceSpec, here: LocalGpu | None) -> Profile | None:
    """Return the user's own profile and the bundled one together, without stale ones."""
    fresh: list[Profile] = []
    paths = (user_path(device.name), bundled_path(device.name))
    for path in paths if is_listed_card(device) else paths[:1]:
        if path.is_file():
            profile = read_profile(path)
            reason = staleness(profile, device, here)
            if reason:
                warnings.warn(f"the profile '{path}' is left out: it {reason}", RuntimeWarning, stacklevel=2)
            else:
                fresh.append(_noted(profile, here))
    if len(fresh) == 2 and fresh[0].identity.alike(fresh[1].identity):
        return _once(_first_wins, *fresh)
    return fresh[0] if fresh else None


def _of_similar(device: DeviceSpec) -> Profile | None:
    """Return the profile of the GPU most similar to `device`, scaled to it; None if its architecture has none."""
    alike = [s for s in device_specs().values() if s.architecture == device.architecture]
    if is_listed_card(device):
        alike = [spec for spec in alike if spec.name != device.name]
    for source in sorted(alike, key=lambda spec: distance(spec, device)):
        profile = _own_or_bundled(source, None)
        if profile is not None:
            return _once(scaled_to, profile, source, device)
    return None


def _completed_by(profile: Profile, similar: Profile | None) -> Profile:
    """Return `profile` with the `similar` one if that has the engines of the same cuDNN."""
    if similar is None or similar.cudnn // 100 != profile.cudnn // 100:
        return profile
    return _once(_with_similar, profile, similar)


def _with_similar(profile: Profile, similar: Profile) -> Profile:
    return replace(profile, similar=similar)


def _first_wins(first: Profile, second: Profile) -> Profile:
    return merged(first, second, newer_wins=False)


_cache: dict[tuple[object, ...], tuple[tuple[Any, ...], Profile]] = {}


def _once(make: Callable[..., Profile], *of: Any) -> Profile:
    """Return the result of `make` for these objects, from a small cache if possible.

    A profile caches its answers, so that the same object should be used again.
    """
    key = (make, *map(id, of))
    if key not in _cache:
        _cache[key] = of, make(*of)  # with the objects, so that no other object gets their ids
        while len(_cache) > MOST_CACHED:
            del _cache[next(iter(_cache))]
    return _cache[key][1]


def staleness(profile: Profile, device: DeviceSpec, here: LocalGpu | None) -> str:
    """Return why the times of `profile` do not hold on `device`, or an empty text.

    Args:
        profile: The profile.
        device: The GPU to plan for.
        here: Such a GPU of this machine, if any.
    """
    if profile.identity.gpu != device.name:
        return f"was measured on {profile.identity.gpu}, but the plan is for {device.name}"
    installed = installed_cudnn() if here is not None else 0
    if installed and installed // 100 != profile.cudnn // 100:
        return f"was measured with cuDNN {version_text(profile.cudnn)}, but {version_text(installed)} is installed"
    return ""


def _noted(profile: Profile, here: LocalGpu | None) -> Profile:
    if here is not None and here.driver != profile.identity.driver:
        warnings.warn(
            f"the profile '{profile.source}' was measured with driver {profile.identity.driver}, but this machine has "
            f"{here.driver}: times may differ a little",
            RuntimeWarning,
            stacklevel=3,
        )
    return profile
