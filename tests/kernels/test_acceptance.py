"""Which calls kernels accept: the declarations that both the search and the verifier read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.hardware.spec import find_spec
from mbc.ir.graph import Ranks, TrainingGraph
from mbc.ir.types import DType, Layout, Precision
from mbc.kernels.base import Acceptance, Call, Candidate, Request
from mbc.kernels.cuda import KERNELS, OWN
from mbc.kernels.cudnn_legacy import CUDNN_LEGACY, LegacyChoice, legacy_candidate
from mbc.kernels.providers import PROVIDERS, runs
from mbc.ops.fused import join
from mbc.optimize.candidates.table import request_of
from mbc.passes.training_step import differentiate
from mbc.plan.model import Rows
from mbc.profile.model import Profile
from mbc.profile.paths import bundled_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import read_signature
from mbc.source import Source
from tests.kernels.cuda.cases import CASES, GENERATED, STATISTICS
from tests.kernels.cuda.groups import GENERATED_GROUPS, groups_in
from tests.kernels.cuda.launching import offered_anywhere

H200 = find_spec("h200")
BY_NAME = {provider.name: provider for provider in PROVIDERS}
MOST_COMBINED = 6  # operands all of whose combinations of layouts are tried
NET = """
network net(batch = 8, classes = 8) {
  input image[batch, 8, 16, 16] : float
  input target[batch] : class
  logits = image |> conv(16, 3, pad=1) |> bn |> relu |> conv(16, 3, pad=1) |> conv(16, 1) |> maxpool(2)
         |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
"""


def call(request: Request, c: Candidate, **changes: Any) -> Call:
    return replace(c.call(request), **changes)


def accepted(c: Candidate, asked: Call) -> Acceptance:
    return BY_NAME[c.provider].accepts(asked, H200)


def own_requests() -> Iterator[Request]:
    """Yield the requests of the kernels' own tests, which cover each kernel in every type."""
    for precision in (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16):
        for case in (*CASES, *GENERATED, *STATISTICS, *GENERATED_GROUPS, *groups_in(precision)):
            if {Precision.TF32: Precision.FP32}.get(precision, precision) in case.precisions:
                yield case.request(precision)


@functools.cache
def graph_of(precision: str) -> TrainingGraph:
    lowered = lower(parse(Source("net.mbc", NET)), (("train.precision", precision),), None)
    return differentiate(lowered.network, lowered.optimizer, lowered.precision, Ranks((8, 8), (0, 1)))


@functools.cache
def offers() -> list[tuple[Request, Candidate]]:
    """Yield every candidate of all providers for a network."""
    pairs: list[tuple[Request, Candidate]] = []
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        graph = graph_of(precision)
        for operation in graph.train:
            if operation.kind != "flatten":
                request = request_of(graph, operation, Rows(0, graph.batch))
                pairs += [(request, c) for p in PROVIDERS for c in p.candidates(request, H200)]
                if operation.kind.startswith("convolution"):
                    choice = LegacyChoice("FFT", Layout.CHANNELS_FIRST, legacy_math(request.precision))
                    pairs.append((request, legacy_candidate(request, choice, 1024)))
    return pairs


def legacy_math(precision: Precision) -> str:
    return "FMA" if precision in (Precision.FP32, Precision.TF32) else "DEFAULT"


def test_offers_are_accepted() -> None:
    own = [(request, c) for request in own_requests() for c in offered_anywhere(request)]
    assert {c.name for _, c in own} == set(KERNELS), "every kernel is tried"
    pairs = [*own, *offers()]
    assert {c.provider for _, c in pairs} == set(BY_NAME)
    refused = [(c, accepted(c, call(request, c))) for request, c in pairs]
    assert [pair for pair in refused if pair[1].refusal or pair[1].workspace_refusal] == []


def test_every_row_of_the_bundled_profile_is_accepted() -> None:
    profile: Profile = read_profile(bundled_path("NVIDIA H200"))
    count = 0
    for key, rows in list(profile.measurements.items())[::7]:
        request = read_signature(key)
        for row in rows:
            if not row.refused and (row.provider != OWN.name or row.name in KERNELS):  # else it was removed
                assert runs(row.candidate(), request, H200), (key, row)
                count += 1
    assert count > 5000


def test_no_layouts_are_accepted_but_those_offered() -> None:
    """A kernel accepts only the combinations of layouts that it offers.

    The emulator's tests compare every kernel with float64 in each of these combinations. Only kernels of several
    operations accept more: the operands of each operation may have a layout of their own.
    """
    for request in own_requests():
        operands = (*request.inputs, *request.outputs)
        ordered = [i for i, t in enumerate(operands) if t.ordered]
        offered: dict[str, set[tuple[Layout, ...]]] = {}
        for c in OWN.candidates(request, H200):
            offered.setdefault(c.name, set()).add(tuple(c.layouts[i] for i in ordered))
        for name, combinations in offered.items():
            kernel = KERNELS[name]
            if kernel.accepts_layouts is not None:
                continue
            base = [Layout.CHANNELS_FIRST] * len(operands)
            for combination in itertools.islice(itertools.product(Layout, repeat=len(ordered)), 1 << MOST_COMBINED):
                layouts = list(base)
                for i, layout in zip(ordered, combination, strict=True):
                    layouts[i] = layout
                asked = Call(request, name, kernel.settings, tuple(layouts), False, 1 << 40)
                assert (not OWN.accepts(asked, H200).refusal) == (combination in combinations), (name, combination)


def test_operands_of_each_update_have_one_layout() -> None:
    """A launch for many tensors processes each operation's operands element by element."""
    for kind in ("cast", "sgd_update"):
        graph = graph_of("bf16")
        values = graph.values
        members = [o for o in graph.train if o.kind == kind and values[o.inputs[0]].type.ordered]
        joined = join(members, [o.outputs[0] for o in members])
        assert len(members) > 1
        request = request_of(graph, joined, Rows(0, graph.batch))
        (c,) = OWN.candidates(request, H200)
        places = {name: at for at, name in enumerate((*joined.inputs, *joined.outputs))}
        one_last = {places[name] for name in (*members[0].inputs, *members[0].outputs)}
        alike = tuple(Layout.CHANNELS_LAST if at in one_last else Layout.CHANNELS_FIRST for at in range(len(places)))
        alike = tuple(
            x if t.ordered else Layout.CHANNELS_FIRST for x, t in zip(alike, call(request, c).operands, strict=True)
        )
        assert not OWN.accepts(call(request, c, layouts=alike), H200).refusal, "each operation as it likes"
        apart = (Layout.CHANNELS_FIRST, *alike[1:])
        assert "in the layouts" in OWN.accepts(call(request, c, layouts=apart), H200).refusal


@pytest.mark.parametrize("provider", sorted(BY_NAME))
def test_calls_that_differ_from_an_offer_are_refused(provider: str) -> None:
    tried = 0
    for request, c in offers():
        if c.provider != provider:
            continue
        tried += 1
        assert not accepted(c, call(request, c)).refusal
        assert accepted(c, call(request, c, name="no_such_kernel")).refusal
        assert accepted(c, call(request, c, settings=(*c.settings, ("speed", 1)))).refusal
        assert accepted(c, call(replace(request, kind="lrn"), c)).refusal
        flipped = {Layout.CHANNELS_FIRST: Layout.CHANNELS_LAST, Layout.CHANNELS_LAST: Layout.CHANNELS_FIRST}
        operands = (*request.inputs, *request.outputs)
        if sum(t.ordered for t in operands) > 1 and request.kind != "cast":
            one = next(i for i, t in enumerate(operands) if t.ordered)
            layouts = tuple(flipped[x] if i == one else x for i, x in enumerate(c.layouts))
            assert "in the layouts" in accepted(c, call(request, c, layouts=layouts)).refusal
        if not c.accumulates:
            assert "add to its output" in accepted(c, call(request, c, accumulate=True)).refusal
        double = replace(request.inputs[0], dtype=DType.FP64)
        assert accepted(c, call(replace(request, inputs=(double, *request.inputs[1:])), c)).refusal
    assert tried > 3


def test_too_little_workspace_is_refused_where_a_formula_says_so() -> None:
    kernels = 0
    for request in own_requests():
        for c in OWN.candidates(request, H200):
            if c.workspace_bytes:
                kernels += 1
                short = accepted(c, call(request, c, workspace_bytes=c.workspace_bytes - 1))
                assert str(c.workspace_bytes) in short.workspace_refusal and not short.refusal
    assert kernels > 10
    libraries = set()
    for request, c in offers():
        if c.provider != "mbc" and c.workspace_bytes:
            short = accepted(c, call(request, c, workspace_bytes=0))
            if short.workspace_refusal:
                libraries.add(c.provider)
            else:
                assert not short.proved, "what no formula proves is listed"
    assert "cublaslt" in libraries and "cudnn" in libraries


def test_a_gpu_that_cannot_run_a_kernel_refuses_it() -> None:
    refused = 0
    old = replace(H200, architecture="sm_75")
    for request in own_requests():
        for c in OWN.candidates(request, H200):
            kernel = KERNELS[c.name]
            if kernel.needs:
                assert "sm_75 lacks instructions that it needs" in OWN.accepts(call(request, c), old).refusal
                refused += 1
    assert refused > 100


def test_legacy_algorithms_and_maths_are_those_of_the_precision() -> None:
    request, c = next((r, c) for r, c in offers() if c.provider == CUDNN_LEGACY.name and r.precision is Precision.FP32)
    given = dict(c.settings)
    for settings, said in (
        ({**given, "algorithm": 99}, "no algorithm with the settings"),
        ({**given, "layout": 7}, "no algorithm with the settings"),
        ({**given, "math": 0}, "does not allow the math type"),
    ):
        assert said in CUDNN_LEGACY.accepts(call(request, c, settings=tuple(settings.items())), H200).refusal
