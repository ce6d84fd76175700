"""A package's built library: found, loaded beside the CUDA libraries it needs, and called through ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from mbc.errors import MbcError
from mbc.plan.accumulation import ACCUMULATE
from mbc.plan.model import Plan

LIBRARY_FILE = "libmodule.so"
ABI_VERSION = 5  # MBC_ABI_VERSION of templates/include/mbc_module.h
PROGRAMS = {"train": 0, "infer": 1, ACCUMULATE: 2}

_CUDNN = "libcudnn.so."
# cuDNN opens these by name while it works, where only the process's own search path counts; loaded beforehand from
# the same folder, they cannot come from another cuDNN.
_CUDNN_PARTS = ("graph", "ops", "cnn", "heuristic", "engines_precompiled", "engines_runtime_compiled")
_MISSING = re.compile(r"^(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")


def library_folders() -> Iterator[Path]:
    """Where CUDA's libraries may lie, best first: pip's packages, the environment, the toolkit, beside PyTorch."""
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
    """Load `path`, after whatever it needs and the system's loader does not find. OSError where it cannot be had."""
    tried: set[str] = set()
    while True:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            found = _MISSING.match(str(error))
            if found is None or found[1] in tried:
                raise
            tried.add(found[1])
            place = next((folder / found[1] for folder in library_folders() if (folder / found[1]).exists()), None)
            if place is None:
                raise
            ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)


def loaded_folder(prefix: str) -> Path | None:
    """The folder that this process has a library from."""
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
    """The C interface of `templates/include/mbc_module.h`, of which one module is made.

    Raises MBC157 (not built, or does not load), MBC158 (built for another plan), MBC156 (another cuDNN), MBC159 (a
    call failed; the text names the operation).
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
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
        """Size launches for so many multiprocessors of the GPU. MBC158 where the library is older than parts are."""
        call = getattr(self._calls, "mbc_set_multiprocessors", None)
        if call is None:
            raise self._older("is for a whole GPU only")
        call(ctypes.c_int64(multiprocessors))

    def _older(self, lacking: str) -> MbcError:
        return MbcError(
            "MBC158",
            f"'{self._path}' was built by an mbc that {lacking}",
            "build the package again with `mbc compile --force`",
        )

    def create(
        self, arena: int, arena_bytes: int, host: int, host_bytes: int, peer: int, peer_bytes: int,
        streams: Sequence[int], ranks: RanksInterface | None = None,
    ) -> None:  # fmt: skip
        """Make the library's handles and plans over memory, streams and a communicator that must outlive it."""
        create = self._calls.mbc_create
        create.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
        )  # fmt: skip
        handles = (ctypes.c_void_p * len(streams))(*streams)
        shared = None if ranks is None else ctypes.byref(ranks)
        made = ctypes.byref(self._module)
        self._check(
            create(arena, arena_bytes, host or None, host_bytes, peer or None, peer_bytes, handles, shared, made)
        )

    @property
    def cudnn_version(self) -> int:
        """As cuDNN numbers it; 0 where the plan does not use it."""
        return int(self._calls.mbc_cudnn_version())

    def warm(self) -> None:
        """Run every launch of all programs once, waiting for each."""
        self._check(self._calls.mbc_warm(self._module))

    def capture(self, listener: int | None = None) -> None:
        """Turn all programs into executable graphs. `listener`, the address of an MbcNodeOfLaunch, is told which launch
        each of their nodes is of; MBC158 where the library is older than that."""
        if listener is None:
            self._check(self._calls.mbc_capture(self._module))
            return
        call = getattr(self._calls, "mbc_capture_told", None)
        if call is None:
            raise self._older("could not tell which launch a node of a graph is of")
        call.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._check(call(self._module, listener))

    def run(self, program: str, eager: bool) -> None:
        """Start a captured program; `eager`: run it launch by launch, and wait."""
        call = self._calls.mbc_run_eager if eager else self._calls.mbc_run
        self._check(call(self._module, PROGRAMS[program]))

    def run_launch(self, program: str, index: int) -> None:
        """Run one launch and wait for it. MBC158 where the library is older than this function."""
        call = getattr(self._calls, "mbc_run_launch", None)
        if call is None:
            raise self._older("could not run its launches one by one")
        call.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
        self._check(call(self._module, PROGRAMS[program], index))

    def destroy(self) -> None:
        if self._module:
            self._calls.mbc_destroy(self._module)
            self._module = ctypes.c_void_p()

    def _check(self, status: int) -> None:
        if status != 0:
            text: bytes = self._calls.mbc_last_error(self._module) or b"no reason given"
            raise MbcError("MBC159", f"on the GPU: {text.decode(errors='replace')}", "see `mbc doctor`")

    def _check_identity(self, plan: Plan, path: Path) -> None:
        found, predicted = int(self._calls.mbc_abi_version()), plan.predictions
        expected = predicted.arena_bytes, predicted.host_bytes, predicted.peer_bytes
        if found == ABI_VERSION:
            sizes = (self._bytes("arena"), self._bytes("host"), self._bytes("peer"))
            if sizes == expected:
                return
            what = "arena {:,} bytes, host {:,}, peer {:,}"
            difference = f"{what.format(*sizes)}; expected {what.format(*expected)}"
        else:
            difference = f"interface {found}; expected {ABI_VERSION}"
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
        """Engines and their settings are those of one minor version."""
        planned, found = plan.target.cudnn, self._calls.mbc_cudnn_version()
        if planned and found // 100 != planned // 100:
            raise MbcError(
                "MBC156",
                f"the plan was made for cuDNN {_version(planned)}, loaded was {_version(found)} from '{folder}'",
                f"install it (nvidia-cudnn-cu13=={_minor(planned)}.*), or compile again with the cuDNN that is there",
            )


def _version(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _minor(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}"
