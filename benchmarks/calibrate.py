"""Fit the estimates for GPUs without a profile to a GPU that has one, and say how far off they are.

Layers are dealt to two halves by a hash of what they are, all micro-batches of a layer to the same half. The shares of
mbc.kernels.calibration are fitted to one half; the errors are those of the other, which the fit has not seen. Compared
are, for each request and provider, the best estimate and the fastest measured candidate that may take its place
(within the same workspace, and deterministic where it is), and the same for candidates without workspace. Beside that
stand times between measured sizes, and those from larger ones (scaled.py says more of them). Needs no GPU.

    python benchmarks/calibrate.py [--profile FILE] [--write] [--only GROUP | --missing]

Give it a profile as it was measured: the one that ships has only what planning can use. `--write` puts the result where
mbc finds it (mbc/data/estimates.json); with `--only` of the groups whose names begin so, the others stay. `--missing`
adds classes that the file lacks, from a profile of any GPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, show, write

from mbc.hardware.spec import DeviceSpec, device_specs
from mbc.kernels import PROVIDERS
from mbc.kernels.base import Candidate, Request
from mbc.kernels.calibration import (
    ALL,
    ESTIMATES_FILE,
    INTERPOLATED,
    WITHOUT_WORKSPACE,
    Calibration,
    Effort,
    Shares,
    Spread,
    scaled_group,
    shares_of,
    unfitted,
)
from mbc.kernels.calibration import (
    calibration as shipped,
)
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.profile.interpolate import between
from mbc.profile.locate import bundled_path
from mbc.profile.model import Measurement, Profile, calibrated
from mbc.profile.read import read_profile
from mbc.profile.scale import MOST_TIMES, octave, scaled
from mbc.profile.signature import read_signature, rows_of, signature, with_rows

ESTIMATING = (CUDNN_CONVOLUTION, CUBLASLT, OWN)
LEAST_LAYERS = 3  # of a class on the fitting side
# Of fewer layers than these one figure is fitted: how much longer they take than the shares say that their class would
# have otherwise. Three figures fit a handful of sizes exactly, and miss all others.
MANY_LAYERS = 12
# A class without workspace is fitted where most of its candidates were found. What was found of the others is the
# exception: a request for which no engine without workspace was worth measuring has only slow ones.
LEAST_FOUND = 0.75
ARITHMETIC = np.geomspace(0.002, 4, 48)
MEMORY = np.geomspace(0.01, 4, 48)
BYTES_ALONE = np.geomspace(0.01, 1, 37)  # no kernel moves bytes faster by doing nothing else
STARTS = np.geomspace(1, 32, 16)
FINER = np.geomspace(0.82, 1 / 0.82, 21)


@dataclass(frozen=True)
class Sample:
    """One estimated candidate and the fastest measured one that takes its place (None: nothing was found)."""

    layer: str
    request: str
    provider: str
    effort: Effort
    measured_us: float | None
    tested: bool

    @property
    def bare(self) -> bool:
        return self.effort.variant.startswith(WITHOUT_WORKSPACE)

    @property
    def group(self) -> str:
        return f"{self.effort.group} {WITHOUT_WORKSPACE}" if self.bare else self.effort.group


def samples(profile: Profile, device: DeviceSpec) -> Iterator[Sample]:
    """Of what was measured: profiling leaves out layouts of sizes that gain nothing, and kernels far slower."""
    for key, measurements in profile.measurements.items():
        request = read_signature(key)
        layer = signature(with_rows(request, 0))
        tested = hashlib.sha256(layer.encode()).digest()[0] % 2 == 1
        alike: dict[tuple[Any, ...], list[Measurement]] = defaultdict(list)
        for m in measurements:
            if not m.refused:
                alike[m.provider, m.name, m.layouts].append(m)
        found = (
            Sample(layer, key, provider.name, effort, fastest_us(candidate, mine), tested)
            for provider in ESTIMATING
            for candidate, effort in provider.estimated(request, device)
            if (mine := alike.get((candidate.provider, candidate.name, candidate.layouts)))
        )
        yield from dict.fromkeys(found)  # what differs in its settings only is one estimate


def fastest_us(candidate: Candidate, measurements: Iterable[Measurement]) -> float | None:
    """Of what a module may run for an estimated candidate."""
    admitted = (m for m in measurements if m.deterministic or not candidate.deterministic)
    return min((m.time_us for m in admitted if m.workspace_bytes <= candidate.workspace_bytes), default=None)


def fit(found: Sequence[Sample]) -> Shares:
    """The shares with the least mean distance between the logarithms of measured and estimated times."""
    measured = np.log([s.measured_us or 0.0 for s in found])
    launch, arithmetic, memory = (
        np.array([getattr(s.effort, name) for s in found]) for name in ("launch_us", "arithmetic_us", "memory_us")
    )
    best = (np.inf, 1.0, 1.0, 1.0)
    grids = (ARITHMETIC, MEMORY if arithmetic.any() else BYTES_ALONE, STARTS)
    for _ in range(2):  # over the whole range, then between the neighbours of the best
        # Where nothing is computed the share of the peak says nothing.
        for share, starts in product(grids[0] if arithmetic.any() else (1.0,), grids[2]):
            estimated = np.log((launch * starts + arithmetic / share)[None, :] + memory[None, :] / grids[1][:, None])
            distances = np.abs(measured[None, :] - estimated).mean(axis=1)
            place = int(distances.argmin())
            best = min(best, (float(distances[place]), float(share), float(grids[1][place]), float(starts)))
        grids = (best[1] * FINER, best[2] * FINER, np.maximum(1.0, best[3] * FINER))
    return Shares(*(round(figure, 4) for figure in best[1:]))


def fitted(found: Sequence[Sample]) -> dict[str, Shares]:
    classes: dict[str, list[Sample]] = defaultdict(list)
    for sample in found:
        if not sample.tested:
            classes[sample.effort.key].append(sample)
            if sample.provider == OWN.name:  # for layouts, and for kernels, that the profile has too little of
                classes[sample.effort.group].append(sample)
                classes[OWN.name].append(sample)
    shares: dict[str, Shares] = {}
    for key, group in sorted(classes.items()):
        known = [s for s in group if s.measured_us is not None]
        enough = len({s.layer for s in known}) >= LEAST_LAYERS
        if enough and (not group[0].bare or len(known) >= LEAST_FOUND * len(group)):
            few = len({s.layer for s in known}) < MANY_LAYERS
            # In order of the keys: the shares of all kernels of mbc come before those of each.
            start = shares.get(OWN.name) if key.startswith(f"{OWN.name} ") else unfitted(group[0].effort)
            shares[key] = scaled_shares(start, known) if few and start is not None else fit(known)
    return shares


def scaled_shares(shares: Shares, found: Sequence[Sample]) -> Shares:
    """The same shares of work that takes longer, or less long, by one factor."""
    factor = float(np.median([(s.measured_us or 0.0) / s.effort.time_us(shares) for s in found]))
    figures = (shares.arithmetic / factor, shares.memory / factor, shares.starts * factor)
    return Shares(*(round(figure, 4) for figure in figures))


def ratios(found: Iterable[Sample], shares: Mapping[str, Shares]) -> dict[str, list[float]]:
    """Measured over estimated by group: of each request the best, of the half that was not fitted. Overall a request
    counts once, as the provider does it that planning would take."""
    requests: dict[tuple[str, bool], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in found:
        if sample.tested:
            requests[sample.request, sample.bare][sample.provider].append(sample)
    by_group: dict[str, list[float]] = defaultdict(list)
    for (_, bare), providers in requests.items():
        compared: list[tuple[float, float]] = []
        for group in providers.values():
            known = [s for s in group if s.measured_us is not None]
            if known:
                estimate_us, best = min(((s.effort.time_us(shares_of(shares, s.effort)), s) for s in known), key=_first)
                ratio = min(s.measured_us or 0.0 for s in known) / estimate_us
                by_group[best.group].append(ratio)
                compared.append((estimate_us, ratio))
        if compared:
            by_group[f"{ALL} {WITHOUT_WORKSPACE}" if bare else ALL].append(min(compared)[1])
    return by_group


def _first(pair: tuple[float, Sample]) -> float:
    return pair[0]


def interpolated(profile: Profile) -> list[float]:
    """Measured over interpolated time of the candidate that looks fastest at a size, when its neighbours alone are
    known."""
    families: dict[str, dict[int, tuple[Candidate, ...]]] = defaultdict(dict)
    for key in profile.measurements:
        request = read_signature(key)
        families[signature(with_rows(request, 0))][rows_of(request)] = profile.candidates(request)
    found: list[float] = []
    for family in families.values():
        sizes = sorted(rows for rows, candidates in family.items() if candidates)
        for low, rows, high in zip(sizes, sizes[1:], sizes[2:], strict=False):
            guesses = between((low, family[low]), (high, family[high]), rows)
            known = {_key(c): c.time_us for c in family[rows]}
            guess = next((g for g in guesses if _key(g) in known), None)
            if guess is not None:
                found.append(known[_key(guess)] / guess.time_us)
    return found


@dataclass(frozen=True)
class ScaledTime:
    """A measured size scaled from a larger one: of one provider the kernel that looks fastest. `ratio`: measured over
    scaled time; `times`: how many times as many rows the larger size has."""

    request: Request
    provider: str
    times: float
    ratio: float


def scaled_times(profile: Profile, device: DeviceSpec, most_times: float = MOST_TIMES) -> Iterator[ScaledTime]:
    """Of every size from every larger one of up to so many times the rows."""

    @cache
    def offered(request: Request) -> tuple[Candidate, ...]:
        return tuple(c for p in PROVIDERS for c in p.candidates(request, device))

    for family in dict.fromkeys(with_rows(read_signature(key), 0) for key in profile.measurements):
        sizes = {
            rows: measured
            for rows, candidates in profile.family(family).items()
            if (measured := tuple(c for c in candidates if c.measured))
        }
        for rows, larger in product(sizes, sizes):
            if not rows < larger <= most_times * rows:
                continue
            request = with_rows(family, rows)
            known = {_key(c): c.time_us for c in sizes[rows]}
            guesses = scaled((larger, sizes[larger]), rows, offered(with_rows(family, larger)), offered(request))
            first: dict[str, Candidate] = {}
            for guess in guesses:
                if _key(guess) in known:
                    first.setdefault(guess.provider, guess)
            for provider, guess in first.items():
                yield ScaledTime(request, provider, larger / rows, known[_key(guess)] / guess.time_us)


def _key(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.provider, candidate.name, candidate.settings, candidate.layouts


def calibrate(profile: Profile) -> tuple[Calibration, list[dict[str, Any]]]:
    """The calibration, and a row for each group with the requests that it was compared on."""
    (spec,) = (s for s in device_specs().values() if s.name == profile.identity.gpu)
    device = calibrated(spec, profile)
    found = list(samples(profile, device))
    shares = fitted(found)
    by_group = ratios(found, shares)
    if between_sizes := interpolated(profile):
        by_group[INTERPOLATED] = between_sizes
    for size in scaled_times(profile, device):
        by_group[scaled_group(size.provider, octave(size.times))].append(size.ratio)
    spreads = {name: Spread.of(group) for name, group in sorted(by_group.items())}
    identity = profile.identity
    calibration = Calibration(
        identity.gpu,
        identity.driver,
        identity.cudnn,
        identity.date,
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        len(profile.measurements),
        shares,
        spreads,
    )
    return calibration, [row(name, spread) for name, spread in spreads.items()]


def row(name: str, spread: Spread) -> dict[str, Any]:
    return {
        "name": name,
        "requests": spread.count,
        "median": spread.median,
        "p10": spread.low,
        "p90": spread.high,
        "|error| median": spread.error,
        "|error| p90": spread.error_high,
    }


def text(calibration: Calibration) -> str:
    """The data file: one class or group a line."""

    def lines(table: Mapping[str, Any]) -> str:
        rows = (f"  {json.dumps(key)}: {json.dumps(_rounded(value))}" for key, value in sorted(table.items()))
        return "{\n" + ",\n".join(rows) + "\n }"

    plain = ("gpu", "driver", "cudnn", "measured", "fitted", "requests")
    parts = [f" {json.dumps(name)}: {json.dumps(getattr(calibration, name))}" for name in plain]
    parts += [f' "shares": {lines(calibration.shares)}', f' "spreads": {lines(calibration.spreads)}']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Shares | Spread) -> list[float]:
    return [round(figure, 4) for figure in astuple(value)]


def put_into(old: Calibration, new: Calibration, group: str) -> Calibration:
    """The old one with what the new one has of the groups whose names begin with `group`."""

    def mixed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in before.items() if not name.startswith(group)}
        return kept | {name: value for name, value in now.items() if name.startswith(group)}

    return replace(old, shares=mixed(old.shares, new.shares), spreads=mixed(old.spreads, new.spreads))


def add_missing(old: Calibration, profile: Profile) -> tuple[Calibration, list[dict[str, Any]]]:
    """The old one with the classes that it does not have, and a row for each group of these: shares are of a GPU's own
    peaks, so that they can be fitted on another. A group of mbc's kernels is taken whole, since its layouts would be of
    one GPU and what they have in common of another; libraries without workspace stay as they are, of which a profile
    has only what was worth measuring. A group gets a spread where it had none and enough was compared."""
    (spec,) = (s for s in device_specs().values() if s.name == profile.identity.gpu)
    found = list(samples(profile, calibrated(spec, profile)))
    groups = {s.effort.key: s for s in found}

    def is_missing(key: str) -> bool:
        sample = groups.get(key)
        if key in old.shares or (sample is not None and sample.bare):
            return False
        return not key.startswith(f"{OWN.name} ") or " ".join(key.split()[:2]) not in old.shares

    added = {key: share for key, share in fitted(found).items() if is_missing(key)}
    shares = {**old.shares, **added}
    by_group = {
        name: Spread.of(group) for name, group in sorted(ratios(found, shares).items()) if len(group) >= LEAST_LAYERS
    }
    got = {groups[key].group for key in added if key in groups}
    spreads = {name: spread for name, spread in by_group.items() if name in got and name not in old.spreads}
    rows = [row(name, spread) for name, spread in by_group.items() if name in got]
    return replace(old, shares=shares, spreads={**old.spreads, **spreads}), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=bundled_path("NVIDIA H200"))
    parser.add_argument("--write", action="store_true", help="into the package's data")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", default="", metavar="GROUP", help="write the groups that begin so, keep the others")
    which.add_argument("--missing", action="store_true", help="write the groups that are not there, keep the others")
    arguments = parser.parse_args()
    if (arguments.only or arguments.missing) and not arguments.write:
        parser.error("--only and --missing say what --write writes")
    profile = read_profile(arguments.profile)
    calibration, rows = add_missing(shipped(), profile) if arguments.missing else calibrate(profile)
    shares = {key: astuple(share) for key, share in calibration.shares.items()}
    path = write(
        "calibrate_missing" if arguments.missing else "calibrate", rows, profile=vars_of(profile), shares=shares
    )
    show(rows, ["name", "requests", "median", "p10", "p90", "|error| median", "|error| p90"])
    if arguments.write:
        put = calibration
        if arguments.only:
            put = put_into(shipped(), calibration, arguments.only)
        (ROOT / "mbc" / "data" / ESTIMATES_FILE).write_text(text(put), encoding="utf-8")
    print(path.name)


def vars_of(profile: Profile) -> dict[str, Any]:
    identity = profile.identity
    return {"gpu": identity.gpu, "driver": identity.driver, "cudnn": identity.cudnn, "date": identity.date}


if __name__ == "__main__":
    main()
