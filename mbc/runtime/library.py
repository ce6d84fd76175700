"""A package's built library: found, loaded with the CUDA libraries that it needs, and called through ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mbc.errors import MbcError
from mbc.plan.accumulation import ACCUMULATE
from mbc.plan.cut import ADD, BACKWARD, FORWARD
from mbc.plan.model import Plan

LIBRARY_FILE = "libmodule.so"
ABI_VERSION = 5  # MBC_ABI_VERSION of templates/include/mbc_module.h
# A plan has one of the two kinds of parts.
PROGRAMS = {"train": 0, "infer": 1, ACCUMULATE: 2, FORWARD: 2, BACKWARD: 3, ADD: 4}

_CUDNN = "libcudnn.so."
# cuDNN opens these libraries by name when it needs them, and only the process's search path counts then. mbc loads them
# beforehand from cuDNN's folder, so that they cannot belong to another cuDNN.
_CUDNN_PARTS = ("graph", "ops", "cnn", "heuristic", "engines_precompiled", "engines_runtime_compiled")
_MISSING = re.compile(r"^(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")


def library_folders() -> Iterator[Path]:
    """Yield folders that may hold CUDA's libraries.

    The best come first: pip's packages, then the environment, the toolkit, and PyTorch's folder.
    """
    spec = importlib.util.find_spec("nvidia")
    for root in sorted(spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(root).glob("*/lib"))
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if entry:
            yield Path(entry)
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for toolkit in (*toolkits, Path("/usr/local/cuda")):
        yield from (toolkit / "lib64", *sorted(toolkit.glob("targets/*/lib")))
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        yield Path(torch.origin).parent / "lib"


def load_library(path: Path) -> ctypes.CDLL:
    """Return the library at `path`, after loading each library that it needs and the system's loader does not find.

    Raises:
        OSError: A library is missing or cannot be loaded.
    """
    tried: set[str] = set()
    while True:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            match = _MISSING.match(str(error))
            if match is None or match[1] in tried:
                raise
            tried.add(match[1])
            place = next((folder / match[1] for folder in library_folders() if (folder / match[1]).exists()), None)
            if place is None:
                raise
            ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)


def loaded_folder(prefix: str) -> Path | None:
    """Return the folder of a library that this process has loaded and whose name starts with `prefix`, or None."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/"))
    return next((Path(path).parent for path in paths if Path(path).name.startswith(prefix)), None)


def _load_cudnn_parts(folder: Path) -> None:
    pending = [path for part in _CUDNN_PARTS for path in sorted(folder.glob(f"libcudnn_{part}.so.*"))[:1]]
    for path in pending:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


