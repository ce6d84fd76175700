"""The workspaces with which a profile's kernels ran, to check those of a plan."""

from __future__ import annotations

from collections.abc import Callable

from mbc.kernels.base import Call
from mbc.profile.model import Profile
from mbc.profile.signature import rows_of


def measured_workspace(profile: Profile | None) -> Callable[[str, Call], int | None]:
    """Return a function that maps a provider and its call to the measured bytes of workspace.

    The function returns None if this call was not measured with the same number of rows.
    """

    def measured_bytes(provider: str, call: Call) -> int | None:
        if profile is None:
            return None
        sizes_bytes = (
            c.workspace_bytes
            for c in profile.family(call.request).get(rows_of(call.request), ())
            if (c.provider, c.name, c.settings) == (provider, call.name, call.settings) and call.has_layouts(c.layouts)
        )
        return min(sizes_bytes, default=None)

    return measured_bytes
