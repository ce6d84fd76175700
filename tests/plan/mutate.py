"""Small random changes to plans, as a bug in a search would make them."""

from __future__ import annotations

import random
from dataclasses import replace

from mbc.hardware.streams import Space
from mbc.ir.types import DType, Layout
from mbc.kernels.cuda import KERNELS
from mbc.plan.model import Access, Kernel, Mode, Plan, Program, Rows
from tests.plan.chains import STREAMS, with_figures


def mutate(plan: Plan, kind: str, seed: int) -> Plan:
    """Return the plan with one change of the given kind.

    Figures are made consistent, so that only its meaning is wrong.
    """
    rng = random.Random(seed)
    if kind in _PLAN_BY_NAME:
        changed = _PLAN_BY_NAME[kind](plan, rng)
    else:
        changed = _in_program(plan, rng, _PROGRAM_BY_NAME[kind])
    try:
        return with_figures(changed)
    except RecursionError:  # aliases in a circle
        return changed


def _in_program(plan: Plan, rng: random.Random, change) -> Plan:
    title = "train" if rng.random() < 0.8 else "infer"
    return replace(plan, **{title: change(plan, getattr(plan, title), rng)})


def shift_offset(plan: Plan, rng: random.Random) -> Plan:
    index = rng.randrange(len(plan.buffers))
    by = rng.choice([-1024, -512, -256, 256, 512, 1024, rng.randrange(1, 255)])
    offsets = list(plan.offsets)
    offsets[index] = max(0, offsets[index] + by)
    return replace(plan, offsets=tuple(offsets))


def swap_offsets(plan: Plan, rng: random.Random) -> Plan:
    offsets = list(plan.offsets)
    i, j = rng.randrange(len(offsets)), rng.randrange(len(offsets))
    offsets[i], offsets[j] = offsets[j], offsets[i]
    return replace(plan, offsets=tuple(offsets))


def drop_alias(plan: Plan, rng: random.Random) -> Plan:
    buffers = list(plan.buffers)
    i = rng.choice([i for i, b in enumerate(buffers) if b.alias is not None])
    buffers[i] = replace(buffers[i], alias=None)
    return replace(plan, buffers=tuple(buffers))


def change_size(plan: Plan, rng: random.Random) -> Plan:
    buffers = list(plan.buffers)
    i = rng.choice([i for i, b in enumerate(buffers) if b.value is not None])
    factor = rng.choice([2, 3])
    buffers[i] = replace(buffers[i], size_bytes=buffers[i].size_bytes * factor)
    return replace(plan, buffers=tuple(buffers))


def change_value(plan: Plan, rng: random.Random) -> Plan:
    buffers = list(plan.buffers)
    i = rng.randrange(len(buffers))
    buffers[i] = replace(buffers[i], value=rng.choice(buffers).value)
    return replace(plan, buffers=tuple(buffers))


def share_bytes(plan: Plan, rng: random.Random) -> Plan:
    """Place a buffer on another one of its space, as if the lifetime of that one had ended sooner."""
    i = rng.randrange(len(plan.buffers))
    j = rng.choice([j for j, b in enumerate(plan.buffers) if b.space is plan.buffers[i].space])
    offsets = list(plan.offsets)
    offsets[i] = offsets[j]
    return replace(plan, offsets=tuple(offsets))


def change_space(plan: Plan, rng: random.Random) -> Plan:
    buffers = list(plan.buffers)
    i = rng.randrange(len(buffers))
    buffers[i] = replace(buffers[i], space=Space.HOST if buffers[i].space is Space.ARENA else Space.ARENA)
    return replace(plan, buffers=tuple(buffers))


def change_layout(plan: Plan, rng: random.Random) -> Plan:
    """Change the layout of a buffer, but not of its writers and readers."""
    buffers = list(plan.buffers)
    i = rng.choice([i for i, b in enumerate(buffers) if b.value is not None])
    flipped = {Layout.CHANNELS_FIRST: Layout.CHANNELS_LAST, Layout.CHANNELS_LAST: Layout.CHANNELS_FIRST}
    buffers[i] = replace(buffers[i], layout=flipped[buffers[i].layout])
    return replace(plan, buffers=tuple(buffers))


