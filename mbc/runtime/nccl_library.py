"""NCCL through ctypes: its library.

The prototypes are those of nccl.h of NCCL 2.27 and later; `Config` is its `ncclConfig_v22700`, which later versions
take, too, since the struct says its size and version.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from mbc.errors import MbcError
from mbc.runtime.library import library_folders, load_library, loaded_folder

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
# The first version for CUDA 13, and the first whose configuration has all fields of `Config`.
LEAST_VERSION = 22700
COPIES_VERSION = 22800  # the first whose all-to-all and all-gather copy engines can do
SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_ZERO_CTAS = 2  # NCCL_CTA_POLICY_ZERO
_MAGIC = 0xCAFEBEEF  # NCCL_API_MAGIC
_UNDEFINED = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_REMEDY = "pip install 'mbc-compiler[nccl]'"


class DataType(IntEnum):
    """ncclDataType_t, as far as it is used."""

    UINT8 = 1
    FP16 = 6
    FP32 = 7
    FP64 = 8
    BF16 = 9

    @property
    def size_bytes(self) -> int:
        return {DataType.UINT8: 1, DataType.FP32: 4, DataType.FP64: 8}.get(self, 2)


class Reduction(IntEnum):
    """ncclRedOp_t, likewise."""

    SUM = 0
    MAX = 2


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES),)


class Config(ctypes.Structure):
    """ncclConfig_v22700 (ncclConfig_t of nccl.h 2.27): later fields keep NCCL's defaults."""

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
    """Not blocking, nothing shared with other communicators, at most `max_ctas` thread blocks a collective (None: as
    many as NCCL likes; 0: none where copy engines can do it). The version is that of the struct, not of the library."""
    made = Config(ctypes.sizeof(Config), _MAGIC, LEAST_VERSION)
    for name, *_ in Config._fields_[3:]:
        if getattr(made, name) is not None:  # a pointer is null already
            setattr(made, name, _UNDEFINED)
    made.blocking, made.split_share = 0, 0
    if max_ctas == 0:
        made.cta_policy = _ZERO_CTAS
    elif max_ctas is not None:
        made.min_ctas, made.max_ctas = 1, max_ctas
    return made


class Nccl:
    """The library's functions. `version` as NCCL numbers it: 22803 for 2.28.3."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        """MBC271 where the library is older than LEAST_VERSION."""
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
            raise too_old(self.version, LEAST_VERSION, "CUDA 13 and the configuration that mbc sets")
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
        """Whether copy engines can move the data of collectives."""
        return self.version >= COPIES_VERSION

    def call(self, function: str, *arguments: Any, communicator: int = 0) -> bool:
        """Whether it is done already; False: in progress. MBC272 where it fails."""
        status = int(getattr(self.calls, function)(*arguments))
        if status not in (SUCCESS, IN_PROGRESS):
            raise self.failure(function, status, communicator)
        return status == SUCCESS

    def failure(self, function: str, status: int, communicator: int = 0) -> MbcError:
        told = self.calls.ncclGetErrorString(status), self.calls.ncclGetLastError(communicator or None)
        what, more = ((text or b"").decode(errors="replace").strip() for text in told)
        reason = f"{what}: {more}" if more else what
        return MbcError(
            "MBC272",
            f"NCCL failed in {function} (error {status}): {reason}",
            "another rank may have ended: look at what the others say; NCCL_DEBUG=WARN tells more",
        )

    def unique_id(self) -> bytes:
        """What the ranks of one communicator must share: made by one of them, once a communicator."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def allocate(self, size_bytes: int) -> int:
        """Device memory that can be registered with a communicator; `free` it."""
        address = ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(address), size_bytes)
        return address.value or 0

    def free(self, address: int) -> None:
        self.call("ncclMemFree", address)

    def address(self, function: str) -> int:
        """Of a function, for code that is not Python; 0 where this version has none of that name."""
        if not hasattr(self.calls, function):
            return 0
        return ctypes.cast(getattr(self.calls, function), ctypes.c_void_p).value or 0


def too_old(version: int, least: int, wanted: str) -> MbcError:
    """MBC271."""
    return MbcError(
        "MBC271",
        f"NCCL {version_text(version)} is too old for {wanted}: {version_text(least)} is the first",
        f"{_REMEDY}, or upgrade the PyTorch that brought it",
    )


@lru_cache(maxsize=1)
def load_nccl() -> Nccl:
    """That of `nccl_path`, ready for communicators. Raises what `open_nccl` does."""
    # Multicast objects are not used: a static plan must run on machines that forbid them.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # A step's collectives are all in its graph. Support for others beside it takes some 30 us of each (measured).
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    return open_nccl(nccl_path())


def nccl_path() -> Path:
    """The NCCL that this process has loaded already (PyTorch brings one), else the first of `library_folders`, else the
    system's, by its name alone."""
    loaded = loaded_folder("libnccl.so")
    folders = (loaded,) if loaded is not None else library_folders()
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).exists()), Path(LIBRARY))


def open_nccl(path: Path) -> Nccl:
    """MBC270 where it does not load, MBC271 where it is too old."""
    try:
        return Nccl(load_library(path))
    except (OSError, AttributeError) as error:  # AttributeError: a library of that name without NCCL's functions
        raise MbcError("MBC270", f"several GPUs need NCCL, which does not load: {error}", _REMEDY) from error


def version_text(number: int) -> str:
    """`2.28.3` for 22803."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
