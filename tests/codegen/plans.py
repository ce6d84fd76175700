"""Small plans written by hand, for the tests of generated code: slices, three streams, host memory, waits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbc.hardware.spec import DeviceSpec
from mbc.hardware.streams import Space, Stream
from mbc.ir.graph import Operation, Optimizer, Role, TrainingGraph, Value
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Acceptance, Arguments, Call, Candidate, Provider, Request
from mbc.ops.base import NoAttributes
from mbc.ops.convolution import Convolution
from mbc.ops.matrix import Linear
from mbc.plan.model import Access, Bounds, Buffer, Copy, Kernel, Launch, Mode, Plan, Predictions, Program, Rows, Target

BATCH = 8
CONVOLUTION = Convolution((6, 6), (3, 3), (1, 1), (1, 1, 0, 0), (1, 1), 1)
VOLUME = Convolution((5, 6, 7), (2, 3, 3), (2, 1, 1), (1, 0, 1, 1, 0, 0), (3, 1, 1))
LINEAR = Linear((96,))


@dataclass(frozen=True)
class EchoProvider:
    """A provider in the place of mbc's own kernels, whose arguments tell a test what was requested."""

    name: str = "mbc"

    def candidates(self, request: Request, device: DeviceSpec) -> tuple[Candidate, ...]:
        return ()

    def arguments(self, call: Call, first_row: int) -> Arguments:
        elements, adds = call.request.outputs[0].elements, int(call.accumulate)
        return Arguments((elements, first_row, adds, call.workspace_bytes), (0.1, 1e-30))

    def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
        return Acceptance()


