"""NCCL's library, called through ctypes.

The prototypes are those of nccl.h of NCCL 2.27 and later. `Config` is that header's `ncclConfig_v22700`. Later
versions accept it, too, because the struct contains its size and version.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from mbc.errors import MbcError
from mbc.runtime.library import library_folders, load_library, loaded_folder

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
# The first version for CUDA 13, and the first whose configuration has all fields of `Config`.
LEAST_VERSION = 22700
COPIES_VERSION = 22800  # the first with all-to-all and all-gather by copy engines
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_ZERO_CTAS = 2  # NCCL_CTA_POLICY_ZERO
_MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_REMEDY = "pip install 'mbc-compiler[nccl]'"


class DataType(IntEnum):
    """The members of ncclDataType_t that are used."""

    UINT8 = 1
    FP16 = 6
    FP32 = 7
    FP64 = 8
    BF16 = 9

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return {DataType.UINT8: 1, DataType.FP32: 4, DataType.FP64: 8}.get(self, 2)


class Reduction(IntEnum):
    """The members of ncclRedOp_t that are used."""

    SUM = 0
    MAX = 2


class UniqueId(ctypes.Structure):
    """The struct ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """The struct ncclConfig_v22700 (ncclConfig_t of nccl.h 2.27); fields that NCCL added later keep their defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    )


def config(max_ctas: int | None) -> Config:
    """Return the configuration of a communicator that does not block and shares nothing with other communicators.

    Its version is the struct's, not the library's.

    Args:
        max_ctas: Most thread blocks of a collective; None: NCCL decides; 0: none for collectives that copy engines can
            do.
    """
    settings = Config(ctypes.sizeof(Config), _MAGIC, LEAST_VERSION)
    for name, *_ in Config._fields_[3:]:
        if getattr(settings, name) is not None:  # pointers are null already
            setattr(settings, name, _UNDEFINED)
    settings.blocking, settings.split_share = 0, 0
    if max_ctas == 0:
        settings.cta_policy = _ZERO_CTAS
    elif max_ctas is not None:
        settings.min_ctas, settings.max_ctas = 1, max_ctas
    return settings


class Nccl:
    """The library's functions. `version` is NCCL's number: 22803 for 2.28.3."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        """Declare the argument types of the functions that are used.

        Raises:
            MbcError: MBC271 if the library is older than LEAST_VERSION.
        """
        self.calls = calls
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        calls.ncclGetErrorString.restype = calls.ncclGetLastError.restype = ctypes.c_char_p
        calls.ncclGetErrorString.argtypes = (integer,)
        calls.ncclGetLastError.argtypes = (pointer,)
        calls.ncclGetVersion.argtypes = (ctypes.POINTER(integer),)
        number = integer()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = number.value
        if self.version < LEAST_VERSION:
            report_too_old(self.version, LEAST_VERSION, "CUDA 13 and the configuration that mbc sets")
        calls.ncclGetUniqueId.argtypes = (ctypes.POINTER(UniqueId),)
        calls.ncclCommInitRankConfig.argtypes = (
            ctypes.POINTER(pointer), integer, UniqueId, integer, ctypes.POINTER(Config),
        )  # fmt: skip
        calls.ncclAllReduce.argtypes = (pointer, pointer, size, integer, integer, pointer, pointer)
        calls.ncclReduceScatter.argtypes = calls.ncclAllReduce.argtypes
        calls.ncclAllGather.argtypes = (pointer, pointer, size, integer, pointer, pointer)
        calls.ncclBroadcast.argtypes = (pointer, pointer, size, integer, integer, pointer, pointer)
        calls.ncclCommGetAsyncError.argtypes = (pointer, ctypes.POINTER(integer))
        if self.has_copies:
            calls.ncclAlltoAll.argtypes = calls.ncclAllGather.argtypes
            calls.ncclCommWindowRegister.argtypes = (pointer, pointer, size, ctypes.POINTER(pointer), integer)
            calls.ncclCommWindowDeregister.argtypes = (pointer, pointer)
        for name in ("ncclCommAbort", "ncclCommFinalize", "ncclCommDestroy", "ncclMemFree"):
            getattr(calls, name).argtypes = (pointer,)
        calls.ncclMemAlloc.argtypes = (ctypes.POINTER(pointer), size)

    @property
    def has_copies(self) -> bool:
        """True if copy engines can move the data of collectives."""
        return self.version >= COPIES_VERSION

    def call(self, function: str, *arguments: Any, communicator: int = 0) -> bool:
        """Call a function of NCCL.

        Returns:
            True if the call is done, False if it is in progress.

        Raises:
            MbcError: MBC272 if the function fails.
        """
        status = int(getattr(self.calls, function)(*arguments))
        if status not in (SUCCESS, IN_PROGRESS):
            raise self.failure(function, status, communicator)
        return status == SUCCESS

    def failure(self, function: str, status: int, communicator: int = 0) -> MbcError:
        """Return MBC272 for a function that failed with `status`."""
        texts = self.calls.ncclGetErrorString(status), self.calls.ncclGetLastError(communicator or None)
        what, more = ((text or b"").decode(errors="replace").strip() for text in texts)
        reason = f"{what}: {more}" if more else what
        return MbcError(
            "MBC272",
            f"NCCL failed in {function} (error {status}): {reason}",
            "another rank may have ended: look at the messages of the others; NCCL_DEBUG=WARN prints more",
        )

    def unique_id(self) -> bytes:
        """Return a new identity for a communicator, which one rank creates and all its ranks must share."""
        identity = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(identity))
        return bytes(identity)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of device memory that can be registered with a communicator; free it with `free`."""
        address = ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(address), size_bytes)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free memory of `allocate`."""
        self.call("ncclMemFree", address)

    def address(self, function: str) -> int:
        """Return the address of a function for code that is not Python; 0 if this version has no such function."""
        if not hasattr(self.calls, function):
            return 0
        return ctypes.cast(getattr(self.calls, function), ctypes.c_void_p).value or 0


def report_too_old(version: int, least: int, wanted: str) -> NoReturn:
    """Raise MBC271 for a version of NCCL that is too old for `wanted`.

    Raises:
        MbcError: MBC271, with the first version that has it.
    """
    raise MbcError(
        "MBC271",
        f"NCCL {version_text(version)} is too old for {wanted}, which need {version_text(least)}",
        f"{_REMEDY}, or upgrade the PyTorch that brought it",
    )


@lru_cache(maxsize=1)
def load_nccl() -> Nccl:
    """Return the NCCL at `nccl_path`, ready for communicators.

    Raises:
        MbcError: The errors of `open_nccl`.
    """
    # Multicast objects are not used: a static plan must run on machines that forbid them.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # All collectives of a step are in its graph. Support for others costs some 30 us for each collective (measured).
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    return open_nccl(nccl_path())


def nccl_path() -> Path:
    """Return the path of the NCCL to use.

    The NCCL that this process has loaded already (PyTorch brings one) is preferred to the first in `library_folders`,
    and this one to the system's, which is named without a folder.
    """
    loaded = loaded_folder("libnccl.so")
    folders = (loaded,) if loaded is not None else library_folders()
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).exists()), Path(LIBRARY))


def open_nccl(path: Path) -> Nccl:
    """Return the NCCL at a path.

    Raises:
        MbcError: MBC270 if it does not load, MBC271 if it is too old.
    """
    try:
        return Nccl(load_library(path))
    except (OSError, AttributeError) as error:  # AttributeError: a library of that name without NCCL's functions
        raise MbcError("MBC270", f"several GPUs need NCCL, which does not load: {error}", _REMEDY) from error


def version_text(number: int) -> str:
    """Return the text of a version number: `2.28.3` for 22803."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
