"""The GPU of a plan as the planner saw it, with the profile that is found here."""

from __future__ import annotations

from mbc.hardware.spec import DeviceSpec, known_spec
from mbc.plan.model import Plan
from mbc.profile.locate import find_profile
from mbc.profile.model import calibrated, for_ranks


def device_of(plan: Plan) -> DeviceSpec | None:
    """None of an unknown GPU."""
    device = known_spec(plan.target.gpu)
    if device is None:
        return None
    profile = find_profile(device)
    ranks = 1 if plan.graph.ranks is None else plan.graph.ranks.size
    return for_ranks(calibrated(device, profile), profile, ranks, plan.predictions.host_gpus)