class _Maker:
    """Lays buffers out one after another."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.values: dict[str, Value] = {}
        self.buffers: list[Buffer] = []
        self.offsets: list[int] = []
        self.end = dict.fromkeys(Space, 0)

    def value(self, name: str, shape: tuple[int, ...], dtype: DType | None = None, per_sample: bool = True) -> None:
        role = Role.INTERMEDIATE if per_sample else Role.PARAMETER
        self.values[name] = Value(name, TensorType(shape, dtype or self.precision.working), role, per_sample)

    def buffer(self, name: str | None, size_bytes: int = 0, space: Space = Space.ARENA, layout: str = "nchw") -> int:
        rows, dtype = Rows(0, 1), DType.UINT8
        if name is not None:
            value = self.values[name]
            rows = Rows(0, value.type.shape[0]) if value.per_sample else rows
            size_bytes, dtype = value.type.size_bytes, value.type.dtype
        self.buffers.append(Buffer(name, rows, Layout(layout), dtype, size_bytes, space))
        self.offsets.append(self.end[space])
        self.end[space] += math.ceil(size_bytes / 256) * 256
        return len(self.buffers) - 1

    def plan(self, graph: TrainingGraph, train: Program, infer: Program, bound_by: str) -> Plan:
        arena, host = self.end[Space.ARENA], self.end[Space.HOST]
        return Plan(
            "test",
            graph,
            Target("NVIDIA H200", "sm_90", 132, 1 << 37, 91900),
            1 << 30,
            tuple(self.buffers),
            tuple(self.offsets),
            train,
            infer,
            Predictions(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, arena, 0, False, host),
            Bounds(0, bound_by, arena, 1.0),
        )


def _kernel(provider: str, name: str, *settings: tuple[str, int]) -> Kernel:
    return Kernel(provider, name, settings, 1.0, False)


def small_plan(
    precision: Precision = Precision.FP32,
    layout: str = "nchw",
    engine: int = -1,
    workspace_bytes: int = 8192,
    a: Convolution = CONVOLUTION,
) -> Plan:
    """Return a plan with two slices, all passes of a convolution and a linear layer, and a trip to the host."""
    make = _Maker(precision)
    make.value("x", (BATCH, 3, *a.size))
    make.value("w", (4, 3, *a.kernel), per_sample=False)
    make.value("y", (BATCH, 4, *a.output_size))
    make.value("z", (BATCH, 4, *a.output_size))
    make.value("f", (BATCH, 96))
    make.value("v", (10, 96), per_sample=False)
    make.value("out", (BATCH, 10))
    make.value("dout", (BATCH, 10))
    make.value("dv", (10, 96), DType.FP32, per_sample=False)
    make.value("df", (BATCH, 96))
    make.value("dw", (4, 3, *a.kernel), DType.FP32, per_sample=False)
    make.value("dx", (BATCH, 3, *a.size))
    operations = (
        Operation("conv", "convolution", ("x", "w"), ("y",), a),
        Operation("relu", "relu", ("y",), ("z",), NoAttributes()),
        Operation("head", "linear", ("f", "v"), ("out",), LINEAR),
        Operation("loss", "relu", ("out",), ("dout",), NoAttributes()),
        Operation("head.dv", "linear_backward_filter", ("f", "dout"), ("dv",), LINEAR),
        Operation("head.df", "linear_backward_data", ("dout", "v"), ("df",), LINEAR),
        Operation("conv.dw", "convolution_backward_filter", ("x", "z"), ("dw",), a),
        Operation("conv.dx", "convolution_backward_data", ("z", "w"), ("dx",), a),
    )
    b = {name: make.buffer(name, layout=layout if len(make.values[name].type.shape) > 2 else "nchw")
         for name in make.values}  # fmt: skip
    away = make.buffer("y", space=Space.HOST, layout=layout)
    back = make.buffer("y", layout=layout)
    space = make.buffer(None, workspace_bytes)
    whole, one, first, second = Rows(0, BATCH), Rows(0, 1), Rows(0, 5), Rows(5, BATCH)

    def launch(
        work: Kernel | Copy, name: str, *accesses: tuple[int, Rows, Mode], stream: Stream = Stream.COMPUTE
    ) -> Launch:
        return Launch(work, (name,) if name else (), stream, tuple(Access(*access) for access in accesses))

    read, write, accumulate = Mode.READ, Mode.WRITE, Mode.ACCUMULATE
    settings = (("engine", engine), *((("knob2", 7),) if engine >= 0 else ()))

    def conv(kind: str) -> Kernel:
        return _kernel("cudnn", kind, *settings)

    copy = Copy(1.0, False)
    forward = [
        launch(conv("convolution"), "conv", (b["x"], rows, read), (b["w"], one, read), (b["y"], rows, write),
               (space, one, write))
        for rows in (first, second)
    ]  # fmt: skip
    train = (
        *forward,
        launch(copy, "", (b["y"], whole, read), (away, whole, write), stream=Stream.TO_HOST),
        launch(_kernel("mbc", "relu"), "relu", (b["y"], whole, read), (b["z"], whole, write)),
        launch(copy, "", (away, second, read), (back, second, write), stream=Stream.TO_DEVICE),
        launch(_kernel("cublaslt", "linear"), "head", (b["f"], whole, read), (b["v"], one, read),
               (b["out"], whole, write), (space, one, write)),
        launch(_kernel("mbc", "relu"), "loss", (b["out"], second, read), (b["dout"], second, write)),
        launch(_kernel("cublaslt", "linear_backward_filter"), "head.dv", (b["f"], first, read),
               (b["dout"], first, read), (b["dv"], one, write)),
        launch(_kernel("cublaslt", "linear_backward_filter"), "head.dv", (b["f"], second, read),
               (b["dout"], second, read), (b["dv"], one, accumulate)),
        launch(_kernel("cublaslt", "linear_backward_data"), "head.df", (b["dout"], whole, read), (b["v"], one, read),
               (b["df"], whole, write), (space, one, write)),
        launch(conv("convolution_backward_filter"), "conv.dw", (b["x"], first, read), (b["z"], first, read),
               (b["dw"], one, write), (space, one, write)),
        launch(conv("convolution_backward_filter"), "conv.dw", (b["x"], second, read), (b["z"], second, read),
               (b["dw"], one, accumulate), (space, one, write)),
        launch(conv("convolution_backward_data"), "conv.dx", (b["z"], whole, read), (b["w"], one, read),
               (b["dx"], whole, write), (space, one, write)),
    )  # fmt: skip
    values = make.values
    graph = TrainingGraph(
        "small", BATCH, precision, Optimizer(), values, operations, operations[:1], (), ("x",), ("x",), (), (),
        "dv", (), (),
    )  # fmt: skip
    return make.plan(
        graph, Program(train, ((1, 2), (2, 4), (3, 4), (4, 6)), (), ()), Program(tuple(forward), (), (), ()), "conv"
    )


def pointwise_plan(precision: Precision, algorithm: int = 0) -> Plan:
    """The three passes of a 1 x 1 convolution through cuBLASLt, in slices of 5 and 3 rows of 6 pixels."""
    make = _Maker(precision)
    make.value("x", (BATCH, 4, 2, 3))
    make.value("w", (7, 4, 1, 1), per_sample=False)
    make.value("y", (BATCH, 7, 2, 3))
    make.value("dw", (7, 4, 1, 1), DType.FP32, per_sample=False)
    make.value("dx", (BATCH, 4, 2, 3))
    passes = {
        "convolution": ("x", "w", "y"),
        "convolution_backward_filter": ("x", "y", "dw"),
        "convolution_backward_data": ("y", "w", "dx"),
    }
    a = Convolution((2, 3), (1, 1))
    operations = tuple(Operation(kind, kind, names[:2], names[2:], a) for kind, names in passes.items())
    b = {name: make.buffer(name, layout="nchw" if "w" in name else "nhwc") for name in make.values}
    space = make.buffer(None, 8192)
    launches: list[Launch] = []
    for kind, names in passes.items():
        for rows in (Rows(0, 5), Rows(5, BATCH)):
            modes = (Mode.READ, Mode.READ, Mode.ACCUMULATE if names[2] == "dw" and rows.start else Mode.WRITE)
            accesses = [
                Access(b[name], Rows(0, 1) if "w" in name else rows, mode)
                for name, mode in zip(names, modes, strict=True)
            ]
            kernel = _kernel("cublaslt", kind, ("algorithm", algorithm))
            launches.append(Launch(kernel, (kind,), Stream.COMPUTE, (*accesses, Access(space, Rows(0, 1), Mode.WRITE))))
    graph = TrainingGraph(
        "conv1x1", BATCH, precision, Optimizer(), make.values, operations, operations[:1], (), ("x",), ("x",), (), (),
        "dw", (), (),
    )  # fmt: skip
    return make.plan(
        graph, Program(tuple(launches), (), (), ()), Program(tuple(launches[:2]), (), (), ()), "convolution"
    )


def statistics_plan(engine: int = -1, workspace_bytes: int = 1 << 12) -> Plan:
    """Return a plan of an fp16 convolution with mean and variance of its output's channels."""
    make = _Maker(Precision.FP16)
    make.value("x", (BATCH, 8, 6, 6))
    make.value("w", (24, 8, 3, 3), per_sample=False)
    make.value("y", (BATCH, 24, 6, 6))
    make.value("mean", (24,), DType.FP32, per_sample=False)
    make.value("variance", (24,), DType.FP32, per_sample=False)
    a = Convolution((6, 6), (3, 3), (1, 1), (1, 1, 1, 1))
    operations = (
        Operation("conv", "convolution", ("x", "w"), ("y",), a),
        Operation("statistics", "batch_statistics", ("y",), ("mean", "variance"), NoAttributes()),
    )
    b = [make.buffer(name, layout="nhwc" if name in "xwy" else "nchw") for name in make.values]
    modes = (Mode.READ, Mode.READ, Mode.WRITE, Mode.WRITE, Mode.WRITE)
    accesses = [Access(at, make.buffers[at].rows, mode) for at, mode in zip(b, modes, strict=True)]
    accesses.append(Access(make.buffer(None, workspace_bytes), Rows(0, 1), Mode.WRITE))
    kernel = _kernel("cudnn", "convolution+batch_statistics", ("deterministic", 1), ("engine", engine), ("layout", 1))
    launch = Launch(kernel, ("conv", "statistics"), Stream.COMPUTE, tuple(accesses))
    graph = TrainingGraph(
        "statistics", BATCH, Precision.FP16, Optimizer(), make.values, operations, operations, (), ("x",), ("x",), (),
        (), "mean", (), (),
    )  # fmt: skip
    program = Program((launch,), (), (), ())
    return make.plan(graph, program, program, "conv")


