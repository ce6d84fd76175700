"""Packages that are built for this machine's GPU and run there through PyCUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.codegen.build import write_package
from mbc.codegen.toolchain import find_toolchain
from mbc.plan.model import Plan


def need_gpu() -> None:
    """Skip the test where PyCUDA finds no GPU."""
    driver = pytest.importorskip(
        "pycuda.driver", reason="PyCUDA is not installed, or finds no driver", exc_type=ImportError
    )
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        pytest.skip(f"no GPU: {error}")
    if count == 0:
        pytest.skip("no GPU: the driver reports none")


def built(plan: Plan, folder: Path) -> Path:
    """Build the plan's package, and return its folder. Skip the test if it cannot be built."""
    package = write_package((plan,), folder, find_toolchain())
    if package.library is None:
        pytest.skip("the library cannot be built here: " + "; ".join(map(str, package.missing)))
    return package.folder
