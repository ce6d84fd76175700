"""The workspaces with which a profile's kernels were run, against which those of a plan are checked."""

from __future__ import annotations

from collections.abc import Callable

from mbc.kernels.base import Call
from mbc.profile.model import Profile
from mbc.profile.signature import rows_of


def measured_workspace(profile: Profile | None) -> Callable[[str, Call], int | None]:
    """A function of a provider and its call: the bytes with which this very call was measured; None where it was not,
    for as many rows."""

    def measured_bytes(provider: str, call: Call) -> int | None:
        if profile is None:
            return None
        found = (
            c.workspace_bytes
            for c in profile.family(call.request).get(rows_of(call.request), ())
            if (c.provider, c.name, c.settings) == (provider, call.name, call.settings) and call.has_layouts(c.layouts)
        )
        return min(found, default=None)

    return measured_bytes
