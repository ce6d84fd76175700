"""PyCUDA on this machine: its driver interface, a context to work in, and whether the GPU runs what was compiled."""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from mbc.errors import MbcError
from mbc.plan.model import Plan
from mbc.ranks.environment import device_of, read_environment


def open_driver() -> Any:
    """PyCUDA's driver interface, ready to use; MBC153 without PyCUDA, MBC152 without a GPU."""
    try:
        driver = importlib.import_module("pycuda.driver")
    except ModuleNotFoundError as error:
        raise MbcError(
            "MBC153", f"PyCUDA is not installed ({error})", "install mbc with its CUDA part: mbc-compiler[cuda]"
        ) from error
    except ImportError as error:
        raise no_gpu(str(error)) from error
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        raise no_gpu(str(error)) from error
    if count == 0:
        raise no_gpu("the driver knows none")
    return driver


def no_gpu(why: str) -> MbcError:
    """Return MBC152: a module is to run on a GPU, and there is none."""
    return MbcError("MBC152", f"there is no GPU to run on: {why}", 'use device="cpu", or see `mbc doctor`')


def open_context(driver: Any) -> Any:
    """The context that is current, or the primary one of a GPU, which PyTorch and others in the process share: of the
    first GPU, and of several ranks on a machine each takes its own (`device_of`, which may raise MBC266)."""
    current = driver.Context.get_current()
    if current is None:
        with _device_of_rank(driver):
            current = importlib.import_module("pycuda.autoprimaryctx").context
    return current


@contextmanager
def _device_of_rank(driver: Any) -> Generator[None]:
    """PyCUDA asks CUDA_DEVICE which GPU to take; processes that this one starts are none of its concern."""
    environment = read_environment(os.environ)
    if environment is None:
        yield
        return
    before = os.environ.get("CUDA_DEVICE")
    os.environ["CUDA_DEVICE"] = str(device_of(environment, driver.Device.count()))
    try:
        yield
    finally:
        del os.environ["CUDA_DEVICE"]
        if before is not None:
            os.environ["CUDA_DEVICE"] = before


def check_architecture(plan: Plan, gpu: Any) -> None:
    """Code for sm_XY runs on X.Z with Z >= Y; MBC154."""
    major, minor = gpu.compute_capability()
    planned = plan.target.architecture.removeprefix("sm_").rstrip("af")
    exact = plan.target.architecture[-1] in "af"
    same = (major, minor) == (int(planned[:-1]), int(planned[-1]))
    if same or (not exact and major == int(planned[:-1]) and minor >= int(planned[-1])):
        return
    raise MbcError(
        "MBC154",
        f"the plan is for {plan.target.gpu} ({plan.target.architecture}), this GPU is {gpu.name()} (sm_{major}{minor})",
        'compile with --gpu auto on this machine, or use device="cpu"',
    )
