"""The algorithms of cuDNN's legacy API that support a convolution on this GPU, and their workspace.

The generated host code (`templates/host/legacy_convolution.cpp`) creates the same descriptors, so that an algorithm
admitted here runs there. Nothing is executed, so that no memory is needed besides the handle's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

from mbc.ir.types import Layout, TensorType, layout_matters
from mbc.kernels.base import LAYOUT_CODES, Candidate, Request
from mbc.kernels.cudnn_legacy import (
    ALGORITHMS,
    MATHS,
    LegacyChoice,
    admitted_maths,
    legacy_candidate,
    legacy_notes,
    legacy_shapes,
)
from mbc.measure.cudnn_constants import Constant
from mbc.measure.cudnn_library import CudnnRefusal, Library
from mbc.measure.cudnn_passes import CONVOLUTION_KINDS, DATA_TYPES, engine_types, strides
from mbc.ops.convolution import Convolution


def legacy_candidates(library: Library, handle: int, request: Request) -> Iterator[tuple[Candidate, tuple[str, ...]]]:
    """Yield each algorithm, layout and math type that cuDNN supports for `request`, with notes in words.

    Times are 0 and not measured. There is no candidate for a request that is not a convolution of images, has
    asymmetric padding, is too large, or is in fp64. The second math type of a precision is left out if it needs as much
    workspace as the first: of 233 such pairs in tf32 on an H200, 228 ran the same kernel, and in the other 5 the first
    was at least as fast.
    """
    if request.kind not in CONVOLUTION_KINDS or legacy_shapes(request) is None:
        return
    tried = [Layout.CHANNELS_FIRST]
    if any(layout_matters(t.shape) for t in (*request.inputs, *request.outputs)):
        tried.append(Layout.CHANNELS_LAST)
    for layout in tried:
        try:
            yield from _in_layout(library, handle, request, layout)
        except CudnnRefusal:
            continue  # cuDNN supports no such operands


def _in_layout(
    library: Library, handle: int, request: Request, layout: Layout
) -> Iterator[tuple[Candidate, tuple[str, ...]]]:
    with _Call(library, handle, request, layout) as call:
        for number, algorithm in enumerate(ALGORITHMS[request.kind]):
            sizes_bytes: set[int] = set()
            for math in admitted_maths(request.precision):
                workspace_bytes = call.workspace_bytes(number, MATHS[math])
                if workspace_bytes is not None and workspace_bytes not in sizes_bytes:
                    sizes_bytes.add(workspace_bytes)
                    choice = LegacyChoice(algorithm, layout, math)
                    yield legacy_candidate(request, choice, workspace_bytes), legacy_notes(request, choice)


class _Call:
    """The descriptors of one convolution in one layout; a context manager that destroys them."""

    def __init__(self, library: Library, handle: int, request: Request, layout: Layout) -> None:
        """Store the arguments; `__enter__` creates the descriptors."""
        self._library = library
        self._handle = ctypes.c_void_p(handle)
        self._destroy: list[Callable[[], None]] = []
        self._request = request
        self._layout = layout

    def __enter__(self) -> _Call:
        request = self._request
        assert isinstance(request.attributes, Convolution)
        filter_at = 2 if request.kind == "convolution_backward_filter" else 1
        types = engine_types(request)
        try:
            self._convolution = self._create("Convolution")
            self._set_convolution(request.attributes)
            self._operands = [
                self._filter(tensor) if place == filter_at else self._tensor(tensor)
                for place, tensor in enumerate(types)
            ]
        except BaseException:
            self.__exit__(None, None, None)
            raise
        if request.kind == "convolution_backward_data":  # cuDNN takes the filter first
            self._operands[:2] = self._operands[1::-1]
        return self

    def __exit__(self, *_: object) -> None:
        while self._destroy:
            self._destroy.pop()()

    def workspace_bytes(self, algorithm: int, math: int) -> int | None:
        """Return the bytes of workspace that an algorithm needs, None if it does not support this convolution."""
        size = ctypes.c_size_t()
        what = {"convolution": "Forward", "convolution_backward_data": "BackwardData"}
        name = f"cudnnGetConvolution{what.get(self._request.kind, 'BackwardFilter')}WorkspaceSize"
        first, second, output = self._operands
        try:
            self._library.call("cudnnSetConvolutionMathType", self._convolution, math)
            self._library.call(
                name, self._handle, first, second, self._convolution, output, algorithm, ctypes.byref(size)
            )
        except CudnnRefusal:
            return None
        return size.value

    def _create(self, kind: str) -> ctypes.c_void_p:
        descriptor = ctypes.c_void_p()
        self._library.call(f"cudnnCreate{kind}Descriptor", ctypes.byref(descriptor))
        self._destroy.append(lambda: self._library.call(f"cudnnDestroy{kind}Descriptor", descriptor))
        return descriptor

    def _tensor(self, tensor: TensorType) -> ctypes.c_void_p:
        # Strides rather than a format: with one pixel or one channel the two formats have equal strides.
        descriptor = self._create("Tensor")
        sizes = (*tensor.shape, *strides(tensor.shape, self._layout))
        self._library.call("cudnnSetTensor4dDescriptorEx", descriptor, DATA_TYPES[tensor.dtype], *sizes)
        return descriptor

    def _filter(self, tensor: TensorType) -> ctypes.c_void_p:
        descriptor = self._create("Filter")
        form = LAYOUT_CODES[self._layout]  # numbered as cudnnTensorFormat_t
        self._library.call("cudnnSetFilter4dDescriptor", descriptor, DATA_TYPES[tensor.dtype], form, *tensor.shape)
        return descriptor

    def _set_convolution(self, a: Convolution) -> None:
        modes = (Constant.CROSS_CORRELATION, Constant.DATA_FLOAT)
        self._library.call(
            "cudnnSetConvolution2dDescriptor", self._convolution, *a.pad[::2], *a.stride, *a.dilation, *modes
        )
        self._library.call("cudnnSetConvolutionGroupCount", self._convolution, a.groups)
