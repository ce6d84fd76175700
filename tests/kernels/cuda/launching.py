"""A case in a compiled library of kernels, compared with the operation in float64.

Every output is poisoned first, every buffer is followed by bytes that must not change, and workspaces hold garbage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import numpy as np

from mbc.hardware.spec import find_spec
from mbc.ir.graph import Operation
from mbc.ir.types import DType, Layout, Precision, TensorType
from mbc.kernels.base import Arguments, Candidate, Request
from mbc.kernels.cuda import OWN, generated_program, kernel_of, symbol_of
from mbc.kernels.cuda.base import PROVIDER, OwnKernel, layout_of
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.kernels.statistics import WITH_INSTANCE_STATISTICS
from mbc.measure.kernel_library import MbcCall
from mbc.measure.own_kernel_harness import ROUNDED_INSIDE
from mbc.measure.statistics_harness import distances, moments
from mbc.ops.base import Array, Call
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused, evaluate_epilogue, gives_product, launch_kind, rounds_inside, sums
from mbc.ops.pooling import AveragePool, MaxPool
from mbc.profile.signature import asked_kind
from tests.kernels.cuda.cases import Case

POISON, GUARD_BYTES = 0xFF, 256  # NaN in every floating type, so that a read outside an operand shows
DEFAULT_SHARED_BYTES = 48 << 10  # of a block on any GPU

# Relative L2. Sums are in fp32 whatever the storage type; an output in bf16 or fp16 is rounded once on top of that, by
# at most half a unit in the last place of 8 and 11 bits.
TOLERANCES = {DType.FP32: 1e-5, DType.BF16: 2.0**-8, DType.FP16: 2.0**-11}
# Below 2^-14, neighbours in fp16 are as far apart as just above, so the relative error of rounding grows. bf16 and fp32
# have full precision down to 2^-126, which no test case reaches.
SMALLEST_NORMAL = {DType.FP16: 2.0**-14}
NUDGE = 2.0**-19  # relative, of inputs in fp32: some roundings of values computed from them
DRAWS = 32


class Memory(Protocol):
    """Memory in which kernels run; addresses are aligned to 256 bytes."""

    def allocate(self, size_bytes: int) -> int: ...

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, size_bytes: int) -> bytes: ...

    def free_all(self) -> None: ...


@dataclass
class HostMemory:
    """The emulator's memory."""

    held: list[Array] = field(default_factory=list[Array])

    def allocate(self, size_bytes: int) -> int:
        self.held.append(np.zeros(size_bytes + 256, np.uint8))
        return -(-self.held[-1].ctypes.data // 256) * 256

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size_bytes: int) -> bytes:
        return ctypes.string_at(address, size_bytes)

    def free_all(self) -> None:
        self.held.clear()


@dataclass
class Library:
    """A shared library of kernels, their memory, and a function that compiles a generated kernel which is needed.

    Each operand has `guard_bytes` before and after it, which must stay as they are.
    """

    handle: ctypes.CDLL
    memory: Memory
    stream: int = 0
    guard_bytes: int = GUARD_BYTES
    generate: Callable[[MapProgram], ctypes.CDLL] | None = None
    generated: dict[str, ctypes.CDLL] = field(default_factory=dict[str, ctypes.CDLL])
    offered: Callable[[Request], list[Candidate]] = field(default_factory=lambda: offered_anywhere)

    def add(self, program: MapProgram | None) -> None:
        """Compile a generated kernel that the library lacks."""
        if program is not None and self.generate is not None and program.symbol not in self.generated:
            self.generated[program.symbol] = self.generate(program)

    def launch(self, symbol: str, pointers: Sequence[int], arguments: Arguments) -> None:
        function = getattr(self.generated.get(symbol, self.handle), symbol)
        function.restype = ctypes.c_char_p
        function.argtypes = (ctypes.POINTER(MbcCall),)
        call = MbcCall(
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_int64 * max(1, len(arguments.integers)))(*arguments.integers),
            (ctypes.c_double * max(1, len(arguments.reals)))(*arguments.reals),
            self.stream,
            len(pointers),
            len(arguments.integers),
        )
        message = function(ctypes.byref(call))
        assert message is None, f"{symbol}: {message!r}"