def change_dtype(plan: Plan, rng: random.Random) -> Plan:
    """Change a buffer's type, and its size accordingly."""
    buffers = list(plan.buffers)
    i = rng.choice([i for i, b in enumerate(buffers) if b.value is not None])
    old = buffers[i]
    dtype = rng.choice([dtype for dtype in DType if dtype is not old.dtype])
    size_bytes = old.size_bytes // old.dtype.size_bytes * dtype.size_bytes
    buffers[i] = replace(old, dtype=dtype, size_bytes=size_bytes)
    return replace(plan, buffers=tuple(buffers))


def cut_workspace(plan: Plan, rng: random.Random) -> Plan:
    """Cut a workspace by a quarter or more."""
    buffers = list(plan.buffers)
    workspaces = [i for i, b in enumerate(buffers) if b.value is None]
    if workspaces:
        i = rng.choice(workspaces)
        size_bytes = max(1, int(buffers[i].size_bytes * rng.choice([0.75, 0.5, 0.1])))
        buffers[i] = replace(buffers[i], size_bytes=size_bytes)
    return replace(plan, buffers=tuple(buffers))


def drop_wait(plan: Plan, program: Program, rng: random.Random) -> Program:
    waits = list(program.waits)
    if waits:
        waits.pop(rng.randrange(len(waits)))
    return replace(program, waits=tuple(waits))


def move_wait(plan: Plan, program: Program, rng: random.Random) -> Program:
    waits = list(program.waits)
    if waits:
        i = rng.randrange(len(waits))
        waits[i] = (max(0, waits[i][0] - rng.randrange(3)), waits[i][1])
    return replace(program, waits=tuple(waits))


def swap_launches(plan: Plan, program: Program, rng: random.Random) -> Program:
    launches = list(program.launches)
    i = rng.randrange(len(launches) - 1)
    j = i + 1 if rng.random() < 0.7 else rng.randrange(len(launches))
    launches[i], launches[j] = launches[j], launches[i]
    return replace(program, launches=tuple(launches))


def move_launch(plan: Plan, program: Program, rng: random.Random) -> Program:
    """Move a launch to another place, with those of its waits that still point backwards."""
    order = list(range(len(program.launches)))
    order.insert(rng.randrange(len(order)), order.pop(_any_launch(program, rng)))
    at = {old: new for new, old in enumerate(order)}
    waits = sorted((at[a], at[b]) for a, b in program.waits if at[a] < at[b])
    return replace(program, launches=tuple(program.launches[i] for i in order), waits=tuple(waits))


def change_stream(plan: Plan, program: Program, rng: random.Random) -> Program:
    launches = list(program.launches)
    i = _any_launch(program, rng)
    launches[i] = replace(launches[i], stream=rng.choice(STREAMS))
    return replace(program, launches=tuple(launches))


def drop_launch(plan: Plan, program: Program, rng: random.Random) -> Program:
    gone = _any_launch(program, rng)
    launches = [launch for i, launch in enumerate(program.launches) if i != gone]
    waits = [tuple(i - (i > gone) for i in wait) for wait in program.waits if gone not in wait]
    return replace(program, launches=tuple(launches), waits=tuple(waits))


def duplicate_launch(plan: Plan, program: Program, rng: random.Random) -> Program:
    twice = _any_launch(program, rng)
    launches = list(program.launches)
    launches.insert(twice + 1, launches[twice])
    waits = [tuple(i + (i > twice) for i in wait) for wait in program.waits]
    waits += [(a, twice + 1) for a, b in program.waits if b == twice]
    return replace(program, launches=tuple(launches), waits=tuple(waits))


def _any_launch(program: Program, rng: random.Random) -> int:
    """Draw a launch; copies and conversions, of which there are few, are drawn as often as kernels."""
    moves = [i for i, launch in enumerate(program.launches) if not launch.operations]
    return rng.choice(moves) if moves and rng.random() < 0.5 else rng.randrange(len(program.launches))


