"""The compilation of a model's source, and the arguments that describe it."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mbc.compiler import compile_plan, compile_source
from mbc.hardware.target import current_gpu
from mbc.ir.types import Precision
from mbc.options import Measure, Options
from mbc.pytorch.model_tensors import entries_of, readable
from mbc.runtime.arguments import choice, size_of
from mbc.runtime.cuda import report_not_built
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.stages import Stages

torch: Any = importlib.import_module("torch")
M = TypeVar("M", bound=Module)
PRECISIONS: dict[Any, str] = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
}  # fmt: skip


def memory_text(given: str | int) -> str:
    """Return a size in bytes as the language writes it, such as `12000000000B`; a number is a number of bytes.

    Raises:
        MbcError: MBC167 for anything but `auto` and sizes above 0, and for numbers below a million: few mean bytes.
    """
    if given == "auto":
        return "auto"
    return f"{size_of('memory', given, least_bytes=1 if isinstance(given, str) else 10**6)}B"


def precision_name(given: Any) -> str:
    """Return the name of a precision, which may be given as a type of PyTorch.

    Raises:
        MbcError: MBC167 for anything else.
    """
    is_type = isinstance(given, torch.dtype)
    return choice("precision", PRECISIONS.get(given, given) if is_type else given, tuple(Precision))


def silent(now: str) -> None:
    """Show nothing of the progress."""


class TorchMemory:
    """Device memory of PyTorch's allocator, which `torch.cuda.memory_allocated` counts."""

    def __init__(self, size_bytes: int) -> None:
        """Allocate so many bytes."""
        self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")

    def __int__(self) -> int:
        """Return the address."""
        return self._bytes.data_ptr()

    def free(self) -> None:
        """Do nothing: the memory is freed with the last reference, because tensors of the model may lie in it."""


def current_stream(device: str) -> int:
    """Return the handle of PyTorch's current stream; 0 is the default stream, and stands for the CPU."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()) if device == "cuda" else 0


@contextmanager
def ordered(device: str) -> Generator[None]:
    """Order the stream of a plan on `device` with PyTorch's; CUDA itself orders it with the default stream only."""
    other = current_stream(device) != 0
    if other:
        torch.cuda.synchronize()
    yield
    if other:
        torch.cuda.synchronize()


def copied(tensor: Any) -> Any:
    """Return a copy of a tensor in the GPU's memory, in float32."""
    return tensor.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def evaluated(module: Module, inputs: Sequence[Any], copy: bool = True) -> list[Any]:
    """Return the outputs of the inference pass on the module's device.

    Args:
        module: The compiled network.
        inputs: The inputs that the network reads.
        copy: Whether outputs are copied to float32. False returns on a GPU tensors over the plan's memory, valid until
            the next step or pass.
    """
    on_cpu = module.device == "cpu"
    with ordered(module.device):
        outputs: Any = module.forward(*(readable(tensor) for tensor in inputs), copy=on_cpu)
    tensors = [(torch.from_numpy if on_cpu else torch.from_dlpack)(output) for output in entries_of(outputs)]
    return [copied(tensor) for tensor in tensors] if copy and not on_cpu else tensors


def open_compiled(
    kind: Callable[..., M], source: Source, options: Options, stages: Stages, device: str, seed: int
) -> M:
    """Return the compiled network on its device.

    For a GPU a package is built; its files may be deleted once its library is loaded.

    Raises:
        MbcError: MBC157 if the device is `cuda` and the library could not be built.
    """
    if device == "cpu" or (device == "auto" and current_gpu() is None):
        return kind(compile_plan(source, options, stages), seed, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        options, package = replace(options, measure=Measure.MISSING), Path(folder) / "from_torch_package"
        compiled = compile_source(source, options, package, stages=stages)
        if device == "cuda" and compiled.package.missing:
            lacking = ", ".join(library.name for library in compiled.package.missing)
            report_not_built(f"the code for the GPU was not built without {lacking}")
        return kind(compiled.package.folder, seed, device)
