"""PyCUDA on this machine: its driver interface, a context, and a check that the GPU can run the compiled code."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.hardware.datasheet import capability_of
from mbc.plan.model import Plan
from mbc.plan.newer_gpu import binding_kernels, is_forward_compatible
from mbc.ranks.environment import device_of, read_environment

MOST_NAMED = 4  # kernels that a message names


def open_driver() -> Any:
    """Return PyCUDA's driver interface, ready to use.

    Raises:
        MbcError: MBC153 without PyCUDA, MBC152 without a GPU.
    """
    try:
        driver = importlib.import_module("pycuda.driver")
    except ModuleNotFoundError as error:
        raise MbcError(
            "MBC153", f"PyCUDA is not installed ({error})", "install mbc with its CUDA part: mbc-compiler[cuda]"
        ) from error
    except ImportError as error:
        report_no_gpu(str(error))
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        report_no_gpu(str(error))
    if count == 0:
        report_no_gpu("the driver reports none")
    return driver


def report_no_gpu(why: str) -> NoReturn:
    """Raise MBC152: a module shall run on a GPU, but there is none.

    Raises:
        MbcError: MBC152, with the reason.
    """
    raise MbcError("MBC152", f"there is no GPU to run on: {why}", 'use device="cpu", or see `mbc doctor`')


def open_context(driver: Any) -> Any:
    """Return the current context, or the primary context of a GPU, which PyTorch and others in the process share.

    That GPU is the first one. Of several ranks on a machine each takes its own GPU (`device_of`, which may raise
    MBC266).
    """
    current = driver.Context.get_current()
    if current is None:
        with _device_of_rank(driver):
            current = importlib.import_module("pycuda.autoprimaryctx").context
    return current


@contextmanager
def _device_of_rank(driver: Any) -> Generator[None]:
    """Set CUDA_DEVICE, from which PyCUDA reads the GPU's number, while the context is created.

    Processes that this process starts later must not see the variable.
    """
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
    """Raise an error unless the GPU runs code for the plan's architecture: an equal or a newer one.

    A GPU that poses runs code for the architecture as which it poses. A newer GPU runs the package if no
    kernel of the plan binds it (`mbc.plan.newer_gpu`); a warning then says so.

    Raises:
        MbcError: MBC154 if the GPU cannot run the code.
    """
    major, minor = gpu.compute_capability()
    architecture, planned = f"sm_{major}{minor}", capability_of(plan.target.architecture)
    here = f"the plan is for {plan.target.gpu} ({plan.target.architecture}); this GPU is {gpu.name()} ({architecture})"
    if 10 * major + minor in (planned, capability_of(plan.target.device.own_architecture)):
        return
    remedy = 'compile with --gpu auto on this machine, or use device="cpu"'
    if 10 * major + minor < planned or not is_forward_compatible(plan.target.architecture):
        raise MbcError("MBC154", here, remedy)
    if binding := binding_kernels(plan, architecture):
        more = f" and {len(binding) - MOST_NAMED} more" if len(binding) > MOST_NAMED else ""
        named = ", ".join(binding[:MOST_NAMED])
        raise MbcError("MBC154", f"{here}, which cannot run {named}{more}", remedy)
    warnings.warn(
        f"{here}, which runs its code, compiled again by the driver where necessary; for kernels and a plan of its own "
        "compile with --gpu auto on this machine",
        RuntimeWarning,
        stacklevel=2,
    )
