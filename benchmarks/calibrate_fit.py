"""Shares of a GPU's peaks fitted to a profile, and their errors on layers that the fit has not seen.

`calibrate.py` fits and compares with these functions.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Candidate
from mbc.kernels.calibration import ALL, WITHOUT_WORKSPACE, Effort, Shares, shares_of, unfitted
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn_convolution import CUDNN_CONVOLUTION
from mbc.profile.model import Measurement, Profile
from mbc.profile.signature import read_signature, signature, with_rows

ESTIMATING = (CUDNN_CONVOLUTION, CUBLASLT, OWN)
LEAST_LAYERS = 3  # of a class on the fitting side; a kernel of mbc's own gets shares of its own from one
# Of fewer layers than these one figure is fitted: how much longer they take than the shares say that their class would
# have otherwise. Three figures fit a handful of sizes exactly, and miss all others. Half as many are enough for all
# passes of a library together, which differ more than the layers of one pass (decision 102).
MANY_LAYERS = 12
# A class without workspace is fitted where most of its candidates were measured. Measurements of others are the
# exception: a request without a decisive engine without workspace has only slow ones.
LEAST_FOUND = 0.75
ARITHMETIC = np.geomspace(0.002, 4, 48)
MEMORY = np.geomspace(0.01, 4, 48)
BYTES_ALONE = np.geomspace(0.01, 1, 37)  # no kernel moves bytes faster by doing nothing else
STARTS = np.geomspace(1, 32, 16)
PRIOR_WEIGHT = 1e-4
FINER = np.geomspace(0.82, 1 / 0.82, 21)


@dataclass(frozen=True)
class Sample:
    """An estimated candidate and the fastest measured candidate that may take its place (None: none was measured)."""

    layer: str
    request: str
    provider: str
    effort: Effort
    measured_us: float | None
    tested: bool

    @property
    def kind(self) -> str:
        """Kind of the operation."""
        return read_signature(self.request).kind

    @property
    def bare(self) -> bool:
        """True if a library runs the request without workspace."""
        return self.effort.variant.startswith(WITHOUT_WORKSPACE)

    @property
    def group(self) -> str:
        """Name of the group that the sample's error counts in."""
        return f"{self.effort.group} {WITHOUT_WORKSPACE}" if self.bare else self.effort.group


def samples(profile: Profile, device: DeviceSpec, unchanged: Container[str] = ()) -> Iterator[Sample]:
    """Yield the measurements of a profile that a fit can use.

    Profiling leaves out layouts of sizes that gain nothing, and kernels that are far slower. Kernels named `unchanged`
    also count with the times of their earlier versions.
    """
    for key in dict.fromkeys((*profile.measurements, *profile.earlier)):
        earlier = (m for m in profile.earlier.get(key, ()) if m.name in unchanged)
        measurements = (*profile.measurements.get(key, ()), *earlier)
        request = read_signature(key)
        layer = signature(with_rows(request, 0))
        tested = hashlib.sha256(layer.encode()).digest()[0] % 2 == 1
        alike: dict[tuple[Any, ...], list[Measurement]] = defaultdict(list)
        for m in measurements:
            if not m.refused:
                alike[m.provider, m.name, m.layouts].append(m)
        result = (
            Sample(layer, key, provider.name, effort, fastest_us(candidate, mine), tested)
            for provider in ESTIMATING
            for candidate, effort in provider.estimated(request, device)
            if (mine := alike.get((candidate.provider, candidate.name, candidate.layouts)))
        )
        yield from dict.fromkeys(result)  # what differs in its settings only is one estimate


def fastest_us(candidate: Candidate, measurements: Iterable[Measurement]) -> float | None:
    """Return the least measured time among kernels that may take an estimated candidate's place, or None."""
    admitted = (m for m in measurements if m.deterministic or not candidate.deterministic)
    return min((m.time_us for m in admitted if m.workspace_bytes <= candidate.workspace_bytes), default=None)


