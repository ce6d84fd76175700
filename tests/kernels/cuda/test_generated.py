"""Kernels that are generated from device expressions: against NumPy, and that equal programs are one kernel."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from mbc.codegen.launch_headers import write_launch_headers
from mbc.codegen.render_sources import render_generated
from mbc.ir.graph import Operation, TrainingGraph
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import DTYPE_CODES, Request
from mbc.kernels.cuda.generated.generated_map import generated_kernel
from mbc.kernels.cuda.generated.lowering import lower
from mbc.kernels.cuda.generated.map_program import MapProgram
from mbc.kernels.cuda.wiring import members_of
from mbc.ops import KINDS
from mbc.ops.activation import LeakyRelu
from mbc.ops.base import NoAttributes
from mbc.ops.fused import join
from mbc.ops.instance_norm import InstanceNormalize
from mbc.optimize.candidates.table import request_of
from mbc.optimize.fusion.data_flow import Flow, data_flow_groups
from mbc.optimize.fusion.match_patterns import live_out, pattern_groups
from mbc.plan.model import Rows
from mbc.resources import folder
from tests.graphs import training_graph
from tests.kernels.cuda.cases import GENERATED, Case, Operand, normal, positive
from tests.kernels.cuda.groups import GENERATED_GROUPS
from tests.kernels.cuda.launching import DRAWS, HostMemory, Library, Trial, Variant, from_bytes, judged
from tests.kernels.cuda.random_groups import KINDS_DRAWN, SUMS, Drawing, random_group
from tests.kernels.cuda.test_emulated import EMULATOR, GXX
from tests.objects import shared_library
from tests.optimize.fusion.test_data_flow import RESIDUAL

pytestmark = pytest.mark.skipif(GXX is None, reason="no g++ on this machine")
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16)
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def programs(cases: Iterable[Case], precision: Precision) -> dict[str, MapProgram]:
    """Return the programs of those cases for which a kernel can be generated, by name."""
    lowered = (lower(case.request(precision)) for case in cases)
    return {one.program.name: one.program for one in lowered if one is not None}


def drawn(fewest: int = 60, most: int = 600) -> tuple[Case, ...]:
    """Return groups that end in sums, and groups of the first seeds until kernels of every kind are generated."""
    sums = (random_group(seed, kind) for kind in SUMS for seed in range(8))
    cases = [case for case in sums if case is not None]
    missing = set(KINDS_DRAWN) - set(SUMS)
    for seed in range(most):
        if seed >= fewest and not missing:
            break
        group = random_group(seed)
        if group is None or (seed >= fewest and not missing & kinds_generated(group)):
            continue
        cases.append(group)
        missing -= kinds_generated(group)
    return tuple(cases)


def kinds_generated(case: Case) -> set[str]:
    """Return the kinds of operations in the kernel that is generated for a case; none if there is no such kernel."""
    request = case.request(Precision.BF16)
    return {member.kind for member in members_of(request)} if lower(request) else set()


DRAWN = drawn()


def build_generated(where: Path, precision: Precision, generated: dict[str, MapProgram]) -> Library:
    """Return a library of all kernels, which are in one file because that compiles faster than a file for each."""
    assert GXX is not None
    lines: list[str] = []
    for name, program in generated.items():
        (where / program.file).write_text(render_generated(program))
        lines += [f"#define Generated Generated_{name}", f'#include "{program.file}"', "#undef Generated"]
    (where / "all.cu").write_text("\n".join(lines) + "\n")
    write_launch_headers(where)
    templates = folder("templates")
    include = [where, EMULATOR, templates / "include", templates / "kernels/shared", templates / "kernels/generated"]
    result = where / "kernels.so"
    shared_library((GXX,), [where / "all.cu"], include, DTYPE_CODES[precision], result)
    return Library(ctypes.CDLL(str(result)), HostMemory())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Precision, Library]:
    return {
        p: build_generated(tmp_path_factory.mktemp(p), p, programs((*DRAWN, *GENERATED, *GENERATED_GROUPS), p))
        for p in PRECISIONS
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", (*DRAWN, *GENERATED, *GENERATED_GROUPS), ids=lambda case: case.name)
def test_a_drawn_group_or_a_function(case: Case, precision: Precision, libraries: dict[Precision, Library]):
    library = libraries[precision]
    trials = (Trial(library, case, precision, draw) for draw in range(DRAWS))
    trial = next((trial for trial in trials if not trial.is_unsteady()), Trial(library, case, precision))
    _, failures = judged(trial)
    assert not failures, f"{case.name}, {case.kind} in {precision}: " + "; ".join(failures)


def test_the_left_tail_of_gelu_keeps_its_digits(libraries: dict[Precision, Library]):
    """Element by element, gelu is exact even where 1 + erf would have no digits left."""
    case = next(c for c in GENERATED if c.kind == "gelu")
    trial = Trial(libraries[Precision.FP32], case, Precision.FP32)
    (candidate, *_) = trial.candidates()
    drawn = np.linspace(-12, 3, trial.inputs[0].size, dtype=np.float32)
    trial.inputs[0] = drawn.astype(np.float64).reshape(case.operands[0].shape)
    (output,) = trial.run(candidate, Variant("plain"))
    result = from_bytes(output, trial.request.outputs[0], candidate.layouts[-1]).ravel()
    x = trial.inputs[0].ravel()
    wanted = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x])
    nonzero = x != 0
    assert np.max(np.abs(result[nonzero] / wanted[nonzero] - 1)) <= 1e-5


def test_every_kind_with_an_expression_is_drawn():
    assert {kind for case in DRAWN for kind in kinds_generated(case)} == set(KINDS_DRAWN)


def test_sums_that_end_a_launch_are_not_beside_sums_that_members_read():
    drawing = Drawing(np.random.default_rng(0), (2, 3, 8, 8))
    drawing.dot("pixel_dot")
    drawing.reduce("instance_normalize_backward_reduce", InstanceNormalize(1e-3))
    drawing.append("tanh", NoAttributes(), (drawing.operations[-1].outputs[0],), whole=False)
    read = {name for operation in drawing.operations for name in operation.inputs}
    outputs = [name for operation in drawing.operations for name in operation.outputs if name not in read]
    joined = join(drawing.operations, outputs)
    operands = tuple(drawing.operands[name] for name in joined.inputs)
    assert lower(Case("two kinds of sums", joined.kind, joined.attributes, operands).request(Precision.FP32)) is None


def _case(name: str, request: Request) -> Case:
    """Return a request of bf16 as a case; numbers of channels are positive, as variances are."""
    operands = tuple(
        Operand(
            "working" if t.dtype is DType.BF16 else t.dtype.value, t.shape, normal if len(t.shape) > 1 else positive
        )
        for t in request.inputs
    )
    return Case(name, request.kind, request.attributes, operands)


def _example(name: str) -> TrainingGraph:
    text = RESIDUAL if name == "residual" else (EXAMPLES / f"{name}.mbc").read_text(encoding="utf-8")
    text = text.replace("16, 16, 16]", "7, 9, 8]").replace("PRECISION", "fp32")
    return training_graph(text, ("batch", "2"), ("train.precision", "bf16"))


def test_groups_that_the_search_proposes_for_examples(tmp_path: Path):
    """Each program runs at the smallest size that an example has."""
    smallest: dict[str, Request] = {}
    for name in ("densenet121", "googlenet", "mobilenet_v2", "resnet", "vgg16", "residual"):
        steps = _example(name)
        for program in (steps.train, steps.infer):
            results = live_out(steps, program)
            for group in data_flow_groups(Flow.of(steps, program, results), pattern_groups(program, results)):
                request = request_of(steps, group.launches[0], Rows(0, steps.batch))
                lowered = lower(request)
                assert lowered is not None
                best = smallest.get(lowered.program.name)
                if best is None or request.inputs[0].elements < best.inputs[0].elements:
                    smallest[lowered.program.name] = request
    cases = [_case(name, request) for name, request in smallest.items()]
    assert len(cases) > 3
    library = build_generated(tmp_path, Precision.BF16, programs(cases, Precision.BF16))
    for case in cases:
        _, failures = judged(Trial(library, case, Precision.BF16))
        assert not failures, f"{case.kind}: " + "; ".join(failures)


def test_kernels_with_sums_over_rows_accumulate_and_no_others():
    combinations: set[tuple[bool, bool]] = set()
    for request in (case.request(Precision.BF16) for case in DRAWN):
        kernel, lowered = generated_kernel(request), lower(request)
        if kernel is not None and lowered is not None:
            assert kernel.accumulates == any(KINDS[member.kind].accumulates for member in members_of(request))
            combinations.add((kernel.accumulates, bool(lowered.program.sums)))
    assert combinations == {(True, True), (False, True), (False, False)}, "sums over rows, sums by sample, no sums"


def test_equal_programs_of_different_networks_are_one_kernel():
    sources: set[tuple[str, str]] = set()
    for shape, slope in (((4, 8, 5, 5), 0.1), ((64, 24, 7, 9), 0.2), ((2, 3), 0.3)):
        operations = (
            Operation("first", "leaky_relu", ("x",), ("y",), LeakyRelu(slope)),
            Operation("second", "mul", ("y", "z"), ("product",), NoAttributes()),
        )
        joined = join(operations, ("product",))
        x = TensorType(shape, DType.BF16)
        lowered = lower(Request(joined.kind, joined.attributes, (x, x), (x,), Precision.BF16))
        assert lowered is not None and lowered.reals == (slope,)
        sources.add((lowered.program.name, render_generated(lowered.program)))
    assert len(sources) == 1