def _change_access(program: Program, rng: random.Random, change) -> Program:
    launches = list(program.launches)
    i = _any_launch(program, rng)
    accesses = list(launches[i].accesses)
    j = rng.randrange(len(accesses))
    accesses[j] = change(accesses[j])
    launches[i] = replace(launches[i], accesses=tuple(accesses))
    return replace(program, launches=tuple(launches))


def change_rows(plan: Plan, program: Program, rng: random.Random) -> Program:
    def change(access: Access) -> Access:
        start = max(0, access.rows.start + rng.choice([-1, 0, 0, 1]))
        return replace(access, rows=Rows(start, max(start + 1, access.rows.stop + rng.choice([-1, 0, 1]))))

    return _change_access(program, rng, change)


def change_rows_of_launch(plan: Plan, program: Program, rng: random.Random) -> Program:
    """Let all per-sample operands of one launch have other rows."""
    launches = list(program.launches)
    i = _any_launch(program, rng)
    low, high = rng.choice([-1, 0]), rng.choice([-1, 0, 1])

    def change(access: Access) -> Access:
        value = plan.buffers[access.buffer].value
        if value is None or not plan.graph.values[value].per_sample:
            return access
        start = max(0, access.rows.start + low)
        return replace(access, rows=Rows(start, min(plan.graph.batch, max(start + 1, access.rows.stop + high))))

    launches[i] = replace(launches[i], accesses=tuple(change(a) for a in launches[i].accesses))
    return replace(program, launches=tuple(launches))


def change_buffer(plan: Plan, program: Program, rng: random.Random) -> Program:
    return _change_access(program, rng, lambda a: replace(a, buffer=rng.randrange(len(plan.buffers))))


def change_to_twin(plan: Plan, program: Program, rng: random.Random) -> Program:
    """Replace a buffer of one access by another buffer of its value, if there is one."""

    def change(access: Access) -> Access:
        value = plan.buffers[access.buffer].value
        return replace(access, buffer=rng.choice([i for i, b in enumerate(plan.buffers) if b.value == value]))

    return _change_access(program, rng, change)


def change_mode(plan: Plan, program: Program, rng: random.Random) -> Program:
    return _change_access(program, rng, lambda a: replace(a, mode=rng.choice(list(Mode))))


def drop_access(plan: Plan, program: Program, rng: random.Random) -> Program:
    launches = list(program.launches)
    i = _any_launch(program, rng)
    j = rng.randrange(len(launches[i].accesses))
    launches[i] = replace(launches[i], accesses=tuple(a for k, a in enumerate(launches[i].accesses) if k != j))
    return replace(program, launches=tuple(launches))


def change_operation(plan: Plan, program: Program, rng: random.Random) -> Program:
    launches = list(program.launches)
    i, j = rng.randrange(len(launches)), rng.randrange(len(launches))
    if isinstance(launches[i].work, Kernel):
        launches[i] = replace(launches[i], operations=launches[j].operations)
    return replace(program, launches=tuple(launches))


def permute_members(plan: Plan, program: Program, rng: random.Random) -> Program:
    """Permute the operations of a fused launch."""
    fused = [i for i, launch in enumerate(program.launches) if len(launch.operations) > 1]
    if not fused:
        return program
    launches, i = list(program.launches), rng.choice(fused)
    members = list(launches[i].operations)
    rng.shuffle(members)
    launches[i] = replace(launches[i], operations=tuple(members))
    return replace(program, launches=tuple(launches))


def change_members(plan: Plan, program: Program, rng: random.Random) -> Program:
    """Let a launch run one operation more or less."""
    launches, i = list(program.launches), _any_launch(program, rng)
    members = list(launches[i].operations)
    if members and rng.random() < 0.5:
        members.pop(rng.randrange(len(members)))
    else:
        members.insert(rng.randrange(len(members) + 1), rng.choice([o.name for o in plan.graph.train]))
    launches[i] = replace(launches[i], operations=tuple(members))
    return replace(program, launches=tuple(launches))


