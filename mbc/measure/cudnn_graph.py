"""Convolutions of cuDNN's graph (backend) API: operation graphs, their engine configurations, and execution plans.

The generated host code (`templates/host`) builds the same operation graph, so that the `settings` of a configuration
mean the same there. A text of device properties can stand for a GPU: everything works but execution. So a plan for an
H200 can be prepared on a laptop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from mbc.ir.types import DType, Layout, TensorType
from mbc.kernels.base import Request
from mbc.kernels.convolution_shapes import as_images
from mbc.kernels.statistics import convolution_of
from mbc.measure.cudnn_constants import Constant
from mbc.measure.cudnn_engines import BEHAVIOUR_NOTES, NUMERICAL_NOTES, Configuration
from mbc.measure.cudnn_library import CudnnRefusal, Descriptor, Library
from mbc.measure.cudnn_passes import DATA_TYPES, PASSES, ConvolutionAttributes, engine_types, strides

ALIGNMENT_BYTES = 16  # alignment of every operand that cuDNN's widest loads need; buffers have a larger one
LIKELY_KNOBS, MOST_KNOBS = 12, 64  # cuDNN says how many there are only when it returns them


@dataclass(frozen=True)
class Device:
    """A GPU for which cuDNN lists configurations: a cuDNN handle, or the properties of a GPU in another machine."""

    library: Library
    handle: int = 0
    properties: Descriptor | None = None

    @staticmethod
    def from_properties(library: Library, text: str) -> Device:
        """Return a GPU that is described by cuDNN's JSON text: none has to be present, and nothing can be executed."""
        descriptor = Descriptor(library, Constant.BACKEND_DEVICEPROP_DESCRIPTOR)
        descriptor.set_text(Constant.ATTR_DEVICEPROP_JSON_REPRESENTATION, text)
        return Device(library, 0, descriptor.finalize())

    @staticmethod
    def from_handle(library: Library, handle: int) -> Device:
        """Return the GPU of a cuDNN handle."""
        return Device(library, handle)

    def description(self) -> str:
        """Return cuDNN's JSON description of this GPU, which `from_properties` reads on another machine."""
        descriptor = self.properties
        if descriptor is None:
            descriptor = Descriptor(self.library, Constant.BACKEND_DEVICEPROP_DESCRIPTOR)
            descriptor.set(Constant.ATTR_DEVICEPROP_HANDLE, Constant.TYPE_HANDLE, [self.handle]).finalize()
        attribute = Constant.ATTR_DEVICEPROP_JSON_REPRESENTATION
        size = descriptor.count(attribute, Constant.TYPE_CHAR)
        data = ctypes.create_string_buffer(size + 1)
        count = ctypes.c_int64()
        self.library.call(
            "cudnnBackendGetAttribute",
            descriptor.pointer,
            attribute,
            Constant.TYPE_CHAR,
            size,
            ctypes.byref(count),
            data,
        )
        return data.value.decode()


class ConvolutionPlan:
    """A configuration that is ready to run; `execute` needs `workspace_bytes` of workspace."""

    def __init__(self, device: Device, descriptor: Descriptor) -> None:
        """Take the finalized descriptor of an execution plan."""
        self._device = device
        self._descriptor = descriptor
        attribute = Constant.ATTR_EXECUTION_PLAN_WORKSPACE_SIZE
        self.workspace_bytes = descriptor.get(attribute, Constant.TYPE_INT64)[0]

    def bind(self, pointers: Sequence[int], workspace: int) -> Descriptor:
        """Bind device addresses of the inputs and then the output, for any number of executions."""
        pack = Descriptor(self._device.library, Constant.BACKEND_VARIANT_PACK_DESCRIPTOR)
        identities = list(range(1, len(pointers) + 1))
        pack.set(Constant.ATTR_VARIANT_PACK_UNIQUE_IDS, Constant.TYPE_INT64, identities)
        pack.set(Constant.ATTR_VARIANT_PACK_DATA_POINTERS, Constant.TYPE_VOID_PTR, list(pointers))
        pack.set(Constant.ATTR_VARIANT_PACK_WORKSPACE, Constant.TYPE_VOID_PTR, [workspace or None])
        return pack.finalize()

    def execute(self, pack: Descriptor) -> None:
        """Enqueue the convolution on the handle's stream; this needs a GPU."""
        self._device.library.call("cudnnBackendExecute", self._device.handle, self._descriptor.pointer, pack.pointer)


