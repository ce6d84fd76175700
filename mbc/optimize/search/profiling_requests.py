"""The requests to profile for a graph: its distinct operations and the micro-batches that they may be divided into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mbc.hardware.spec import DeviceSpec
from mbc.ir.graph import Operation, TrainingGraph
from mbc.kernels.base import Request
from mbc.kernels.cudnn_convolution import HEURISTIC_ENGINE
from mbc.kernels.cudnn_legacy import CUDNN_LEGACY
from mbc.kernels.providers import PROVIDERS
from mbc.measure.need import Need
from mbc.ops.fused import Fused, join, kind_of
from mbc.optimize import effort
from mbc.optimize.candidates.scaled_times import OtherSizes
from mbc.optimize.candidates.table import CandidateTable, conversion_request, request_of
from mbc.optimize.candidates.user_rules import Rules
from mbc.optimize.fusion.fused_remat_match import all_fused_remats
from mbc.optimize.fusion.fusion_group import Group
from mbc.optimize.fusion.horizontal import bundles
from mbc.optimize.fusion.select_groups import Fusion
from mbc.options import Policy
from mbc.passes.relu_bit_masks import mask_relus, residual_relus
from mbc.plan.group import operation_of, rows_of
from mbc.plan.model import Buffer, Kernel, Launch, Plan, Rows
from mbc.profile.model import Profile


def needs(graph: TrainingGraph, device: DeviceSpec, policy: Policy) -> tuple[Need, ...]:
    """Return every distinct request, those that take most of a step's time first.

    With policy `all` the powers of two and the sizes halfway between them are measured; other sizes are interpolated
    until they are selected.

    Args:
        graph: The training graph.
        device: The GPU.
        policy: Sizes of micro-batches that plans may use.
    """
    if not graph.precision.runs_on_gpus:
        return ()
    # All estimates count as measured, so that kernels which need a measured time are asked for.
    plain = CandidateTable(graph, device, PROVIDERS, None, Rules(Policy.UNDIVIDED), optimism=1.0)
    # Plans with ReLU bit masks and without are compared by measured time, so both are requested.
    table = plain.of(mask_relus(graph, residual_relus(graph)))
    powers = [1 << k for k in range(graph.batch.bit_length())]
    sizes = {
        Policy.UNDIVIDED: [],
        Policy.POWER_OF_TWO: powers,
        Policy.ALL: [*powers, *(3 * power for power in powers)],
    }[policy]
    weights: dict[Request, float] = {}
    first: dict[Request, Operation] = {}
    fusion = Fusion.of(plain)
    steps: list[Operation] = []
    for variant in (fusion, Fusion.of(table)):
        steps += _launches(variant.table.graph.train, variant.possible[0], variant.table)
    steps += [fused_remat.operation for variant in (plain, table) for fused_remat in all_fused_remats(variant)]
    launches = [(o, 1.0) for o in dict.fromkeys(steps)]
    launches += [(o, effort.INFERENCE_WEIGHT) for o in _launches(graph.infer, fusion.possible[1], plain)]
    for operation, weight in launches:
        offered = table.offered(operation)
        if not offered and isinstance(operation.attributes, Fused):
            continue  # a group that no kernel covers
        request = table.request(operation, table.whole)
        first.setdefault(request, operation)
        time_us = min(c.time_us for c in table.candidates(operation, table.whole))
        weights[request] = weights.get(request, 0.0) + weight * time_us
    needs_ = [
        Need(tuple(table.request(operation, Rows(0, rows)) for rows in table.possible(operation, sizes)), weight)
        for operation, weight in ((first[request], weight) for request, weight in weights.items())
    ]
    needs_ += _conversions(table.graph, table)
    return tuple(sorted(needs_, key=lambda need: -need.weight_us))


def _launches(program: Sequence[Operation], groups: Sequence[Group], table: CandidateTable) -> Iterable[Operation]:
    """Yield every operation, every launch of a fusion group, and every horizontally fused launch."""
    yield from (o for o in program if not kind_of(o).view)
    for group in groups:
        yield from group.launches
    for bundle in bundles(program, table):
        yield join(bundle, [name for operation in bundle for name in operation.outputs])


def _conversions(graph: TrainingGraph, table: CandidateTable) -> Iterable[Need]:
    types = dict.fromkeys(value.type for value in graph.values.values() if value.type.ordered)
    for type_ in types:
        time_us = 2 * type_.size_bytes / (table.device.copy_gb_s * 1e3)
        yield Need((conversion_request(type_, graph),), effort.CONVERSION_WEIGHT * time_us)


def may_gain_by_micro_batches(plan: Plan) -> bool:
    """Return whether the memory limit costs the training step time: smaller workspaces, recomputation or offloading."""
    return plan.predictions.train_us > effort.MEASURING_GAIN * plan.bounds.fastest_us


def unmeasured(plan: Plan) -> tuple[Request, ...]:
    """Return the distinct requests of launches of the training step whose time was not measured."""
    operations = {operation.name: operation for operation in plan.graph.train}
    requests: dict[Request, None] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and not launch.work.measured and launch.operations:
            requests[launched_request(plan.graph, launch, operations, plan.buffers)] = None
    return tuple(requests)


def untried(plan: Plan) -> tuple[Request, ...]:
    """Return the distinct requests of launches that should be run once before the plan is used.

    They are launches, of inference as well, by cuDNN engines and algorithms that were never run on these requests,
    since cuDNN may need more workspace. And they are launches of micro-batches of the training step whose time was not
    measured.
    """
    requests: dict[Request, None] = {}
    for program, launches in ((plan.graph.train, plan.train.launches), (plan.graph.infer, plan.infer.launches)):
        operations = {operation.name: operation for operation in program}
        for launch in launches:
            if not isinstance(launch.work, Kernel) or launch.work.measured or not launch.operations:
                continue
            divided = launches is plan.train.launches and rows_of(plan, launch) < plan.graph.batch
            if divided or is_numbered(launch.work):
                requests[launched_request(plan.graph, launch, operations, plan.buffers)] = None
    return tuple(requests)


def outdated(plan: Plan, other_sizes: OtherSizes | None) -> tuple[Request, ...]:
    """Return the distinct requests of launches of the training step that were measured before their kernel was added.

    The time of the kernel is from another mini-batch.
    """
    if other_sizes is None:
        return ()
    operations = {operation.name: operation for operation in plan.graph.train}
    requests: dict[Request, None] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and not launch.work.measured and launch.operations:
            request = launched_request(plan.graph, launch, operations, plan.buffers)
            if other_sizes.came_later(request, launch.work):
                requests[request] = None
    return tuple(requests)


def chosen_by_estimate(plan: Plan, profile: Profile | None) -> tuple[Request, ...]:
    """Return the distinct requests that the profile leaves to their estimates, but that the training step chose.

    Return none if they take a share of the step that is also too small for `decisive_requests`.
    """
    if profile is None or not profile.left_to_estimate:
        return ()
    operations = {operation.name: operation for operation in plan.graph.train}
    requests: dict[Request, None] = {}
    time_us = 0.0
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and not launch.work.measured and launch.operations:
            request = launched_request(plan.graph, launch, operations, plan.buffers)
            if profile.compares_estimate(request):
                requests[request] = None
                time_us += launch.work.time_us
    left_us = effort.UNDECIDED_SHARE / effort.OPTIMISM * plan.predictions.train_us
    return tuple(requests) if time_us > left_us else ()


def is_numbered(work: Kernel) -> bool:
    """Return whether a kernel is a numbered engine or algorithm of cuDNN, which only profiles list."""
    return work.provider == CUDNN_LEGACY.name or dict(work.settings).get("engine", HEURISTIC_ENGINE) != HEURISTIC_ENGINE


def launched_request(
    graph: TrainingGraph, launch: Launch, operations: Mapping[str, Operation], buffers: Sequence[Buffer]
) -> Request:
    """Return the request that a launch of some `operations`, by name, runs."""
    rows = max((access.rows for access in launch.accesses), key=lambda part: part.count)
    return request_of(graph, operation_of(launch, operations, buffers), rows)
