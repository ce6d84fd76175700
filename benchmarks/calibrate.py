"""Fit the estimates for GPUs without a profile to a GPU that has a profile, and report the errors of the fit.

A hash of each layer assigns the layer with all its micro-batches to one of two halves. The shares of
mbc.kernels.calibration are fitted to one half; the errors are those of the other half. For each request and provider,
the best estimate is compared with the fastest measured candidate that may take its place: within the same workspace,
and deterministic if the estimate is. Candidates without workspace are compared separately. Two more comparisons follow:
times interpolated between measured sizes, and times scaled from larger sizes. Needs no GPU.

    python benchmarks/calibrate.py [--profile FILE] [--write] [--only GROUP ... | --missing]
                                    [--unchanged KERNEL ...]
    python benchmarks/calibrate.py --profile FILE --check

Use a profile as it was measured: the profile that comes with mbc has only what planning can use. `--write` writes the
result to mbc/data/estimates.json, where mbc reads it. With `--only` it writes only the groups whose names begin with a
GROUP. `--missing` adds the classes that the file lacks, from a profile of any GPU. `--check` fits nothing: it reports
the errors of the current shares on all requests of a profile, for example of a GPU that the fit has not seen. Limits of
a family of kernels are fitted in posing only; a profile of a GPU that does not pose adds factors of single kernels.
`--unchanged` names kernels whose version was raised without a change of their code: times of earlier versions count.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import record  # before what needs mbc, which it finds where that is not installed
from calibrate_fit import LEAST_LAYERS, Sample, fitted, ratios, samples
from calibrate_sizes import interpolated, scaled_times

from mbc.hardware.spec import DeviceSpec, spec_like
from mbc.kernels.calibration import ESTIMATES_FILE, INTERPOLATED, Calibration, Shares, Spread, scaled_group
from mbc.kernels.calibration import calibration as shipped
from mbc.kernels.cuda import OWN
from mbc.kernels.statistics import WITH_STATISTICS
from mbc.profile.model import Profile, calibrated
from mbc.profile.other_rows import octave
from mbc.profile.paths import bundled_path, file_name
from mbc.profile.read_profile import read_profile

COLUMNS = ("name", "requests", "median", "p10", "p90", "|error| median", "|error| p90")


def calibrate(profile: Profile, unchanged: Container[str] = ()) -> tuple[Calibration, list[dict[str, Any]]]:
    """Return the calibration, and a row for each group with the errors on the requests that the fit has not seen."""
    device = device_of(profile)
    result = list(samples(profile, device, unchanged))
    shares = fitted(result, families_of(result, device))
    by_group = ratios(result, shares)
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


def device_of(profile: Profile) -> DeviceSpec:
    """Return the GPU of a profile, which may pose as another architecture, with what the profile says of it."""
    return calibrated(spec_like(profile.identity.gpu, profile.identity.architecture), profile)


def families_of(result: Sequence[Sample], device: DeviceSpec) -> dict[str, Shares]:
    """Return the shares that ship of the families in the samples, unless the GPU poses: then they are fitted anew."""
    if device.poses:
        return {}
    families = {s.effort.family for s in result} & shipped().shares.keys()
    return {family: shipped().shares[family] for family in families}


def row(name: str, spread: Spread) -> dict[str, Any]:
    """Return the row of a group: how far measured times are from estimated ones."""
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
    """Return the text of the data file, with one line for each class or group."""

    def lines(table: Mapping[str, Any]) -> str:
        rows = (f"  {json.dumps(key)}: {json.dumps(_rounded(value))}" for key, value in sorted(table.items()))
        return "{\n" + ",\n".join(rows) + "\n }"

    plain = ("gpu", "driver", "cudnn", "measured", "fitted", "requests")
    parts = [f" {json.dumps(name)}: {json.dumps(getattr(calibration, name))}" for name in (*plain, "posed")]
    parts += [f' "shares": {lines(calibration.shares)}', f' "spreads": {lines(calibration.spreads)}']
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _rounded(value: Shares | Spread) -> list[float]:
    return [round(figure, 4) for figure in astuple(value)]


def put_into(old: Calibration, new: Calibration, *groups: str) -> Calibration:
    """Return `old`, in which the groups of `new` whose names begin with one of `groups` replace the old ones.

    A spread also replaces the old one if `groups` name single classes of its group.
    """

    def mixed(before: Mapping[str, Any], now: Mapping[str, Any], holds: Callable[[str], bool]) -> dict[str, Any]:
        return {k: v for k, v in before.items() if not holds(k)} | {k: v for k, v in now.items() if holds(k)}

    def is_renewed(name: str) -> bool:
        return name.startswith(groups) or any(one.startswith(f"{name} ") for one in groups)

    shares = mixed(old.shares, new.shares, lambda name: name.startswith(groups))
    return replace(old, shares=shares, spreads=mixed(old.spreads, new.spreads, is_renewed))


def add_missing(old: Calibration, profile: Profile) -> tuple[Calibration, list[dict[str, Any]]]:
    """Return `old` with the classes that it lacks, and a row for each of their groups.

    Shares are of a GPU's own peaks, so they can be fitted on another GPU. A group of mbc's kernels is added whole.
    Otherwise its layouts would be fitted on one GPU, and what all layouts have in common on another. Libraries without
    workspace stay unchanged, because a profile has only their decisive measurements. A group gets an error spread if it
    had none and enough requests were compared.

    Classes of a family (`Effort.family`) replace earlier ones if the profile is of a GPU that poses.
    """
    device = device_of(profile)
    result = list(samples(profile, device))
    groups = {s.effort.key: s for s in result}
    of_family = {
        name for s in result if device.poses and s.effort.family
        for name in (s.effort.key, s.effort.group, s.effort.family)
    }  # fmt: skip
    # Statistics in the epilogue gain nothing by an estimate (decision 026), except in a family of kernels (083).
    unfit = {
        name for s in result if s.kind == WITH_STATISTICS and not s.effort.family
        for name in (s.effort.key, s.effort.group)
    }  # fmt: skip

    def is_missing(key: str) -> bool:
        sample = groups.get(key)
        if key in of_family:
            return True
        if key in old.shares or key in unfit or (sample is not None and sample.bare):
            return False
        return not key.startswith(f"{OWN.name} ") or " ".join(key.split()[:2]) not in old.shares

    families = families_of(result, device)
    added = {key: share for key, share in fitted(result, families).items() if is_missing(key)}
    shares = {**old.shares, **added}
    by_group = {
        name: Spread.of(group) for name, group in sorted(ratios(result, shares).items()) if len(group) >= LEAST_LAYERS
    }
    got = {groups[key].group for key in added if key in groups}
    replaced = {name for name in got if name in of_family or name not in old.spreads}
    spreads = {name: spread for name, spread in by_group.items() if name in replaced}
    rows = [row(name, spread) for name, spread in by_group.items() if name in got]
    posed = f"{profile.identity.gpu} ({profile.identity.date})" if of_family else old.posed
    return replace(old, shares=shares, spreads={**old.spreads, **spreads}, posed=posed), rows


def checked(profile: Profile) -> list[dict[str, Any]]:
    """Return a row for each group: measured over estimated times of all requests, by the shares that ship with mbc."""
    result = (replace(sample, tested=True) for sample in samples(profile, device_of(profile)))
    by_group = ratios(result, shipped().shares)
    by_group[OWN.name] = [
        ratio for name, group in by_group.items() if name.startswith(f"{OWN.name} ") for ratio in group
    ]
    return [row(name, Spread.of(group)) for name, group in sorted(by_group.items()) if group]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=bundled_path("NVIDIA H200"))
    parser.add_argument("--write", action="store_true", help="into the package's data")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", metavar="GROUP", help="write the groups that begin so, keep the others")
    which.add_argument("--missing", action="store_true", help="write the groups that are not there, keep the others")
    parser.add_argument("--unchanged", nargs="*", default=(), metavar="KERNEL", help="count earlier versions of these")
    which.add_argument("--check", action="store_true", help="compare the shares that ship, fit nothing")
    arguments = parser.parse_args()
    if arguments.check and arguments.write:
        parser.error("--check has nothing to write")
    if (arguments.only or arguments.missing) and not arguments.write:
        parser.error("--only and --missing say what --write writes")
    profile = read_profile(arguments.profile)
    of = file_name(profile.identity.gpu).removesuffix(".sqlite")
    if arguments.check:
        rows = checked(profile)
        record.write(f"calibrate_check_{of}", rows, profile=vars_of(profile))
        record.show(rows, COLUMNS)
        return
    if arguments.missing:
        calibration, rows = add_missing(shipped(), profile)
    else:
        calibration, rows = calibrate(profile, arguments.unchanged)
    groups = tuple(arguments.only or ("",))
    rows = [row for row in rows if row["name"].startswith(groups)]
    shares = {key: astuple(share) for key, share in calibration.shares.items() if key.startswith(groups)}
    name = f"calibrate_{'missing' if arguments.missing else 'only'}_{of}"
    name = name if arguments.missing or arguments.only else "calibrate"
    path = record.write(name, rows, profile=vars_of(profile), shares=shares)
    record.show(rows, COLUMNS)
    if arguments.write:
        put = calibration
        if arguments.only:
            put = put_into(shipped(), calibration, *arguments.only)
        (record.ROOT / "mbc" / "data" / ESTIMATES_FILE).write_text(text(put), encoding="utf-8")
    print(path.name)


def vars_of(profile: Profile) -> dict[str, Any]:
    """Return the entries of a result that identify the profile."""
    identity = profile.identity
    return {"gpu": identity.gpu, "driver": identity.driver, "cudnn": identity.cudnn, "date": identity.date}


if __name__ == "__main__":
    main()
