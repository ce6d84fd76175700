"""The GPU of a plan, with the profile of this machine, and the effect of the machine's other GPUs on its copies."""

from __future__ import annotations

from mbc.hardware.spec import DeviceSpec
from mbc.kernels.cuda.base import PROVIDER
from mbc.plan.model import Kernel, Plan
from mbc.profile.locate import find_profile
from mbc.profile.model import calibrated, for_ranks

LEAST_GAIN = 5e-4  # of a step, to be shown


def device_of(plan: Plan) -> DeviceSpec | None:
    """Return the GPU as the planner models it; None for an unknown GPU, and for a plan that no GPU runs."""
    device = plan.target.known_device
    if device is None or not plan.is_timed:
        return None
    profile = find_profile(device)
    ranks = 1 if plan.graph.ranks is None else plan.graph.ranks.size
    return for_ranks(calibrated(device, profile), profile, ranks, plan.predictions.host_gpus)


def library_launches(plan: Plan) -> int:
    """Return how many kernels of the step are those of libraries, which do not pose with the plan's GPU."""
    kernels = (launch.work for launch in plan.train.launches if isinstance(launch.work, Kernel))
    return sum(kernel.provider != PROVIDER for kernel in kernels)


def posing_text(plan: Plan) -> str:
    """Say as what the GPU of a plan poses, and which kernels do not; empty for a GPU that does not pose."""
    device = plan.target.device
    if not device.poses:
        return ""
    count, launches = library_launches(plan), len(plan.train.launches)
    libraries = f"{count} of {launches} launches are of libraries, which do not pose (--provider mbc leaves them out)"
    own = "all kernels of the step are mbc's own"
    return f"{device.own_architecture} with code and limits of {device.architecture}; {libraries if count else own}"


def host_sharing_text(plan: Plan) -> str:
    """Say how much faster the plan is because it considers the copies of other GPUs; empty without other GPUs."""
    p = plan.predictions
    if not p.host_gpus or not p.train_us:
        return ""
    gain = p.oblivious_us / p.train_us - 1
    compared = f"{gain:.1%} faster than" if gain >= LEAST_GAIN else "as fast as"
    return f"{p.host_gpus} GPUs copy with the host at a time: {compared} the plan that ignores the others"
