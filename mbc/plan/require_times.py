"""The check that plans of a network have predicted times."""

from __future__ import annotations

from mbc.errors import MbcError
from mbc.ir.types import Precision


def require_predicted_times(network: str, precision: Precision, purpose: str) -> None:
    """Refuse a purpose that needs predicted times, if plans in this precision have none.

    Args:
        network: Name of the network.
        precision: Its precision.
        purpose: What needs the times, such as `a roofline`.

    Raises:
        MbcError: MBC196, plans in this precision have no predicted times.
    """
    if not precision.runs_on_gpus:
        raise MbcError(
            "MBC196",
            f"'{network}' is in {precision}, which is for the CPU: {purpose} needs predicted times",
            "choose another precision with --set train.precision=fp32",
        )
