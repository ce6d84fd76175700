"""The exact results of launches and the limits of their rounding.

The interpreter's results keep within the limits in each precision, for every kernel case and fused group. PyTorch and
NumPy agree on the exact results in float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import pytest

from mbc.equivalence.deviation import Deviation, Tally
from mbc.equivalence.float64 import Arithmetic, InNumpy
from mbc.equivalence.rounding_model import Evaluation
from mbc.ir.graph import Operation
from mbc.ir.types import Layout, Precision, TensorType
from mbc.ops.base import Array, Call
from mbc.ops.fused import launch_kind
from mbc.runtime.formats import loaded, stored_bytes
from tests.kernels.cuda.cases import CASES, GENERATED, Case
from tests.kernels.cuda.groups import GENERATED_GROUPS, groups_in

SINGLE = (*CASES, *GENERATED)
PRECISIONS = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)


def every_nth(cases: Sequence[Case], precision: Precision) -> list[Case]:
    """Return one case for each kind of operation and each class of its attributes."""
    seen: dict[tuple[str, object], Case] = {}
    for case in cases:
        if case.kind != "convert" and precision.working in {Precision(p).working for p in case.precisions}:
            seen.setdefault((case.kind, type(case.attributes)), case)
    return list(seen.values())


def cases(precision: Precision) -> list[Case]:
    return [*every_nth(SINGLE, precision), *every_nth((*GENERATED_GROUPS, *groups_in(precision)), precision)]


# Groups do in fp16 and tf32 what they do in bf16 and fp32.
ALL = [
    pytest.param(c, p, id=f"{c.name}-{p}")
    for p in PRECISIONS
    for c in (cases(p) if p in (Precision.FP32, Precision.BF16) else every_nth(SINGLE, p))
]


def stored(array: Array, tensor: TensorType) -> Array:
    return loaded(
        stored_bytes(array, tensor.dtype, Layout.CHANNELS_FIRST), tensor.shape, tensor.dtype, Layout.CHANNELS_FIRST
    )


def operands(case: Case, precision: Precision) -> list[Array]:
    """Return the operands as a launch reads them: floating-point operands in float32."""
    random = np.random.default_rng(len(case.name))
    types = case.request(precision).inputs
    return [stored(o.make(random, o.shape), t) for o, t in zip(case.operands, types, strict=True)]


def evaluation(case: Case, precision: Precision, arithmetic: Arithmetic) -> Evaluation:
    request = case.request(precision)
    inputs = tuple(f"in{i}" for i in range(len(request.inputs)))
    outputs = tuple(f"out{i}" for i in range(len(request.outputs)))
    operation = Operation(case.name, case.kind, inputs, outputs, case.attributes)
    batch = request.inputs[0].shape[0] + case.first_row
    call = Call(request.outputs, case.first_row, batch, precision)
    return Evaluation(arithmetic, operation, tuple(t.dtype for t in request.outputs), call, 1)


def interpreted(case: Case, precision: Precision, inputs: Sequence[Array]) -> list[Array]:
    """Return the outputs that the interpreter of plans stores."""
    request = case.request(precision)
    kind = launch_kind(case.kind, case.attributes)
    assert kind.evaluate is not None
    call = evaluation(case, precision, InNumpy(0)).call
    with np.errstate(all="ignore"):
        outputs = kind.evaluate(case.attributes, [x.copy() for x in inputs], call)
    return [stored(x, t) for x, t in zip(outputs, request.outputs, strict=True)]


def double(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def deviations(case: Case, precision: Precision, inputs: Sequence[Array], results: Sequence[Array]) -> list[Deviation]:
    arithmetic = InNumpy(0)
    model = evaluation(case, precision, arithmetic)
    product = double(results[0]) if model.hands_on_product else None
    judged: list[Deviation] = []
    for number, meant in enumerate(model.meant([double(x) for x in inputs], product)):
        tally = Tally(f"out{number}", model.stored[number])
        tally.add(arithmetic, double(results[number]), meant)
        judged.append(tally.deviation)
    return judged


@pytest.mark.parametrize(("case", "precision"), ALL)
def test_the_interpreter_keeps_within_the_limits(case: Case, precision: Precision):
    inputs = operands(case, precision)
    for deviation in deviations(case, precision, inputs, interpreted(case, precision, inputs)):
        assert deviation.passed, deviation


SHAPES = [c for c in SINGLE if c.kind != "convert" and Precision.FP32 in c.precisions]
GROUPS = every_nth((*GENERATED_GROUPS, *groups_in(Precision.FP32)), Precision.FP32)
WHOLE = [pytest.param(c, Precision.FP32, id=c.name) for c in (*SHAPES, *GROUPS)]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@needs_torch
def test_every_form_of_torchs_is_held_against_numpy():
    from mbc.equivalence.torch_forms import FORMS

    assert set(FORMS) <= {case.kind for case in SHAPES}


@needs_torch
@pytest.mark.parametrize(("case", "precision"), WHOLE)
def test_torch_gives_numpys_results(case: Case, precision: Precision):
    from mbc.equivalence.in_torch import InTorch
    from mbc.equivalence.torch_convolutions import torch

    inputs = [double(x) for x in operands(case, precision)]
    ours, theirs = (evaluation(case, precision, a) for a in (InNumpy(0), InTorch(0, "cpu")))
    exact = [m.exact for m in ours.meant(inputs, None)]
    given = [torch.from_numpy(x.copy()) for x in inputs]
    for wanted, meant in zip(exact, theirs.meant(given, None), strict=True):
        result = meant.exact.numpy()
        if wanted.dtype.kind == "f":
            scale = float(np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0))
            np.testing.assert_allclose(result, wanted, rtol=1e-9, atol=1e-12 * scale)
        else:
            np.testing.assert_array_equal(result, wanted)