LEGACY_ALGORITHMS = {"convolution": 1, "convolution_backward_data": 2, "convolution_backward_filter": 0}


def with_legacy(plan: Plan, math: int, algorithms: Mapping[str, int] = LEGACY_ALGORITHMS) -> Plan:
    """Return the plan with every convolution of a pass in `algorithms` moved to cuDNN's legacy API."""

    def replaced(launch: Launch) -> Launch:
        if not isinstance(launch.work, Kernel) or len(launch.operations) != 1:
            return launch
        kind = operations[launch.operations[0]].kind
        if kind not in algorithms:
            return launch
        last = any(plan.buffers[access.buffer].layout is Layout.CHANNELS_LAST for access in launch.accesses)
        settings = (("algorithm", algorithms[kind]), ("layout", int(last)), ("math", math))
        return replace(launch, work=replace(launch.work, provider="cudnn_legacy", name=kind, settings=settings))

    operations = {operation.name: operation for operation in (*plan.graph.train, *plan.graph.infer)}
    train, infer = (
        replace(program, launches=tuple(map(replaced, program.launches))) for program in (plan.train, plan.infer)
    )
    return replace(plan, train=train, infer=infer)


def providers() -> dict[str, Provider]:
    from mbc.kernels.cublaslt import CUBLASLT
    from mbc.kernels.cudnn import CUDNN
    from mbc.kernels.cudnn_legacy import CUDNN_LEGACY

    used: tuple[Provider, ...] = (CUDNN, CUDNN_LEGACY, CUBLASLT, EchoProvider())
    return {provider.name: provider for provider in used}