def fit(items: Sequence[Sample]) -> Shares:
    """Return the shares with the least mean distance between the logarithms of measured and estimated times."""
    measured = np.log([s.measured_us or 0.0 for s in items])
    launch, arithmetic, memory, least = (
        np.array([getattr(s.effort, name) for s in items])
        for name in ("launch_us", "arithmetic_us", "memory_us", "least_us")
    )
    best = (np.inf, 1.0, 1.0, 1.0)
    family, prior = bool(items[0].effort.family), unfitted(items[0].effort)
    joined = np.maximum if family else np.add  # as in `Effort.time_us`
    grids = (ARITHMETIC, MEMORY if arithmetic.any() else BYTES_ALONE, STARTS)
    for _ in range(2):  # over the whole range, then between the neighbours of the best
        # Where nothing is computed the share of the peak says nothing.
        for share, starts in product(grids[0] if arithmetic.any() else (1.0,), grids[2]):
            bytes_us = memory[None, :] / grids[1][:, None]
            work_us = np.maximum(joined((arithmetic / share)[None, :], bytes_us), least[None, :])
            estimated = np.log((launch * starts)[None, :] + work_us)
            distances = np.abs(measured[None, :] - estimated).mean(axis=1)
            if family:  # a limit that no sample meets stays as it was judged
                far = np.abs(np.log(grids[1] / prior.memory)) + abs(np.log(share / prior.arithmetic))
                distances += PRIOR_WEIGHT * far
            place = int(distances.argmin())
            best = min(best, (float(distances[place]), float(share), float(grids[1][place]), float(starts)))
        grids = (best[1] * FINER, best[2] * FINER, np.maximum(1.0, best[3] * FINER))
    return Shares(*(round(figure, 4) for figure in best[1:]))


def fitted(items: Sequence[Sample], families: Mapping[str, Shares] | None = None) -> dict[str, Shares]:
    """Return the shares of each class of work in the samples, and those of `families`, which are given."""
    given = families or {}
    classes: dict[str, list[Sample]] = defaultdict(list)
    for sample in items:
        if not sample.tested:
            classes[sample.effort.key].append(sample)
            if sample.provider == OWN.name:  # for layouts, and for kernels, that the profile has too little of
                classes[sample.effort.group].append(sample)
                classes[common_key(sample)].append(sample)
            elif not sample.bare:
                classes[sample.effort.common].append(sample)
    shares: dict[str, Shares] = dict(given)
    # Shares of all kernels of mbc, or of a family, come before those of each kernel.
    for key, group in sorted(classes.items(), key=lambda entry: (entry[0] != common_key(entry[1][0]), entry[0])):
        if key in given:
            continue
        measured = [s for s in group if s.measured_us is not None]
        enough = len({s.layer for s in measured}) >= (1 if group[0].provider == OWN.name else LEAST_LAYERS)
        if enough and (not group[0].bare or len(measured) >= LEAST_FOUND * len(group)):
            common = common_key(group[0])
            # The limits of a family are fitted once, because many of its kernels meet only one of them.
            all_passes = group[0].provider != OWN.name and key == group[0].effort.common
            many = MANY_LAYERS // 2 if all_passes else MANY_LAYERS
            few = len({s.layer for s in measured}) < many or (key != common and group[0].effort.family)
            start = unfitted(group[0].effort) if common in (key, "") else shares.get(common)
            shares[key] = scaled_shares(start, measured) if few and start is not None else fit(measured)
    return shares


def common_key(sample: Sample) -> str:
    """Return the class of all kernels with which a kernel of mbc has shares in common; empty for libraries."""
    return sample.effort.family or (OWN.name if sample.provider == OWN.name else "")


def scaled_shares(shares: Shares, items: Sequence[Sample]) -> Shares:
    """Return the shares for work that takes `factor` times as long."""
    factor = float(np.median([(s.measured_us or 0.0) / s.effort.time_us(shares) for s in items]))
    figures = (shares.arithmetic / factor, shares.memory / factor, max(1.0, shares.starts * factor))
    return Shares(*(round(figure, 4) for figure in figures))


def ratios(items: Iterable[Sample], shares: Mapping[str, Shares]) -> dict[str, list[float]]:
    """Return measured over estimated times by group, for the half of the requests that was not fitted.

    Each request counts with its best candidate. In the group of all providers a request counts once, for the provider
    that planning would choose.
    """
    requests: dict[tuple[str, bool], dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in items:
        if sample.tested:
            requests[sample.request, sample.bare][sample.provider].append(sample)
    by_group: dict[str, list[float]] = defaultdict(list)
    for (_, bare), providers in requests.items():
        compared: list[tuple[float, float]] = []
        for group in providers.values():
            measured = [s for s in group if s.measured_us is not None]
            if measured:
                estimate_us, best = min(
                    ((s.effort.time_us(shares_of(shares, s.effort)), s) for s in measured), key=_first
                )
                ratio = min(s.measured_us or 0.0 for s in measured) / estimate_us
                by_group[best.group].append(ratio)
                compared.append((estimate_us, ratio))
        if compared:
            by_group[f"{ALL} {WITHOUT_WORKSPACE}" if bare else ALL].append(min(compared)[1])
    return by_group


def _first(pair: tuple[float, Sample]) -> float:
    return pair[0]