def offered_anywhere(request: Request) -> list[Candidate]:
    """Return the candidates of a GPU with wgmma, then those that only GPUs without wgmma get."""
    newest = list(OWN.candidates(request, find_spec("h200")))
    names = {candidate.name for candidate in newest}
    return [*newest, *(c for c in OWN.candidates(request, find_spec("a100-40")) if c.name not in names)]


def request_of(operation: Operation, types: Sequence[TensorType], precision: Precision) -> Request:
    a = operation.attributes
    outputs = launch_kind(operation.kind, a).shape(a, tuple(types))
    return Request(operation.kind, a, tuple(types), outputs, precision)


def launched(
    library: Library,
    request: Request,
    operands: Sequence[bytes],
    layout: Layout = Layout.CHANNELS_LAST,
    shared: Mapping[int, int] = MappingProxyType({}),
    name: str = "",
) -> list[bytes]:
    """Return the outputs of a kernel: the first candidate, or the one called `name`, in the form that is offered.

    `shared` maps each output that is written in place to its input.
    """
    candidate = next(
        c
        for c in library.offered(request)
        if layout_of(request, c.layouts) is layout and name in ("", c.name.removesuffix("_mma"))
    )
    memory = library.memory
    pointers = [memory.allocate(len(data)) for data in operands]
    for pointer, data in zip(pointers, operands, strict=True):
        memory.write(pointer, data)
    outputs = [
        pointers[shared[i]] if i in shared else memory.allocate(t.size_bytes) for i, t in enumerate(request.outputs)
    ]
    workspace = [memory.allocate(candidate.workspace_bytes)] if candidate.workspace_bytes else []
    arguments = OWN.arguments(candidate.call(request), 0)
    library.add(generated_program(PROVIDER, candidate.name, request))
    library.launch(symbol_of(PROVIDER, candidate.name, request), [*pointers, *outputs, *workspace], arguments)
    results = [memory.read(at, t.size_bytes) for at, t in zip(outputs, request.outputs, strict=True)]
    memory.free_all()
    return results


REPEATED = "max_pool", "max_pool_backward", "avg_pool", "avg_pool_backward", "convolution", "convolution_backward_data"