class ConvolutionGraph:
    """The operation graph of one convolution request with the layouts of its operands.

    A request for statistics in the epilogue has a second operation, which reduces the result of the first. Its two
    results are not among the operands and follow them.
    """

    def __init__(self, device: Device, request: Request, layouts: Sequence[Layout]) -> None:
        """Build the graph.

        Args:
            device: The GPU, present or described.
            request: A convolution, or one with statistics in the epilogue.
            layouts: Layouts of the inputs, then of the output.

        Raises:
            CudnnRefusal: cuDNN does not support such an operation: asymmetric padding with some shapes, unsupported
                types.
        """
        self._device = device
        convolution = as_images(convolution_of(request))
        direction = PASSES[convolution.kind]
        types = engine_types(convolution)
        double = types[0].dtype is DType.FP64
        tensors = [
            self._tensor(identity, tensor, layout)
            for identity, (tensor, layout) in enumerate(zip(types, layouts, strict=True), start=1)
        ]
        operation = Descriptor(device.library, direction.operation)
        for attribute, tensor in zip(direction.operands, tensors, strict=True):
            operation.set_parts(attribute, [tensor])
        operation.set_parts(
            direction.descriptor, [self._convolution(cast(ConvolutionAttributes, convolution.attributes), double)]
        )
        scalar = Constant.TYPE_DOUBLE if double else Constant.TYPE_FLOAT
        operation.set(direction.alpha, scalar, [1.0]).set(direction.beta, scalar, [0.0])
        operations = [operation.finalize()]
        if convolution.kind != request.kind:
            operations.append(self._sums(tensors, types[-1].shape[1], layouts[-1]))
        graph = Descriptor(device.library, Constant.BACKEND_OPERATIONGRAPH_DESCRIPTOR)
        graph.set_parts(Constant.ATTR_OPERATIONGRAPH_OPS, operations)
        if device.handle:
            graph.set(Constant.ATTR_OPERATIONGRAPH_HANDLE, Constant.TYPE_HANDLE, [device.handle])
        self._graph = graph.finalize()

    def _sums(self, operands: Sequence[Descriptor], channels: int, layout: Layout) -> Descriptor:
        """Return the operation that sums each channel of the last operand, and its squares."""
        vector = TensorType((1, channels, 1, 1), DType.FP32)
        first = len(operands) + 1
        sums, squares = (self._tensor(identity, vector, layout) for identity in (first, first + 1))
        operation = Descriptor(self._device.library, Constant.BACKEND_OPERATION_GEN_STATS_DESCRIPTOR)
        mode = [Constant.GENSTATS_SUM_SQSUM]
        operation.set(Constant.ATTR_OPERATION_GENSTATS_MODE, Constant.TYPE_GENSTATS_MODE, mode)
        precision = [Constant.DATA_FLOAT]
        operation.set(Constant.ATTR_OPERATION_GENSTATS_MATH_PREC, Constant.TYPE_DATA_TYPE, precision)
        operation.set_parts(Constant.ATTR_OPERATION_GENSTATS_XDESC, operands[-1:])
        operation.set_parts(Constant.ATTR_OPERATION_GENSTATS_SUMDESC, [sums])
        operation.set_parts(Constant.ATTR_OPERATION_GENSTATS_SQSUMDESC, [squares])
        return operation.finalize()

    def _tensor(self, identity: int, tensor: TensorType, layout: Layout) -> Descriptor:
        descriptor = Descriptor(self._device.library, Constant.BACKEND_TENSOR_DESCRIPTOR)
        integer = Constant.TYPE_INT64
        descriptor.set(Constant.ATTR_TENSOR_DATA_TYPE, Constant.TYPE_DATA_TYPE, [DATA_TYPES[tensor.dtype]])
        descriptor.set(Constant.ATTR_TENSOR_DIMENSIONS, integer, list(tensor.shape))
        descriptor.set(Constant.ATTR_TENSOR_STRIDES, integer, strides(tensor.shape, layout))
        descriptor.set(Constant.ATTR_TENSOR_UNIQUE_ID, integer, [identity])
        descriptor.set(Constant.ATTR_TENSOR_BYTE_ALIGNMENT, integer, [ALIGNMENT_BYTES])
        return descriptor.finalize()

    def _convolution(self, attributes: ConvolutionAttributes, double: bool) -> Descriptor:
        descriptor = Descriptor(self._device.library, Constant.BACKEND_CONVOLUTION_DESCRIPTOR)
        compute = Constant.DATA_DOUBLE if double else Constant.DATA_FLOAT
        integer = Constant.TYPE_INT64
        descriptor.set(Constant.ATTR_CONVOLUTION_COMP_TYPE, Constant.TYPE_DATA_TYPE, [compute])
        mode = [Constant.CROSS_CORRELATION]
        descriptor.set(Constant.ATTR_CONVOLUTION_CONV_MODE, Constant.TYPE_CONVOLUTION_MODE, mode)
        descriptor.set(Constant.ATTR_CONVOLUTION_SPATIAL_DIMS, integer, [len(attributes.stride)])
        descriptor.set(Constant.ATTR_CONVOLUTION_PRE_PADDINGS, integer, list(attributes.pad[0::2]))
        descriptor.set(Constant.ATTR_CONVOLUTION_POST_PADDINGS, integer, list(attributes.pad[1::2]))
        descriptor.set(Constant.ATTR_CONVOLUTION_FILTER_STRIDES, integer, list(attributes.stride))
        descriptor.set(Constant.ATTR_CONVOLUTION_DILATIONS, integer, list(attributes.dilation))
        return descriptor.finalize()

    def configurations(self) -> Iterator[Configuration]:
        """Yield each configuration once: those of heuristic mode A, best first, then those of the fallback mode.

        Configurations that `refusal` refuses are included.
        """
        seen: set[tuple[tuple[str, int], ...]] = set()
        for mode in (Constant.HEUR_MODE_A, Constant.HEUR_MODE_FALLBACK):
            for descriptor in self._heuristic(mode):
                configuration = self._read(descriptor)
                if configuration.settings not in seen:
                    seen.add(configuration.settings)
                    yield configuration

    def _heuristic(self, mode: int) -> list[Descriptor]:
        heuristic = Descriptor(self._device.library, Constant.BACKEND_ENGINEHEUR_DESCRIPTOR)
        heuristic.set_parts(Constant.ATTR_ENGINEHEUR_OPERATION_GRAPH, [self._graph])
        heuristic.set(Constant.ATTR_ENGINEHEUR_MODE, Constant.TYPE_HEUR_MODE, [mode])
        if self._device.properties is not None:
            heuristic.set_parts(Constant.ATTR_ENGINEHEUR_DEVICEPROP, [self._device.properties])
        try:
            heuristic.finalize()
        except CudnnRefusal:
            return []  # this mode has no configuration for the graph
        results = Constant.ATTR_ENGINEHEUR_RESULTS
        count = heuristic.count(results, Constant.TYPE_BACKEND_DESCRIPTOR)
        if not count:
            return []
        return heuristic.get_parts(results, Constant.BACKEND_ENGINECFG_DESCRIPTOR, count)

    @staticmethod
    def _read(descriptor: Descriptor) -> Configuration:
        engine = descriptor.get_parts(Constant.ATTR_ENGINECFG_ENGINE, Constant.BACKEND_ENGINE_DESCRIPTOR, 1)[0]
        numerical = engine.get(
            Constant.ATTR_ENGINE_NUMERICAL_NOTE, Constant.TYPE_NUMERICAL_NOTE, Constant.NUMERICAL_NOTE_TYPE_COUNT
        )
        behaviour = engine.get(
            Constant.ATTR_ENGINE_BEHAVIOR_NOTE, Constant.TYPE_BEHAVIOR_NOTE, Constant.BEHAVIOR_NOTE_TYPE_COUNT
        )
        knobs = [
            (
                choice.get(Constant.ATTR_KNOB_CHOICE_KNOB_TYPE, Constant.TYPE_KNOB_TYPE)[0],
                choice.get(Constant.ATTR_KNOB_CHOICE_KNOB_VALUE, Constant.TYPE_INT64)[0],
            )
            for choice in _knob_choices(descriptor)
        ]
        return Configuration(
            engine.get(Constant.ATTR_ENGINE_GLOBAL_INDEX, Constant.TYPE_INT64)[0],
            tuple(sorted(knobs)),
            frozenset(NUMERICAL_NOTES.get(note, str(note)) for note in numerical),
            frozenset(BEHAVIOUR_NOTES.get(note, str(note)) for note in behaviour),
            descriptor,
        )

    def rebuild(self, settings: Sequence[tuple[str, int]]) -> Configuration:
        """Return the configuration that a plan or a profile names by engine and knobs."""
        engine = Descriptor(self._device.library, Constant.BACKEND_ENGINE_DESCRIPTOR)
        engine.set_parts(Constant.ATTR_ENGINE_OPERATION_GRAPH, [self._graph])
        engine.set(Constant.ATTR_ENGINE_GLOBAL_INDEX, Constant.TYPE_INT64, [dict(settings)["engine"]])
        if self._device.properties is not None:
            engine.set_parts(Constant.ATTR_ENGINE_DEVICEPROP, [self._device.properties])
        engine.finalize()
        descriptor = Descriptor(self._device.library, Constant.BACKEND_ENGINECFG_DESCRIPTOR)
        descriptor.set_parts(Constant.ATTR_ENGINECFG_ENGINE, [engine])
        choices: list[Descriptor] = []
        for name, value in settings:
            if name.startswith("knob"):
                choice = Descriptor(self._device.library, Constant.BACKEND_KNOB_CHOICE_DESCRIPTOR)
                kind = int(name.removeprefix("knob"))
                choice.set(Constant.ATTR_KNOB_CHOICE_KNOB_TYPE, Constant.TYPE_KNOB_TYPE, [kind])
                choice.set(Constant.ATTR_KNOB_CHOICE_KNOB_VALUE, Constant.TYPE_INT64, [value])
                choices.append(choice.finalize())
        if choices:
            descriptor.set_parts(Constant.ATTR_ENGINECFG_KNOB_CHOICES, choices)
        return self._read(descriptor.finalize())

    def plan(self, configuration: Configuration) -> ConvolutionPlan:
        """Return an execution plan for `configuration`.

        Raises:
            CudnnRefusal: The engine does not support the operation although the heuristics list it.
        """
        plan = Descriptor(self._device.library, Constant.BACKEND_EXECUTION_PLAN_DESCRIPTOR)
        plan.set_parts(Constant.ATTR_EXECUTION_PLAN_ENGINE_CONFIG, [configuration.descriptor])
        if self._device.properties is not None:
            plan.set_parts(Constant.ATTR_EXECUTION_PLAN_DEVICEPROP, [self._device.properties])
        else:
            plan.set(Constant.ATTR_EXECUTION_PLAN_HANDLE, Constant.TYPE_HANDLE, [self._device.handle])
        return ConvolutionPlan(self._device, plan.finalize())


def _knob_choices(configuration: Descriptor) -> list[Descriptor]:
    """Return the knob choices of a configuration.

    Few descriptors are created first, because to create and free 64 took as long as everything else.
    """
    for most in (LIKELY_KNOBS, MOST_KNOBS):
        choices = configuration.get_parts(
            Constant.ATTR_ENGINECFG_KNOB_CHOICES, Constant.BACKEND_KNOB_CHOICE_DESCRIPTOR, most
        )
        if len(choices) < most:
            break
    return choices
