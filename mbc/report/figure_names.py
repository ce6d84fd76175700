"""Names of the figures that differ between two plans, in whole words and as on the cards of a plan's page."""

from __future__ import annotations

_NAMES = {
    "settings": "settings (--set)",
    "mbc": "version of mbc", "gpu": "GPU", "memory_bytes": "memory of the GPU", "cudnn": "cuDNN",
    "gpus": "GPUs",
    "rows": "rows of each GPU", "host_limit_bytes": "limit of host memory",
    "peer_limit_bytes": "limit of another GPU's memory", "train_us": "training step",
    "train_range_us": "training step, range", "infer_us": "inference", "infer_range_us": "inference, range",
    "measured_share": "measured part of the step", "host_bytes": "host memory", "peer_bytes": "another GPU's memory",
    "live_bytes": "peak live bytes", "floor_bytes": "least arena of any plan",
    "fastest_us": "best serial schedule", "least_us": "predicted lower bound",
    "train_launches": "launches of the step", "infer_launches": "launches of inference",
    "all_reduce_bytes": "all-reduce bytes", "all_reduce_us": "all-reduce alone",
    "sharded_state_bytes": "sharded optimizer states", "copied_to_host_bytes": "copied to the host",
    "copied_to_device_bytes": "copied from the host", "copied_to_peer_bytes": "copied to another GPU",
    "copied_from_peer_bytes": "copied from another GPU",
}  # fmt: skip


def figure_name(name: str) -> str:
    """Return the name of a figure of `PlanDiff.totals`."""
    return _NAMES.get(name) or name.removesuffix("_us").removesuffix("_bytes").replace("_", " ")