class RanksInterface(ctypes.Structure):
    """MbcRanks of templates/include/mbc_module.h."""

    _fields_ = (
        ("all_reduce", ctypes.c_void_p),
        ("all_to_all", ctypes.c_void_p),
        ("all_gather", ctypes.c_void_p),
        ("reduce_scatter", ctypes.c_void_p),
        ("reduce", ctypes.c_void_p),
        ("broadcast", ctypes.c_void_p),
        ("async_error", ctypes.c_void_p),
        ("error_string", ctypes.c_void_p),
        ("group_start", ctypes.c_void_p),
        ("group_end", ctypes.c_void_p),
        ("communicator", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
    )


class Library:
    """One module's instance of the C interface of `templates/include/mbc_module.h`.

    Its methods raise MBC159 if a call fails; the text names the operation.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Load the library in `folder` and check that it belongs to `plan`.

        Raises:
            MbcError: MBC157 (not built, or does not load), MBC158 (built for another plan), MBC156 (another cuDNN).
        """
        path = folder / LIBRARY_FILE
        try:
            self._calls = calls = load_library(path)
            cudnn_folder = loaded_folder(_CUDNN)
            if plan.target.cudnn and cudnn_folder is not None:
                _load_cudnn_parts(cudnn_folder)
        except OSError as error:
            raise MbcError(
                "MBC157", f"cannot load '{path}': {error}", "see `mbc doctor` for what is missing"
            ) from error
        calls.mbc_cudnn_version.restype = ctypes.c_size_t
        calls.mbc_last_error.restype = ctypes.c_char_p
        for name in ("mbc_warm", "mbc_capture", "mbc_last_error", "mbc_destroy"):
            getattr(calls, name).argtypes = (ctypes.c_void_p,)
        for name in ("mbc_run", "mbc_run_eager"):
            getattr(calls, name).argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._path = path
        calls.mbc_destroy.restype = None
        self._module = ctypes.c_void_p()
        self._check_identity(plan, path)
        self._check_cudnn(plan, cudnn_folder)

    def limit(self, multiprocessors: int) -> None:
        """Size launches for a part of the GPU with this number of multiprocessors.

        Raises:
            MbcError: MBC158 if the library was built before mbc could use a part of a GPU.
        """
        call = getattr(self._calls, "mbc_set_multiprocessors", None)
        if call is None:
            raise self._older("for a whole GPU only")
        call(ctypes.c_int64(multiprocessors))

    def _older(self, lacking: str) -> MbcError:
        return MbcError(
            "MBC158",
            f"'{self._path}' was built by an older mbc, {lacking}",
            "build the package again with `mbc compile --force`",
        )

    def create(
        self, arena: int, arena_bytes: int, host: int, host_bytes: int, peer: int, peer_bytes: int,
        streams: Sequence[int], ranks: RanksInterface | None = None,
    ) -> None:  # fmt: skip
        """Create the library's handles and plans over memory, streams and a communicator that must outlive it.

        Args:
            arena: Address of the arena.
            arena_bytes: Size of the arena.
            host: Address of pinned host memory; 0 if there is none.
            host_bytes: Size of the pinned host memory.
            peer: Address of another GPU's memory; 0 if there is none.
            peer_bytes: Size of the other GPU's memory.
            streams: Handles of the streams.
            ranks: NCCL's functions and the communicator; None for one process.
        """
        create = self._calls.mbc_create
        create.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
        )  # fmt: skip
        handles = (ctypes.c_void_p * len(streams))(*streams)
        shared = None if ranks is None else ctypes.byref(ranks)
        module = ctypes.byref(self._module)
        self._check(
            create(arena, arena_bytes, host or None, host_bytes, peer or None, peer_bytes, handles, shared, module)
        )

    @property
    def cudnn_version(self) -> int:
        """Version of the loaded cuDNN as cuDNN numbers it; 0 if the plan does not use cuDNN."""
        return int(self._calls.mbc_cudnn_version())

    def warm(self) -> None:
        """Run every launch of all programs once, waiting for each."""
        self._check(self._calls.mbc_warm(self._module))

    def capture(self, listener: int | None = None) -> None:
        """Capture all programs into executable graphs.

        Args:
            listener: Address of an MbcNodeOfLaunch, which is called with the launch of each node; None for no listener.

        Raises:
            MbcError: MBC158 if the library is too old to call a listener.
        """
        if listener is None:
            self._check(self._calls.mbc_capture(self._module))
            return
        call = getattr(self._calls, "mbc_capture_told", None)
        if call is None:
            raise self._older("which does not report the launch of a graph's node")
        call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._check(call(self._module, listener))

    def run(self, program: str, eager: bool) -> None:
        """Start a captured program; `eager`: run it launch by launch, and wait."""
        call = self._calls.mbc_run_eager if eager else self._calls.mbc_run
        self._check(call(self._module, PROGRAMS[program]))

    def run_launch(self, program: str, index: int) -> None:
        """Run one launch and wait for it.

        Raises:
            MbcError: MBC158 if the library is too old to run single launches.
        """
        call = getattr(self._calls, "mbc_run_launch", None)
        if call is None:
            raise self._older("which cannot run launches one by one")
        call.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
        self._check(call(self._module, PROGRAMS[program], index))

    def destroy(self) -> None:
        """Destroy the library's handles, plans and graphs."""
        if self._module:
            self._calls.mbc_destroy(self._module)
            self._module = ctypes.c_void_p()

    def _check(self, status: int) -> None:
        if status != 0:
            text: bytes = self._calls.mbc_last_error(self._module) or b"no reason given"
            raise MbcError("MBC159", f"on the GPU: {text.decode(errors='replace')}", "see `mbc doctor`")

    def _check_identity(self, plan: Plan, path: Path) -> None:
        version, predicted = int(self._calls.mbc_abi_version()), plan.predictions
        expected = predicted.arena_bytes, predicted.host_bytes, predicted.peer_bytes
        if version == ABI_VERSION:
            sizes = (self._bytes("arena"), self._bytes("host"), self._bytes("peer"))
            if sizes == expected:
                return
            what = "arena {:,} bytes, host {:,}, peer {:,}"
            difference = f"{what.format(*sizes)}; expected {what.format(*expected)}"
        else:
            difference = f"interface {version}; expected {ABI_VERSION}"
        raise MbcError(
            "MBC158",
            f"'{path}' was built for another plan: {difference}",
            "build the package again with `mbc compile --force`",
        )

    def _bytes(self, space: str) -> int:
        call = getattr(self._calls, f"mbc_{space}_bytes")
        call.restype = ctypes.c_uint64
        return int(call())

    def _check_cudnn(self, plan: Plan, folder: Path | None) -> None:
        """Raise an error unless the loaded cuDNN has the minor version for which the plan chose engines and settings.

        Raises:
            MbcError: MBC156 if the minor versions differ.
        """
        planned, loaded = plan.target.cudnn, self._calls.mbc_cudnn_version()
        if planned and loaded // 100 != planned // 100:
            raise MbcError(
                "MBC156",
                f"the plan is for cuDNN {_version(planned)}, but {_version(loaded)} was loaded from '{folder}'",
                f"install it (nvidia-cudnn-cu13=={_minor(planned)}.*), or compile again with the installed cuDNN",
            )


def _version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _minor(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}"
