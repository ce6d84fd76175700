"""A GPU that does not exist: an H200 whose blocks form no clusters, so that small tensors are not normed at once."""

from __future__ import annotations

from dataclasses import replace

from mbc.hardware.spec import DeviceSpec, find_spec


def _unclustered() -> DeviceSpec:
    spec, architecture = find_spec("h200"), "sm_80"
    assert spec.sheet is not None
    sheet = replace(spec.sheet, architecture=architecture)
    return replace(spec, name="a GPU without clusters", architecture=architecture, sheet=sheet)


UNCLUSTERED = _unclustered()