def swap_accesses(plan: Plan, program: Program, rng: random.Random) -> Program:
    launches, i = list(program.launches), _any_launch(program, rng)
    accesses = list(launches[i].accesses)
    j, k = rng.randrange(len(accesses)), rng.randrange(len(accesses))
    accesses[j], accesses[k] = accesses[k], accesses[j]
    launches[i] = replace(launches[i], accesses=tuple(accesses))
    return replace(program, launches=tuple(launches))


def drop_workspace(plan: Plan, program: Program, rng: random.Random) -> Program:
    having = [
        i
        for i, launch in enumerate(program.launches)
        if launch.accesses and plan.buffers[launch.accesses[-1].buffer].value is None
    ]
    if not having:
        return program
    launches, i = list(program.launches), rng.choice(having)
    launches[i] = replace(launches[i], accesses=launches[i].accesses[:-1])
    return replace(program, launches=tuple(launches))


def _change_kernel(program: Program, rng: random.Random, change) -> Program:
    kernels = [i for i, launch in enumerate(program.launches) if isinstance(launch.work, Kernel)]
    launches, i = list(program.launches), rng.choice(kernels)
    launches[i] = replace(launches[i], work=change(launches[i].work))
    return replace(program, launches=tuple(launches))


def change_kernel(plan: Plan, program: Program, rng: random.Random) -> Program:
    """Replace a kernel by that of another launch, by another kernel of mbc, or by one that does not exist."""

    def change(work: Kernel) -> Kernel:
        name, provider = rng.choice([*KERNELS, "no_such_kernel"]), rng.choice(["mbc", "cudnn", "nobody"])
        others = [launch.work for launch in program.launches if isinstance(launch.work, Kernel)]
        return rng.choice([replace(work, name=name), replace(work, provider=provider), rng.choice(others)])

    return _change_kernel(program, rng, change)


def change_settings(plan: Plan, program: Program, rng: random.Random) -> Program:
    def change(work: Kernel) -> Kernel:
        settings = list(work.settings)
        way = rng.randrange(3)
        if way and settings:
            i = rng.randrange(len(settings))
            key, value = settings.pop(i)
            if way == 1:
                settings.insert(i, (key, value + rng.choice([-7, -1, 1, 7])))
        else:
            settings.append(rng.choice([("layout", 1), ("version", 2), ("speed", 1), ("knob7", 1)]))
        return replace(work, settings=tuple(settings))

    return _change_kernel(program, rng, change)


def drop_entry(plan: Plan, program: Program, rng: random.Random) -> Program:
    entry = list(program.entry)
    entry.pop(rng.randrange(len(entry)))
    return replace(program, entry=tuple(entry))


def drop_exit(plan: Plan, program: Program, rng: random.Random) -> Program:
    ends = list(program.exit)
    ends.pop(rng.randrange(len(ends)))
    return replace(program, exit=tuple(ends))


def change_exit(plan: Plan, program: Program, rng: random.Random) -> Program:
    ends = list(program.exit)
    ends[rng.randrange(len(ends))] = rng.randrange(len(plan.buffers))
    return replace(program, exit=tuple(ends))


_PLAN = (
    shift_offset, swap_offsets, share_bytes, drop_alias, change_size, change_value, change_space, change_layout,
    change_dtype, cut_workspace,
)  # fmt: skip
_PROGRAM = (
    drop_wait, move_wait, swap_launches, move_launch, change_stream, drop_launch, duplicate_launch, change_rows,
    change_rows_of_launch, change_buffer, change_to_twin, change_mode, drop_access, change_operation, permute_members,
    change_members, swap_accesses, drop_workspace, change_kernel, change_settings, drop_entry, drop_exit, change_exit,
)  # fmt: skip
_PLAN_BY_NAME = {change.__name__: change for change in _PLAN}
_PROGRAM_BY_NAME = {change.__name__: change for change in _PROGRAM}
KINDS_OF_MUTATIONS = (*_PLAN_BY_NAME, *_PROGRAM_BY_NAME)
# Plans of one operation a launch, whose kernels need no workspace, have nothing to lose by these.
OF_FUSED_OR_WORKSPACE = frozenset({"permute_members", "cut_workspace", "drop_workspace"})