def repeats(library: Library, kind: str, pairs: int, channels: int, plane: tuple[int, int]) -> bool:
    """Return whether a volume in bf16 that repeats a pair of planes has the results of one pair, repeated."""
    results: list[list[bytes]] = []
    window, precision = ((2, 2, 3), (2, 1, 2)), Precision.BF16
    for times in (1, pairs):
        size, rng = (2 * times, *plane), np.random.default_rng(0)
        a = {
            "max_pool": MaxPool(size, *window, index=True),
            "avg_pool": AveragePool(size, *window),
            "convolution": Convolution(size, *window, groups=channels),
        }[kind.removesuffix("_backward").removesuffix("_backward_data")]
        read = TensorType((1, channels, *(a.output_size if "backward" in kind else size)), DType.BF16)
        types = [TensorType(read.shape, DType.UINT8)] * (kind == "max_pool_backward") + [read]
        types += [TensorType((channels, 1, *a.kernel), DType.BF16)] * isinstance(a, Convolution)
        operands: list[bytes] = []
        for one in types:
            repeated = times if one.shape == read.shape else 1
            shape = (*one.shape[:2], one.shape[2] // repeated, *one.shape[3:])
            values = rng.integers(0, 12, shape) if one.dtype is DType.UINT8 else rng.standard_normal(shape)
            operands.append(to_bytes(values, one.dtype, Layout.CHANNELS_LAST) * repeated)
        results.append(launched(library, request_of(Operation("", kind, (), (), a), types, precision), operands))
    return all(large == one * pairs for one, large in zip(*results, strict=True))


def to_bytes(values: Array, dtype: DType, layout: Layout) -> bytes:
    """Return canonical values in their stored form."""
    ordered = np.moveaxis(values, 1, -1) if layout is Layout.CHANNELS_LAST else values
    if dtype is DType.BF16:
        bits = np.ascontiguousarray(ordered, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return np.ascontiguousarray(ordered).astype(_stored(dtype)).tobytes()


def from_bytes(data: bytes, type_: TensorType, layout: Layout) -> Array:
    """Return stored values in canonical order, those of floating types as float64."""
    shape = type_.shape
    stored = (shape[0], *shape[2:], shape[1]) if layout is Layout.CHANNELS_LAST else shape
    if type_.dtype is DType.BF16:
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, _stored(type_.dtype))
    values = values.reshape(stored)
    values = np.moveaxis(values, -1, 1) if layout is Layout.CHANNELS_LAST else values
    return values.astype(np.float64) if values.dtype.kind == "f" else np.ascontiguousarray(values)


def _stored(dtype: DType) -> type:
    return {DType.FP32: np.float32, DType.FP16: np.float16, DType.INT32: np.int32, DType.UINT8: np.uint8}[dtype]


@dataclass(frozen=True)
class Variant:
    """One way to call a kernel.

    `shift`: every tensor starts one element after an aligned address. `in_place`: outputs take the place of the inputs
    that they may overwrite. `accumulate`: outputs are added to the present values.
    """

    name: str
    shift: bool = False
    in_place: bool = False
    accumulate: bool = False


SHIFTED = Variant("shifted", shift=True)


@dataclass
class Trial:
    """A case in one precision on one library. `draw`: number of the random draw of the inputs."""

    library: Library
    case: Case
    precision: Precision
    draw: int = 0

    def __post_init__(self) -> None:
        self.request: Request = self.case.request(self.precision)
        rng = np.random.default_rng(len(self.case.name) + 1000 * self.draw)
        self.inputs = [
            from_bytes(to_bytes(operand.make(rng, operand.shape), type_.dtype, Layout.CHANNELS_FIRST), type_,
                       Layout.CHANNELS_FIRST)
            for operand, type_ in zip(self.case.operands, self.request.inputs, strict=True)
        ]  # fmt: skip
        self.initial = [
            rng.standard_normal(t.shape).astype(np.float32).astype(np.float64) for t in self.request.outputs
        ]
        self.wanted = self._meaning(self.inputs)

    def _meaning(self, inputs: Sequence[Array]) -> list[Array]:
        request, case = self.request, self.case
        if case.kind == "convert":
            return list(inputs)
        batch = request.inputs[0].shape[0] + case.first_row
        evaluate = launch_kind(case.kind, case.attributes).evaluate
        assert evaluate is not None
        with np.errstate(all="ignore"):
            call = Call(request.outputs, case.first_row, batch, self.precision)
            copies = [v.copy() for v in inputs]
            return list(evaluate(case.attributes, copies, call))

    def chooses_at_a_threshold(self) -> bool:
        """Return whether rounding the inputs changes the expected result by more than rounding errors.

        This happens if an element is so close to a threshold that ReLU decides otherwise. It is tested in fp32 only; in
        other precisions the tolerances allow for it.
        """
        return self.precision is Precision.FP32 and "relu" in self.case.kind and self.is_unsteady()

    def is_unsteady(self) -> bool:
        """Return whether roundings of the inputs change the expected result by more than roundings."""
        rng = np.random.default_rng(0)
        signs = [rng.choice((-NUDGE, NUDGE), v.shape) if v.dtype.kind == "f" else None for v in self.inputs]
        for way in (1, -1):
            nudged = [v if s is None else v * (1 + way * s) for v, s in zip(self.inputs, signs, strict=True)]
            meant = self._meaning(nudged)
            if any(relative_error(a, b) > 200 * NUDGE for a, b in zip(meant, self.wanted, strict=True)):
                return True
        return False

    def _behind(self, product: Array) -> list[Array]:
        """Return the results of the operations after a product, computed from the stored, rounded product."""
        assert isinstance(self.case.attributes, Fused)
        call = Call(self.request.outputs, self.case.first_row, product.shape[0], self.precision)
        inputs = [v.copy() for v in self.inputs]
        return list(evaluate_epilogue(self.case.attributes, inputs, product, call))

    def candidates(self) -> list[Candidate]:
        return self.library.offered(self.request)

    def kernel(self, candidate: Candidate) -> OwnKernel:
        kernel = kernel_of(candidate.name, self.request)
        assert kernel is not None
        return kernel

    def variants(self, candidate: Candidate) -> list[Variant]:
        kind = asked_kind(self.request)
        variants = [Variant("plain")]
        if not self.kernel(candidate).aligned:
            variants.append(SHIFTED)
        if kind is not None and kind.in_place:
            variants.append(Variant("in_place", in_place=True))
        if candidate.accumulates:
            variants.append(Variant("accumulating", accumulate=True))
        return variants

    def errors(self, candidate: Candidate, variant: Variant) -> list[float]:
        """Return the relative L2 error of every output.

        Also check that nothing else was written and that a second run gives the same bits.
        """
        first, second = self.run(candidate, variant), self.run(candidate, variant)
        assert first == second, f"{variant.name}: two runs differ"
        layouts = candidate.layouts[len(self.request.inputs) :]
        errors: list[float] = []
        outputs = self.request.outputs
        meant = self.wanted
        adds = (False,) * len(outputs)
        if variant.accumulate:
            adds = sums(self.case.kind, self.case.attributes, len(outputs))
        for i, (data, type_, layout) in enumerate(zip(first, outputs, layouts, strict=True)):
            wanted, result = meant[i], from_bytes(data, type_, layout)
            if i == 0 and gives_product(self.case.attributes):
                meant = self._behind(result)
            if adds[i]:
                # Where both cancel, the rounding of either is left.
                larger = max(np.linalg.norm(wanted + self.initial[i]), np.linalg.norm(self.initial[i]))
                errors.append(float(np.linalg.norm(result - wanted - self.initial[i]) / larger))
            else:
                errors.append(relative_error(result, wanted, SMALLEST_NORMAL.get(type_.dtype, 0.0)))
        return errors

    def run(self, candidate: Candidate, variant: Variant) -> list[bytes]:
        request, memory = self.request, self.library.memory
        kind = asked_kind(self.request)
        shared = dict(kind.updates) if kind else {}
        if variant.in_place and kind:
            # An input that several outputs may overwrite goes to the first of them; a repeated operand has other bytes.
            pairs = [(o, s) for o, s in kind.in_place if request.inputs[s] == request.outputs[o]]
            shared |= {output: source for source, output in {s: o for o, s in reversed(pairs)}.items()}
        types = (*request.inputs, *request.outputs)
        pointers: list[int] = []
        guards: list[tuple[int, bytes]] = []
        for i, (type_, layout) in enumerate(zip(types, candidate.layouts, strict=True)):
            output = i - len(request.inputs)
            if output in shared:
                pointers.append(pointers[shared[output]])
                continue
            if output < 0:
                data = to_bytes(self.inputs[i], type_.dtype, layout)
            elif variant.accumulate:
                data = to_bytes(self.initial[output], type_.dtype, layout)
            else:
                data = bytes([POISON]) * type_.size_bytes
            # The control block, like every whole buffer, is aligned.
            shift = type_.dtype.size_bytes if variant.shift and type_.shape != (256,) else 0
            pointers.append(self._place(data, shift, guards, constant=output < 0 and i not in shared.values()))
        if candidate.workspace_bytes:
            garbage = bytes([POISON]) * candidate.workspace_bytes
            pointers.append(self._place(garbage, 0, guards, constant=False))
        arguments = OWN.arguments(candidate.call(request, variant.accumulate), self.case.first_row)
        requested_bytes = getattr(self.library.handle, "mbc_emulated_shared_bytes", int)
        requested_bytes()  # forgets launches by other tests
        self.library.launch(symbol_of(PROVIDER, candidate.name, request), pointers, arguments)
        asked_bytes = requested_bytes()
        declared_bytes = max(self.kernel(candidate).shared(request), DEFAULT_SHARED_BYTES)
        assert asked_bytes <= declared_bytes, (
            f"{candidate.name}: {asked_bytes} bytes of shared memory, {declared_bytes} declared"
        )
        for address, data in guards:
            assert memory.read(address, len(data)) == data, f"{variant.name}: bytes outside the outputs were written"
        count = len(request.inputs)
        results = [memory.read(pointers[count + i], t.size_bytes) for i, t in enumerate(request.outputs)]
        memory.free_all()
        return results

    def _place(self, data: bytes, shift: int, guards: list[tuple[int, bytes]], constant: bool) -> int:
        memory, guard_bytes = self.library.memory, self.library.guard_bytes
        guard = bytes([POISON]) * guard_bytes
        base = memory.allocate(guard_bytes + shift + len(data) + guard_bytes)
        address = base + guard_bytes + shift
        memory.write(base, guard + bytes([POISON]) * shift + data + guard)
        guards.append((base, guard))
        guards.append((address, data + guard) if constant else (address + len(data), guard))
        return address


def relative_error(result: Array, wanted: Array, smallest_normal: float = 0.0) -> float:
    """Return the relative L2 error of floating values, or the share of integers that differ.

    NaN must meet NaN, and an infinity must meet an infinity of its sign. Errors are relative to wanted values of at
    least `smallest_normal`: where a wanted value is smaller, `smallest_normal` takes its place.
    """
    if result.dtype.kind != "f":
        return float(np.mean(result != wanted))
    finite = np.isfinite(wanted)
    if not np.array_equal(result[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(result[finite]).all():
        return float("inf")
    result, wanted = result[finite], wanted[finite]
    scale = float(np.linalg.norm(np.maximum(np.abs(wanted), smallest_normal)))
    return float(np.linalg.norm(result - wanted)) / scale if scale else float(np.linalg.norm(result))


def check(library: Library, case: Case, precision: Precision) -> float:
    """Run a case in every layout and every variant; return the worst error as a share of the tolerance.

    No element of the inputs is at a threshold.
    """
    trials = (Trial(library, case, precision, draw) for draw in range(DRAWS))
    trial = next((trial for trial in trials if not trial.chooses_at_a_threshold()), Trial(library, case, precision))
    worst, failures = judged(trial)
    assert not failures, f"{case.name} in {precision}: " + "; ".join(failures)
    return worst


def judged(trial: Trial) -> tuple[float, list[str]]:
    """Return the largest error as a share of its tolerance, and a message for each error above its tolerance."""
    case = trial.case
    inside = rounds_inside(case.attributes)
    least_allowed = ROUNDED_INSIDE * TOLERANCES[trial.request.inputs[0].dtype] if inside else 0.0
    worst = 0.0
    failures: list[str] = []
    for candidate in trial.candidates():
        layouts = ",".join(layout.value for layout in candidate.layouts[:4])
        for variant in trial.variants(candidate):
            for i, error in enumerate(trial.errors(candidate, variant)):
                allowed = max(TOLERANCES.get(trial.request.outputs[i].dtype, 0.0), least_allowed)
                worst = max(worst, error / allowed if allowed else (1e9 if error else 0.0))
                if not error <= allowed:
                    failures.append(f"output {i}, {layouts}, {variant.name}: {error:.2e} > {allowed:.2e}")
    return worst, failures


def check_statistics(library: Library, case: Case, precision: Precision) -> None:
    """Check the result of a convolution with statistics, and that the statistics are those of the stored result."""
    trial = Trial(library, case, precision)
    candidates = trial.candidates()
    assert candidates
    for candidate in candidates:
        outputs = trial.run(candidate, Variant("plain"))
        assert outputs == trial.run(candidate, Variant("plain"))
        result, *statistics = (
            from_bytes(data, type_, layout)
            for data, type_, layout in zip(outputs, trial.request.outputs, candidate.layouts[2:], strict=True)
        )
        assert relative_error(result, trial.wanted[0]) <= TOLERANCES[trial.request.outputs[0].dtype]
        wanted = moments(result, len(result), case.kind == WITH_INSTANCE_STATISTICS)
        mean, variance = (numbers.reshape(wanted[0].shape) for numbers in statistics)
        assert max(distances(mean, variance, *wanted)) <= TOLERANCES[DType.FP32]
