"""Plans of sources with groups of parameters: verified, written and read, with a launch for each kind of update."""

from __future__ import annotations

from functools import cache

from mbc.compiler import compile_plan
from mbc.ir.averages import averages_of
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.model import Kernel, Mode, Plan
from mbc.plan.verify import verify_plan
from mbc.plan.verify_ranks import verify_rank
from mbc.report.tables import heading
from mbc.source import Source
from tests.bench.jobs import MIXED

GROUPED = """
  no_decay = norm_and_bias
  groups = (group("linear0.*", rate=3), group("conv0.*", weight_decay=0.5))
"""


@cache
def planned(entries: str, gpus: int = 1) -> Plan:
    text = MIXED.replace("train {", f"train {{ {entries}")
    return compile_plan(Source("mixed.mbc", text), Options(gpu="h200", gpus=gpus))


def updates(plan: Plan) -> list[int]:
    """Return the number of parameters that each launch of updates has."""
    kinds = {op.name: op.kind for op in plan.graph.train}
    launches = [x for x in plan.train.launches if x.operations and kinds[x.operations[0]] == "adamw_update"]
    return sorted(len(x.operations) for x in launches)


def test_the_plan_of_groups_is_verified_and_the_same_when_read():
    plan = planned(GROUPED)
    verify_plan(plan)
    text = dump_plan(plan)
    assert load_plan(text, "plan.json") == plan
    assert '{"pattern":"linear0.*","rate":3.0}' in text
    assert 'adamw, no_decay=norm_and_bias, group("linear0.*", rate=3)' in heading(plan)


def test_parameters_with_equal_settings_are_updated_together():
    assert updates(planned("")) == [7]
    assert updates(planned(GROUPED)) == [1, 1, 1, 1, 3]


def test_the_plan_of_clipped_gradients_has_a_launch_that_sees_all():
    plan = planned("clip_norm = 1.0 clip_value = 0.5")
    verify_plan(plan)
    assert load_plan(dump_plan(plan), "plan.json") == plan
    (guard,) = (x for x in plan.train.launches if x.operations == ("guard",))
    assert isinstance(guard.work, Kernel) and guard.work.name == "guard_clip_norm"
    gradients = {op.inputs[1] for op in plan.graph.train if op.kind == "adamw_update"}
    assert gradients <= {plan.buffers[access.buffer].value for access in guard.accesses}
    assert "adamw, clip_norm=1, clip_value=0.5" in heading(plan)


def test_moving_averages_are_states_of_the_plan_updated_in_one_launch():
    plan = planned('ema = 0.9999 frozen = "conv0.*"')
    verify_plan(plan)
    assert load_plan(dump_plan(plan), "plan.json") == plan
    averages = averages_of(plan.graph)
    assert len(averages) == 6 and "conv0.weight" not in averages
    (launch,) = (x for x in plan.train.launches if f"{next(iter(averages.values()))}.update" in x.operations)
    assert len(launch.operations) == 6 and isinstance(launch.work, Kernel) and launch.work.name == "multi_tensor_ema"
    without = planned('frozen = "conv0.*"')
    more = sum(-(-plan.graph.values[name].type.size_bytes // 256) * 256 for name in averages.values())
    assert plan.predictions.arena_bytes == without.predictions.arena_bytes + more
    assert "adamw, " in heading(plan) and "ema=0.9999" in heading(plan)


def test_averages_of_ranks_are_verified():
    plan = planned("ema = 0.9999", gpus=2)
    verify_plan(plan)
    verify_rank(plan)


def test_frozen_parameters_stay_in_the_plan_and_are_written_by_nothing():
    plan = planned('frozen = ("conv0.*", "conv1.*")')
    verify_plan(plan)
    assert load_plan(dump_plan(plan), "plan.json") == plan
    assert updates(plan) == [4]
    frozen = {i for i, b in enumerate(plan.buffers) if b.value in ("conv0.weight", "conv1.weight", "conv1.bias")}
    assert frozen <= set(plan.train.entry) & set(plan.train.exit)
    written = {a.buffer for x in plan.train.launches for a in x.accesses if a.mode is not Mode.READ}
    assert written.isdisjoint(frozen)
    assert plan.predictions.arena_bytes < planned("").predictions.arena_bytes


def test_ranks_sum_the_gradients_that_are_clipped_and_no_others():
    plan = planned('frozen = ("conv0.*", "conv1.*") clip_norm = 1.0', gpus=2)
    verify_plan(plan)
    verify_rank(plan)
    (guard,) = (op for op in plan.graph.train if op.kind == "guard")
    sums = {op.outputs[0] for op in plan.graph.train if op.kind == "all_reduce"}
    assert len(guard.inputs) == 2 + 4 and set(guard.inputs[1:]) == sums - set(plan.graph.metrics)


def test_unset_fields_are_not_written():
    text = dump_plan(planned(""))
    assert not any(word in text for word in ('"rate"', '"pattern"', '"no_decay"', '"clip_', '"frozen"', '"ema"'))
