"""Fusion groups: where patterns match, which are selected, and that plans with and without groups agree."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from mbc.errors import MbcError
from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.graph import TrainingGraph
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import OWN
from mbc.kernels.interpreter import INTERPRETER
from mbc.kernels.providers import PROVIDERS
from mbc.ops.fused import Fused, kind_of, launch_kind, names_of
from mbc.optimize.bounds.arena_bytes import floor_bytes
from mbc.optimize.candidates.table import CandidateTable, Rules
from mbc.optimize.fusion.fusion_group import Group
from mbc.optimize.fusion.match_patterns import live_out, pattern_groups
from mbc.optimize.fusion.select_groups import Fusion, comparable, is_measured, plain
from mbc.optimize.search.profiling_requests import needs
from mbc.optimize.search.search import Limits, search
from mbc.optimize.selection.selector import Selector
from mbc.options import Policy
from mbc.plan.model import Kernel, Mode, Plan, Program
from mbc.plan.verify import verify_plan
from mbc.profile.signature import read_signature, signature, with_rows
from tests.graphs import training_graph
from tests.optimize.fusion.unclustered import UNCLUSTERED
from tests.optimize.planned import (
    Adapted,
    Favouring,
    NoSizes,
    Without,
    assert_equal_but_for_rounding,
    distance,
    stepped,
)

H200 = find_spec("h200")
SOURCE = """
network small(batch = 6, classes = 5) {
  input image[batch, 2, 6, 6] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) @first |> bn @bn0 |> relu
  y = x |> conv(4, 3, pad=1) @second |> bn @bn1 |> relu |> conv(4, 3, pad=1) |> bn(affine = AFFINE) @bn2
  z = x |> conv(4, 1) @down |> bn @bn3
  u = z + y |> relu
  v = u |> conv(4, 3, pad=1) @third |> bn @bn4
  w = u + v |> relu
  logits = w |> conv(3, 3, bias=true) @fourth |> relu |> flatten |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = OPTIMIZER  precision = PRECISION }
"""


@functools.cache
def graph(precision: str = "fp32", optimizer: str = "sgd(momentum=0.9)", affine: str = "true") -> TrainingGraph:
    text = SOURCE.replace("PRECISION", precision).replace("OPTIMIZER", optimizer).replace("AFFINE", affine)
    return training_graph(text)


def table(steps: TrainingGraph, fused: bool = True, gpu: DeviceSpec = H200) -> CandidateTable:
    providers = (INTERPRETER,) if steps.precision == "fp64" else PROVIDERS
    # Both are asked for candidates only.
    chosen = tuple(Favouring(p) if fused else Without(p) for p in providers)
    return CandidateTable(steps, gpu, chosen, rules=Rules())


def planned(steps: TrainingGraph, fused: bool = True, budget_bytes: int = 10**12, gpu: DeviceSpec = H200) -> Plan:
    plan = search(table(steps, fused, gpu), Limits(budget_bytes, without=frozenset({"concurrent_stream"})))
    verify_plan(plan)
    return plan


def launched(program: Program) -> set[str]:
    return {launch.work.name for launch in program.launches if isinstance(launch.work, Kernel)}


def test_every_kernel_of_a_group_finds_its_place():
    kernels = launched(planned(graph("bf16"), gpu=UNCLUSTERED).train)
    assert kernels >= {
        "batch_normalize_relu", "batch_normalize_add_relu", "dual_batch_normalize_add_relu",
        "batch_normalize_relu_bn_reduce", "batch_normalize_relu_backward", "add_relu_backward_bn_reduce",
        "bias_add_relu", "relu_backward_channel_sum", "multi_tensor_sgd", "multi_tensor_update_running",
        "multi_tensor_cast",
    }  # fmt: skip
    assert not kernels & {"relu", "relu_backward", "sgd_update", "update_running"}


def test_small_tensors_are_normalised_at_once_where_blocks_form_clusters():
    kernels = launched(planned(graph("bf16")).train)
    assert kernels >= {
        "batch_normalize_single_launch",
        "batch_normalize_relu_single_launch",
        "batch_normalize_add_relu_single_launch",
        "batch_normalize_relu_backward_single_launch",
        "add_relu_backward_batch_normalize_single_launch",
        "batch_normalize_backward_single_launch",
    }
    assert not kernels & {"batch_statistics", "batch_normalize_relu_bn_reduce", "batch_normalize_backward_reduce"}


def test_a_plan_without_groups_takes_longer_and_more_memory():
    fused, single = planned(graph("bf16")), planned(graph("bf16"), fused=False)
    assert launched(single.train) >= {"relu", "relu_backward", "sgd_update"}
    assert all(len(launch.operations) <= 1 for launch in single.train.launches)
    assert fused.predictions.train_us < single.predictions.train_us
    # A value inside a group has no buffer. (But one launch for all updates keeps the gradients until then.)
    value_bytes = [
        sum(b.size_bytes for b in p.buffers if b.value and p.graph.values[b.value].per_sample) for p in (fused, single)
    ]
    assert value_bytes[0] < value_bytes[1]


@pytest.mark.parametrize("optimizer", ["sgd()", "sgd(momentum=0.9, nesterov=true)", "adamw()"])
@pytest.mark.parametrize("affine", ["true", "false"])
def test_groups_compute_their_operations(optimizer: str, affine: str):
    steps = graph("fp64", optimizer, affine)
    fused, single = planned(steps), planned(steps, fused=False)
    assert any(len(launch.operations) > 1 for launch in fused.train.launches)
    assert_equal_but_for_rounding(fused, single)


def test_fused_operations_in_low_precision_are_as_exact_as_single_ones():
    exact = stepped(planned(graph("fp32"), fused=False))
    off = {fused: distance(stepped(planned(graph("bf16"), fused)), exact) for fused in (True, False)}
    assert 0 < off[True] < 1.3 * off[False]


def test_values_with_other_readers_are_written():
    """ReLU's output is a result, which must be written; no pattern leaves out the batch norm's, which is read twice."""
    text = """
network small(batch = 6, classes = 5) {
  input image[batch, 2, 6, 6] : float
  input target[batch] : class
  x = image |> conv(4, 3, pad=1) |> bn
  y = x |> relu
  logits = x + y |> flatten |> linear(classes)
  output logits
  output y
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd() }
"""
    steps = training_graph(text)
    assert not [g for g in pattern_groups(steps.train, live_out(steps, steps.train)) if "bn" in str(g.unstored)]
    plan = planned(steps, gpu=UNCLUSTERED)
    assert "relu0" in {plan.buffers[a.buffer].value for launch in plan.train.launches for a in launch.accesses}


def test_overlapping_groups_exclude_one_another():
    steps = graph("bf16")
    programs = Fusion.of(table(steps)).programs()
    run = [name for operation in programs.train for name in names_of(operation)]
    views = {o.name for o in steps.train if kind_of(o).view}
    assert set(run) | views == {o.name for o in steps.train}
    outputs = [v for o in programs.train for v in o.outputs]
    assert len(outputs) == len(set(outputs))
    # Everything that is read was made before, or is an input or a state.
    there = {v for v, value in steps.values.items() if value.role != "intermediate"}
    for operation in programs.train:
        assert set(operation.inputs) <= there, operation.name
        there.update(operation.outputs)


def test_groups_keep_no_more_bytes_live_than_they_may():
    """The slice of a concatenation's gradient is half as large as the gradient, which a group would read much later."""
    steps = training_graph("""
network unet(batch = 4, classes = 3) {
  input image[batch, 8, 16, 16] : float
  input target[batch, 16, 16] : class
  skip = image |> conv(64, 3, pad=1) |> bn |> relu
  up = skip |> maxpool(2) |> conv(64, 3, pad=1) |> bn |> relu |> conv_transpose(64, 2, stride=2)
  logits = (skip, up) |> concat |> conv(64, 3, pad=1) |> bn |> relu |> conv(classes, 1)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd()  precision = bf16 }
""")
    fusion = Fusion.of(CandidateTable(steps, H200, PROVIDERS))

    def with_slice(held_bytes: int) -> int:
        """Return the number of operations in the launch that reads the skip connection's gradient."""
        slices = [
            names_of(o)
            for o in fusion.programs(left_out=fusion.long(held_bytes)).train
            if "slice" in " ".join(names_of(o))
        ]
        return max(map(len, slices))

    gradient_bytes = 4 * 128 * 16 * 16 * 2
    assert with_slice(gradient_bytes // 2) > 2 >= with_slice(gradient_bytes // 2 - 1)
    selector = Selector(fusion)
    assert selector.fastest_fused(held_bytes=gradient_bytes) is selector.fastest_fused(), "groups are chosen once"


def test_what_excludes_another_group():
    reader = next(o for o in graph("bf16").train if len(o.inputs) > 1)
    one = Group((reader,), (0,), frozenset("ab"), frozenset("u"))
    for replaces, unstored, excluded in (
        ("cd", "v", False),
        ("bc", "v", True),  # one operation twice
        ("cd", reader.inputs[:1], True),  # the first reads what the second does not store
    ):
        other = Group((), (), frozenset(replaces), frozenset(unstored))
        assert one.excludes(other) is other.excludes(one) is excluded


def test_a_group_that_is_slower_than_its_operations_is_left_alone():
    steps = graph("bf16")

    class Slow(Adapted):
        def candidates(self, request: Request, device: DeviceSpec) -> Iterable[Candidate]:
            for candidate in self.inner.candidates(request, device):
                slower = isinstance(request.attributes, Fused) and request.kind.startswith("batch_normalize+relu+")
                yield replace(candidate, time_us=1e6 if slower else candidate.time_us)

    others = tuple(p for p in PROVIDERS if p.name != "mbc")
    programs = Fusion.of(CandidateTable(steps, UNCLUSTERED, (*others, Slow(OWN)))).programs()
    kinds = {operation.kind for operation in programs.train}
    assert "batch_normalize+relu" in kinds
    assert not [kind for kind in kinds if kind.startswith("batch_normalize+relu+")]


def test_estimated_groups_do_not_compete_with_measured_operations():
    """Estimates decide about both, whatever the measured times of the operations."""
    steps = graph("bf16")

    class Measured(NoSizes):
        """A profile that has measured every operation, and no group."""

        def __init__(self, share: float) -> None:
            self.share = share

        def candidates(self, request: Request) -> tuple[Candidate, ...]:
            if isinstance(request.attributes, Fused):
                return ()
            offered = [c for p in PROVIDERS for c in p.candidates(request, H200)]
            return tuple(replace(c, measured=True, time_us=self.share * c.time_us) for c in offered)

    modelled = Fusion.of(CandidateTable(steps, H200, PROVIDERS)).programs()
    for share in (0.01, 1.0, 100.0):
        assert Fusion.of(CandidateTable(steps, H200, PROVIDERS, Measured(share))).programs() == modelled != plain(steps)


def test_a_group_that_failed_to_be_measured_is_not_estimated():
    steps = graph("bf16")
    table_of = CandidateTable(steps, H200, PROVIDERS)
    taken = Fusion.of(table_of).programs().train
    group = next(g for g in Fusion.of(table_of).possible[0] if g.launches[0] in taken)
    request = table_of.request(group.launches[0], table_of.whole)

    class Failing(NoSizes):
        extents: Mapping[str, object] = {signature(request): None}

    by_name = {operation.name: operation for operation in steps.train}
    launches = [*(by_name[name] for name in group.replaces), *group.launches]
    assert comparable(CandidateTable(steps, H200, PROVIDERS, Failing()), group, launches) is None
    assert group.launches[0] not in Fusion.of(CandidateTable(steps, H200, PROVIDERS, Failing())).programs().train


def test_estimated_requests_admit_no_group_that_must_be_measured():
    steps = graph("bf16")

    class Left(NoSizes):
        def compares_estimate(self, request: Request) -> bool:
            return True

    left_table = CandidateTable(steps, H200, PROVIDERS, Left())
    group = Fusion.of(left_table).possible[0][0]
    assert all(map(left_table.timed, group.launches))
    assert is_measured(left_table, group) and not is_measured(left_table, replace(group, measured=True))


def test_interpolated_times_compete_with_measured_ones():
    """Times interpolated between measured sizes, and those of earlier kernel versions, count as measured here."""
    steps = graph("bf16")

    class Expected(NoSizes):
        """A profile that has measured every operation, and of every group the time of an earlier version."""

        def candidates(self, request: Request) -> tuple[Candidate, ...]:
            offered = (c for p in PROVIDERS for c in p.candidates(request, H200))
            return tuple(replace(c, measured=not isinstance(request.attributes, Fused)) for c in offered)

    programs = Fusion.of(CandidateTable(steps, H200, PROVIDERS, Expected())).programs()
    assert programs == Fusion.of(CandidateTable(steps, H200, PROVIDERS)).programs() != plain(steps)


class OfSimilar(NoSizes):
    """A similar GPU's profile, which has times of every request except for some kinds."""

    def __init__(self, lacks: frozenset[str] = frozenset()) -> None:
        self.lacks = lacks

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        if request.kind in self.lacks:
            return ()
        return tuple(c for p in PROVIDERS for c in p.candidates(request, H200))


class Partly(NoSizes):
    """A profile that has measured requests of these kinds, with a similar GPU's profile for the others."""

    def __init__(self, similar: OfSimilar, kinds: frozenset[str] = frozenset()) -> None:
        self.similar, self.kinds = similar, kinds

    def candidates(self, request: Request) -> tuple[Candidate, ...]:
        offered = (c for p in PROVIDERS for c in p.candidates(request, H200))
        return tuple(replace(c, measured=True) for c in offered) if request.kind in self.kinds else ()


def test_times_of_one_kind_are_compared():
    steps = graph("bf16")
    all_groups, _ = Fusion.of(table(steps)).possible
    group = next(g for g in all_groups if g.launches[0].kind == "batch_normalize+relu")
    by_name = {operation.name: operation for operation in steps.train}
    launches = [*(by_name[name] for name in group.replaces), *group.launches]
    kinds = frozenset(operation.kind for operation in launches)
    single = frozenset({"relu"})
    assert single < kinds

    def asked(lacks: frozenset[str], measured: frozenset[str], group: Group = group) -> tuple[CandidateTable, Any]:
        tabulated = CandidateTable(steps, H200, PROVIDERS, Partly(OfSimilar(lacks), measured))
        return tabulated, comparable(tabulated, group, launches)

    nothing, unpredicted = frozenset[str](), replace(group, measured=True)
    tabulated, compared = asked(nothing, kinds)
    assert compared(launches[0]) == tabulated.candidates(launches[0], tabulated.whole)
    assert compared(launches[0])[0].measured
    for measured in (nothing, single):  # all have times of the similar GPU
        tabulated, compared = asked(nothing, measured, unpredicted)
        assert is_measured(tabulated, unpredicted)
        assert all(compared(o) == tabulated.candidates(o, tabulated.whole) for o in launches)
    tabulated, compared = asked(single, nothing)
    assert compared == tabulated.modelled
    for lacks, measured in ((single, nothing), (single, kinds - single)):  # the model must not stand in
        assert asked(lacks, measured, unpredicted)[1] is None
    tabulated, compared = asked(kinds, single)
    assert compared == tabulated.modelled


def test_groups_are_measured_like_operations():
    wanted = {need.undivided for need in needs(graph("bf16"), H200, Policy.UNDIVIDED)}
    asked = {request.kind for request in wanted if isinstance(request.attributes, Fused)}
    assert {"batch_normalize+relu", "sgd_update*", "cast*", "update_running*"} <= asked
    for request in wanted:
        assert read_signature(signature(request)) == request
        if not isinstance(request.attributes, Fused) or not request.kind.startswith("batch_normalize+relu"):
            continue
        if launch_kind(request.kind, request.attributes).divisible:
            halved = with_rows(request, 3)
            assert halved.inputs[0].shape[0] == 3
            assert halved.inputs[1] == request.inputs[1]  # a mean has no rows


def test_the_floor_counts_the_least_demanding_launch():
    """An addition that can also run inside a group counts with the smaller memory of both."""
    steps = graph("bf16")
    with_groups, _ = floor_bytes(Fusion.of(table(steps)))
    without, _ = floor_bytes(Fusion.of(table(steps, fused=False)))
    assert with_groups <= without


def test_groups_that_need_too_much_run_one_by_one():
    """Within a budget between the needs of both programs, the program that fits is used."""
    steps = graph("fp32")
    sizes = {fused: planned(steps, fused).predictions.arena_bytes for fused in (True, False)}
    overhead = H200.overhead_bytes
    assert planned(steps, budget_bytes=min(sizes.values()) + overhead).predictions.arena_bytes <= min(sizes.values())


def test_the_verifier_wants_every_operation_of_a_group():
    plan = planned(graph("bf16"), gpu=UNCLUSTERED)
    index, launch = next(
        (i, launch) for i, launch in enumerate(plan.train.launches)
        if isinstance(launch.work, Kernel) and launch.work.name == "batch_normalize_relu_bn_reduce"
    )  # fmt: skip
    shorter = replace(launch, operations=launch.operations[:-1])
    launches = (*plan.train.launches[:index], shorter, *plan.train.launches[index + 1 :])
    with pytest.raises(MbcError) as caught:
        verify_plan(replace(plan, train=replace(plan.train, launches=launches)))
    assert caught.value.code in ("MBC123", "MBC127")


def test_sums_that_a_member_reads_are_not_divided():
    asked = {need.undivided for need in needs(graph("bf16"), H200, Policy.ALL)}
    whole = [r for r in asked if r.kind.endswith("batch_normalize_backward_reduce+batch_normalize_backward")]
    assert whole
    for request in whole:
        kind = launch_kind(request.kind, request.attributes)
        assert not kind.divisible and not kind.accumulates


def test_a_group_overwrites_what_its_members_may():
    """Inference reads the input of a batch norm only once, so the output of the ReLU after it may overwrite it."""
    plan = planned(graph("bf16"))
    for launch in plan.infer.launches:
        assert isinstance(launch.work, Kernel)
        if launch.work.name == "batch_normalize_relu" and launch.operations[0].endswith("bn1"):
            written = next(a.buffer for a in launch.accesses if a.mode is not Mode.READ)
            assert plan.buffers[written].alias == launch.accesses[0].buffer
            return
    raise AssertionError("no such launch")


def test_all_groups_cover_both_programs():
    steps = graph("bf16")
    trained = {o.name for o in steps.train}
    inferred = [g for g in Fusion.of(table(steps)).all_groups if not g.replaces & trained]
    assert {launch.kind for g in inferred for launch in g.launches} >= {"batch_normalize+relu", "bias_add+relu"}
