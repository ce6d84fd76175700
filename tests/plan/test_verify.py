"""The verifier accepts valid plans and refuses invalid ones with a message about the fault."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbc.errors import MbcError
from mbc.hardware.streams import Space, Stream
from mbc.ir.types import DType, Layout
from mbc.plan.kernels import KNOWN_PROVIDERS, KernelCheck, not_measured
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Plan, Rows
from mbc.plan.verify import verify_plan
from tests.effort import examples
from tests.optimize.planned import kept_plan
from tests.plan.campaign import plan_of_kind, verified
from tests.plan.chains import chain_graph, needed_waits, random_plan, with_figures
from tests.plan.mutate import KINDS_OF_MUTATIONS, mutate
from tests.plan.naive import is_right

ONE_STREAM = (Stream.COMPUTE,)


@functools.cache
def valid(seed: int) -> Plan:
    return random_plan(seed)


@functools.cache
def plain(seed: int = 7) -> Plan:
    """Return a plan on one stream, without waits."""
    return random_plan(seed, ONE_STREAM, layers=2)


def refusal(plan: Plan) -> MbcError:
    with pytest.raises(MbcError) as caught:
        verify_plan(plan)
    return caught.value


def refused(plan: Plan, code: str, *words: str) -> None:
    error = refusal(plan)
    assert error.code == code, error
    for word in words:
        assert word in error.message


def buffer_of(plan: Plan, value: str) -> int:
    return next(i for i, b in enumerate(plan.buffers) if b.value == value)


def launch_of(plan: Plan, operation: str) -> int:
    return next(i for i, launch in enumerate(plan.train.launches) if operation in launch.operations)


def with_buffer(plan: Plan, index: int, offset: int | None = None, **changes) -> Plan:
    buffers, offsets = list(plan.buffers), list(plan.offsets)
    buffers[index] = replace(buffers[index], **changes)
    if offset is not None:
        offsets[index] = offset
    return replace(plan, buffers=tuple(buffers), offsets=tuple(offsets))


def with_train(plan: Plan, **changes) -> Plan:
    return replace(plan, train=replace(plan.train, **changes))


def with_launch(plan: Plan, index: int, **changes) -> Plan:
    launches = list(plan.train.launches)
    launches[index] = replace(launches[index], **changes)
    return with_train(plan, launches=tuple(launches))


# What is right


@pytest.mark.parametrize("seed", range(40))
def test_valid_plans_are_accepted(seed):
    plan = valid(seed)
    verified = verify_plan(plan)
    assert verified.live_bytes == plan.bounds.live_bytes
    assert verified.train_launches == len(plan.train.launches)
    assert max(sum(kinds.values()) for kinds in verified.peak_bytes.values()) == verified.live_bytes


@pytest.mark.parametrize("seed", range(8))
def test_the_naive_simulator_agrees_that_they_are_right(seed):
    assert is_right(valid(seed))


# Mutations: what the verifier accepts, the naive simulator must find right in every schedule


@pytest.mark.parametrize("kind", KINDS_OF_MUTATIONS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(4, 24))
def test_no_mutation_that_changes_the_meaning_passes(kind, seed):
    mutant = mutate(valid(seed % 30), kind, seed)
    try:
        verify_plan(mutant)
    except MbcError:
        return
    assert is_right(mutant, seed)


@pytest.mark.parametrize("kind", ["drop_wait", "drop_launch", "change_exit", "drop_exit", "drop_entry", "change_size"])
@pytest.mark.parametrize("seed", range(10))
def test_mutations_that_always_change_the_meaning_are_always_refused(kind, seed):
    plan = valid(seed)
    mutant = mutate(plan, kind, seed)
    if mutant != plan:
        refusal(mutant)


def test_two_launches_of_one_stream_may_swap_when_the_simulator_says_so():
    """Not every change is refused: independent launches may swap."""
    passed = 0
    for plan in (random_plan(seed, ONE_STREAM) for seed in range(6)):
        for i in range(len(plan.train.launches) - 1):
            launches = list(plan.train.launches)
            launches[i], launches[i + 1] = launches[i + 1], launches[i]
            swapped = with_figures(with_train(plan, launches=tuple(launches)))
            try:
                verify_plan(swapped)
            except MbcError:
                continue
            assert is_right(swapped)
            passed += 1
    assert passed > 6


# One test a message


@pytest.mark.parametrize(
    ("value", "changes", "code", "said"),
    [
        ("y0", {"size_bytes": 4}, "MBC120", ("'y0'", "4 bytes", "need")),
        ("y0", {"layout": Layout.CHANNELS_LAST}, "MBC120", ("is always in nchw",)),
        ("y0", {"rows": Rows(0, 99)}, "MBC120", ("rows 0..99",)),
        ("y0", {"value": "nobody"}, "MBC120", ("no such value",)),
        ("image", {"value": "flat"}, "MBC120", ("view",)),
        ("l0.weight.next", {"alias": None}, "MBC128", ("next version of 'l0.weight'",)),
    ],
)
def test_a_buffer_of_another_kind(value, changes, code, said):
    plan = plain()
    refused(with_buffer(plan, buffer_of(plan, value), **changes), code, *said)


@pytest.mark.parametrize(
    ("value", "bytes_further", "code", "said"),
    [
        ("y0", 8, "MBC121", "multiple of 256"),
        ("loss", 1 << 40, "MBC121", "outside the arena"),
        ("l0.weight.next", 256, "MBC128", "differs in place"),
    ],
)
def test_a_buffer_elsewhere(value, bytes_further, code, said):
    plan = plain()
    index = buffer_of(plan, value)
    refused(with_buffer(plan, index, plan.offsets[index] + bytes_further), code, said)


def test_narrow_type():
    plan = plain()
    index = buffer_of(plan, "y0")
    refused(
        with_buffer(plan, index, dtype=DType.BF16, size_bytes=plan.buffers[index].size_bytes // 2),
        "MBC120",
        "bf16 cannot hold fp32",
    )


@pytest.mark.parametrize(
    ("end", "value", "code", "said"),
    [
        ("entry", "image", "MBC122", "no buffer holds 'image'"),
        ("exit", "correct", "MBC129", "no buffer of the arena holds the result 'correct'"),
        ("exit", "l0.weight.next", "MBC129", "'l0.weight.next' is not at the end where"),
    ],
)
def test_an_entry_or_exit_without_a_value(end, value, code, said):
    plan = plain()
    rest = tuple(i for i in getattr(plan.train, end) if plan.buffers[i].value != value)
    refused(with_train(plan, **{end: rest}), code, said)


def test_entry_of_an_intermediate():
    plan = plain()
    changed = with_train(plan, entry=(*plan.train.entry, buffer_of(plan, "loss")))
    refused(changed, "MBC122", "'loss'", "before the start")


def test_states_that_overlap():
    plan = plain()
    one, two = buffer_of(plan, "l0.weight"), buffer_of(plan, "l1.weight")
    moved = list(plan.offsets)
    for i, buffer in enumerate(plan.buffers):
        if i == two or buffer.alias == two:
            moved[i] = plan.offsets[one]
    refused(replace(plan, offsets=tuple(moved)), "MBC122", "share bytes at the entry")


def test_states_of_the_two_programs():
    plan = plain()
    index = buffer_of(plan, "l0.weight")
    buffers = (*plan.buffers, plan.buffers[index])
    entry = tuple(len(plan.buffers) if i == index else i for i in plan.infer.entry)
    changed = replace(
        plan, buffers=buffers, offsets=(*plan.offsets, plan.offsets[index]), infer=replace(plan.infer, entry=entry)
    )
    refused(changed, "MBC122", "'l0.weight'", "infer")


@pytest.mark.parametrize(("operation", "said"), [("nothing", "no operation 'nothing'"), ("flat", "is a view")])
def test_an_operation_that_no_launch_runs(operation, said):
    refused(with_launch(plain(), 0, operations=(operation,)), "MBC123", "launch 0 of train", said)


def test_wrong_operand():
    plan = plain()
    index = launch_of(plan, "l0")
    accesses = list(plan.train.launches[index].accesses)
    accesses[1] = replace(accesses[1], buffer=buffer_of(plan, "l1.weight"))
    refused(with_launch(plan, index, accesses=tuple(accesses)), "MBC123", "needs 'l0.weight'", "'l1.weight'")


def test_missing_operand():
    plan = plain()
    index = launch_of(plan, "l0")
    accesses = plan.train.launches[index].accesses
    refused(with_launch(plan, index, accesses=accesses[1:]), "MBC123", "accesses", "2 inputs and 1 outputs")


@pytest.mark.parametrize(
    ("operand", "changes", "said"),
    [
        (0, {"rows": Rows(0, 99)}, "rows 0..99 are not in"),
        (0, {"mode": Mode.WRITE}, "only read"),
        (2, {"mode": Mode.ACCUMULATE}, "'accumulate'"),
    ],
)
def test_another_access(operand, changes, said):
    plan = plain()
    index = launch_of(plan, "l0")
    accesses = list(plan.train.launches[index].accesses)
    accesses[operand] = replace(accesses[operand], **changes)
    refused(with_launch(plan, index, accesses=tuple(accesses)), "MBC123", said)


def test_division_of_indivisible_values():
    plan = plain()
    index = launch_of(plan, "ce")
    accesses = tuple(
        replace(a, rows=Rows(0, 1)) if plan.graph.values[plan.buffers[a.buffer].value or "loss"].per_sample else a
        for a in plan.train.launches[index].accesses
    )
    refused(with_launch(plan, index, accesses=accesses), "MBC123", "cannot be divided")


def test_unwritten_bytes():
    plan = plain()
    index = launch_of(plan, "l0")
    launches = plan.train.launches
    first = with_figures(with_train(plan, launches=(*launches[index + 1 :], *launches[: index + 1])))
    refused(first, "MBC124", "is needed, but")


def test_overwritten_bytes():
    """Two values with overlapping lifetimes at one address."""
    plan = plain()
    hidden, other = buffer_of(plan, "r0"), buffer_of(plan, "loss")
    moved = with_figures(with_buffer(plan, other, plan.offsets[hidden]))
    refused(moved, "MBC124", "'r0'", "its bytes hold", "'loss'")


def test_missing_wait():
    plan = next(p for p in map(valid, range(30)) if p.train.waits)
    refused(with_train(plan, waits=plan.train.waits[1:]), "MBC125", "does not wait for")


def divided(plan: Plan) -> tuple[list[int], str]:
    """Launches of a filter gradient in two parts."""
    for op in ("l0.filter", "l1.filter", "l2.filter"):
        launches = [i for i, launch in enumerate(plan.train.launches) if op in launch.operations]
        if len(launches) > 1:
            return launches, op
    return [], ""


def plan_with_divided_filter() -> tuple[Plan, list[int], str]:
    for seed in range(50):
        plan = random_plan(seed, ONE_STREAM, layers=3)
        launches, op = divided(plan)
        if launches:
            return plan, launches, op
    raise AssertionError("no seed gives a divided filter gradient")


def test_sum_that_misses_rows():
    plan, divided, _ = plan_with_divided_filter()
    launches = [launch for i, launch in enumerate(plan.train.launches) if i != divided[1]]
    missing = with_figures(with_train(plan, launches=tuple(launches)))
    refused(missing, "MBC126", "its sum holds rows")


def test_sum_that_has_rows_twice():
    plan, divided, _ = plan_with_divided_filter()
    launches = list(plan.train.launches)
    launches.insert(divided[1], launches[divided[1]])
    twice = with_figures(with_train(plan, launches=tuple(launches)))
    refused(twice, "MBC126", "are in the sum", "already")


def test_sum_that_is_overwritten():
    """Check a mistake of micro-cuDNN: with beta = 0 for every slice, only the last one remains."""
    plan, halves, op = plan_with_divided_filter()
    accesses = tuple(
        replace(a, mode=Mode.WRITE) if a.mode is Mode.ACCUMULATE else a for a in plan.train.launches[halves[1]].accesses
    )
    refused(with_launch(plan, halves[1], accesses=accesses), "MBC127", op, "second time")


def test_operation_that_misses_rows():
    def last(plan: Plan) -> list[int]:
        name = plan.graph.infer[-1].name
        return [i for i, x in enumerate(plan.infer.launches) if x.operations[:1] == (name,)]

    plan = next(p for p in (random_plan(seed, ONE_STREAM) for seed in range(50)) if len(last(p)) > 1)
    launches = tuple(launch for i, launch in enumerate(plan.infer.launches) if i != last(plan)[1])
    refused(
        with_figures(replace(plan, infer=replace(plan.infer, launches=launches))),
        "MBC127",
        f"'{plan.graph.infer[-1].name}' runs for rows",
    )


def test_state_updated_twice():
    """The second update writes a buffer of its own, so that only the number of updates is wrong."""
    plan = plain()
    index = launch_of(plan, "l0.weight.update")
    old = plan.train.launches[index]
    twin = len(plan.buffers)
    new = buffer_of(plan, "l0.weight.next")
    buffers = (*plan.buffers, plan.buffers[new])
    offsets = (*plan.offsets, plan.offsets[new])
    again = replace(old, accesses=tuple(replace(a, buffer=twin) if a.buffer == new else a for a in old.accesses))
    launches = (*plan.train.launches[: index + 1], again, *plan.train.launches[index + 1 :])
    changed = with_figures(
        replace(plan, buffers=buffers, offsets=offsets, train=replace(plan.train, launches=launches))
    )
    assert refusal(changed).code in ("MBC124", "MBC127")


def test_alias_where_the_kind_has_none():
    plans = (random_plan(s, ONE_STREAM, widths=[6, 6, 6]) for s in range(50))
    plan, (y, x) = next((p, pair) for p in plans if (pair := fits_in_place(p)))
    refused(with_figures(with_buffer(plan, y, plan.offsets[x], alias=x)), "MBC128", "may not write", "in place")


def fits_in_place(plan: Plan) -> tuple[int, int] | None:
    """Return (output, input) of a linear layer whose buffers have equal sizes."""
    for op in plan.graph.train:
        if op.kind == "linear_backward_data":
            y, x = buffer_of(plan, op.outputs[0]), buffer_of(plan, op.inputs[0])
            a, b = plan.buffers[y], plan.buffers[x]
            uses = [z.buffer for launch in plan.train.launches for z in launch.accesses]
            if a.size_bytes == b.size_bytes and a.alias is None and x in uses and y > x:
                return y, x
    return None


def test_alias_of_a_later_buffer():
    plan = plain()
    refused(with_buffer(plan, buffer_of(plan, "y0"), alias=len(plan.buffers) - 1), "MBC128", "not an earlier buffer")


def test_exit_of_something_gone():
    plan = plain()
    changed = with_train(plan, exit=(*plan.train.exit, buffer_of(plan, "l0.weight")))
    refused(with_figures(changed), "MBC129", "at the end of train")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        *(({"waits": (wait,)}, "MBC130", "is not before it") for wait in ((3, 3), (5, 2), (0, 10_000))),
        ({"waits": ((0, 1),)}, "MBC130", "its own stream"),
        ({"exit": (10_000,)}, "MBC123", "there is no buffer 10000"),
    ],
)
def test_impossible_waits_and_references(changes, code, said):
    refused(with_train(plain(), **changes), code, said)


def test_predicted_arena():
    plan = plain()
    predictions = replace(plan.predictions, arena_bytes=plan.predictions.arena_bytes + 256)
    refused(replace(plan, predictions=predictions), "MBC131", "buffers end at")


def test_budget():
    refused(replace(plain(), budget_bytes=400_000_100), "MBC131", "the budget is 400000100")


def test_live_bytes():
    plan = plain()
    changed = replace(plan, bounds=replace(plan.bounds, live_bytes=1))
    refused(changed, "MBC131", "its peak live bytes are 1, but they are ")


def test_output_over_input():
    plan = next(p for p in (random_plan(s, ONE_STREAM) for s in range(50)) if launch_of(p, "ce") >= 0)
    ce = plan.train.launches[launch_of(plan, "ce")]
    read, written = ce.accesses[0].buffer, ce.accesses[2].buffer
    refused(with_figures(with_buffer(plan, written, plan.offsets[read])), "MBC132", "over its input")


def test_outputs_that_overlap():
    plan = plain()
    ce = plan.train.launches[launch_of(plan, "ce")]
    one, two = ce.accesses[2].buffer, ce.accesses[3].buffer
    refused(with_figures(with_buffer(plan, two, plan.offsets[one])), "MBC132", "two of its outputs")


def test_workspace_over_an_operand():
    plan = plain()
    index = launch_of(plan, "l0")
    launch = plan.train.launches[index]
    accesses = [a for a in launch.accesses if plan.buffers[a.buffer].value is not None]
    output = accesses[2].buffer
    scratch = Buffer(None, Rows(0, 1), Layout.CHANNELS_FIRST, DType.UINT8, 8)
    accesses.append(Access(len(plan.buffers), Rows(0, 1), Mode.WRITE))
    plan = replace(plan, buffers=(*plan.buffers, scratch), offsets=(*plan.offsets, plan.offsets[output]))
    refused(with_figures(with_launch(plan, index, accesses=tuple(accesses))), "MBC132", "workspace shares bytes")


def with_kernel(plan: Plan, operation: str, **changes) -> Plan:
    index = launch_of(plan, operation)
    return with_launch(plan, index, work=replace(plan.train.launches[index].work, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"provider": "nobody"}, "no provider of kernels called 'nobody'"),
        ({"name": "no_such_kernel"}, "mbc has no kernel called 'no_such_kernel'"),
        ({"name": "max_pool"}, "'mbc/max_pool' cannot run it: it runs max_pool, not linear"),
        ({"settings": (("version", 9),)}, "its settings are"),
        ({"provider": "cudnn"}, "cuDNN cannot run linear"),
        ({"provider": "cudnn_legacy"}, "cuDNN's legacy API cannot run linear"),
        ({"provider": "cublaslt"}, "no algorithm with the settings {}"),
        ({"provider": "interpreter", "name": "add"}, "the interpreter runs linear only as 'linear'"),
    ],
)
def test_a_kernel_that_does_not_run_its_operation(changes, said):
    refused(with_kernel(plain(), "l0", **changes), "MBC133", "launch", "(l0)", said)


def test_a_kernel_in_a_layout_that_it_does_not_take():
    plan = kept_plan("residual")
    index = next(i for i, b in enumerate(plan.buffers) if b.value == "x0" or (b.value and "relu" in b.value))
    flipped = Layout.CHANNELS_LAST if plan.buffers[index].layout is Layout.CHANNELS_FIRST else Layout.CHANNELS_FIRST
    changed = with_figures(with_buffer(plan, index, layout=flipped))
    assert refusal(changed).code in ("MBC133", "MBC128")


def test_a_kernel_with_too_little_workspace():
    plan = next(p for p in map(valid, range(30)) if any(x.operations == ("l0.filter",) for x in p.train.launches))
    index = launch_of(plan, "l0.filter")
    launch = plan.train.launches[index]
    kernel = Kernel("cublaslt", "linear_backward_filter", (("algorithm", 0), ("split_k", 16)), 1.0, False)
    operands = tuple(a for a in launch.accesses if plan.buffers[a.buffer].value is not None)
    refused(
        with_launch(plan, index, work=kernel, accesses=operands),
        "MBC134",
        "0 bytes of workspace",
        "its algorithm needs",
    )


def test_a_workspace_smaller_than_the_profile_measured():
    plan = plan_of_kind("measured")
    errors = []
    for seed in range(20):
        mutant = mutate(plan, "cut_workspace", seed)
        try:
            verify_plan(mutant)  # without a profile only the GPU can say
        except MbcError:
            continue  # less than mbc itself takes of it
        with pytest.raises(MbcError, match="it was measured with") as caught:
            verified("measured", mutant)
        errors.append(caught.value.code)
    assert set(errors) == {"MBC134"}
    assert not verified("measured", plan).unproved and verify_plan(plan).unproved


def test_operands_that_a_kernel_cannot_load():
    """Check a slice whose first row is not at a multiple of 16 bytes."""
    plan = plan_of_kind("measured")
    by_name = {op.name: op for op in plan.graph.train}
    aligned = [x for x in plan.train.launches if isinstance(x.work, Kernel) and x.work.provider == "cudnn"]
    shifted = replace(plan, offsets=tuple(offset + 8 for offset in plan.offsets))
    for launch in aligned:
        KernelCheck(plan, not_measured, KNOWN_PROVIDERS).check(launch, by_name, "here")
        with pytest.raises(MbcError, match="loads 16 bytes at once, but an operand begins at") as caught:
            KernelCheck(shifted, not_measured, KNOWN_PROVIDERS).check(launch, by_name, "here")
        assert caught.value.code == "MBC133"
    assert aligned


def test_members_of_a_group_in_an_order_that_cannot_be_executed():
    plan = plan_of_kind("fused")
    tried = 0
    for index, launch in enumerate(plan.train.launches):
        for order in itertools.islice(itertools.permutations(launch.operations), 1, 24):
            error = refusal(with_launch(plan, index, operations=order))
            assert error.code in ("MBC123", "MBC133"), error
            tried += error.code == "MBC123" and "which no earlier member of the group computes" in error.message
    assert tried > 10


def test_a_group_that_adds_to_one_of_its_sums_and_overwrites_the_other():
    plan = plan_of_kind("fused")
    kernels = {i: x.work.name for i, x in enumerate(plan.train.launches) if isinstance(x.work, Kernel)}
    index = next(i for i, name in kernels.items() if name.endswith("_bn_reduce"))
    launch = plan.train.launches[index]
    accesses = list(launch.accesses)
    at = max(i for i, a in enumerate(accesses) if a.mode is Mode.WRITE and plan.buffers[a.buffer].value is not None)
    accesses[at] = replace(accesses[at], mode=Mode.ACCUMULATE)
    changed = with_launch(plan, index, accesses=tuple(accesses))
    refused(changed, "MBC123", "adds to some of its sums and overwrites others")


# What later plans will do: recompute, other spaces, buffers of some rows


def rebuilt(plan: Plan, launches: list[Launch], buffers: list[Buffer], offsets: list[int], **train) -> Plan:
    changed = replace(
        plan,
        buffers=tuple(buffers),
        offsets=tuple(offsets),
        train=replace(plan.train, launches=tuple(launches), **train),
    )
    changed = replace(changed, train=replace(changed.train, waits=needed_waits(changed, changed.train)))
    return with_figures(changed)


def offloaded_and_prefetched(stream_out: Stream, stream_in: Stream) -> Plan:
    """Return a plan that offloads r0 after the forward pass and prefetches it for the backward pass."""
    plan = plain()
    buffers, offsets, launches = list(plan.buffers), list(plan.offsets), list(plan.train.launches)
    kept = buffer_of(plan, "r0")
    whole = replace(buffers[kept], alias=None)
    away, back = len(buffers), len(buffers) + 1
    buffers += [replace(whole, space=Space.HOST), whole]
    offsets += [0, plan.predictions.arena_bytes]
    backward = launch_of(plan, "relu0.backward")
    for i in range(backward, len(launches)):
        accesses = tuple(replace(a, buffer=back) if a.buffer == kept else a for a in launches[i].accesses)
        launches[i] = replace(launches[i], accesses=accesses)
    rows = whole.rows
    to_host = (Access(kept, rows, Mode.READ), Access(away, rows, Mode.WRITE))
    to_device = (Access(away, rows, Mode.READ), Access(back, rows, Mode.WRITE))
    launches.insert(backward, Launch(Copy(5.0, False), (), stream_in, to_device))
    launches.insert(backward - 1, Launch(Copy(5.0, False), (), stream_out, to_host))
    return rebuilt(plan, launches, buffers, offsets)


def test_offload():
    plan = offloaded_and_prefetched(Stream.TO_HOST, Stream.TO_DEVICE)
    assert plan.predictions.host_bytes > 0
    verify_plan(plan)
    assert is_right(plan)
    for i in range(len(plan.train.waits)):
        waits = tuple(wait for j, wait in enumerate(plan.train.waits) if j != i)
        refused(with_train(plan, waits=waits), "MBC125", "does not wait for")


def test_kernel_on_host_memory():
    plan = offloaded_and_prefetched(Stream.TO_HOST, Stream.TO_DEVICE)
    launches = [
        replace(x, work=Kernel("mbc", "convert", (), 1.0, False)) if isinstance(x.work, Copy) else x
        for x in plan.train.launches
    ]
    refused(with_train(plan, launches=tuple(launches)), "MBC123", "outside the arena")


def recomputed() -> Plan:
    """Return a plan that runs relu0 again, into another buffer, just before its backward pass."""

    def relu0(plan: Plan) -> list[Launch]:
        return [x for x in plan.train.launches if x.operations == ("relu0",)]

    plans = (random_plan(seed, ONE_STREAM, layers=2) for seed in range(100))
    plan = next(p for p in plans if p.buffers[buffer_of(p, "r0")].alias is None and len(relu0(p)) == 1)
    r0, (relu,) = buffer_of(plan, "r0"), relu0(plan)
    buffers, offsets, launches = list(plan.buffers), list(plan.offsets), list(plan.train.launches)
    again = len(buffers)
    # Everything gets room of its own, so that the input of relu0 is still there.
    buffers.append(buffers[r0])
    offsets = []
    end = 0
    for buffer in buffers:
        offsets.append(offsets[buffer.alias] if buffer.alias is not None else end)
        end += (buffer.size_bytes + 255) // 256 * 256
    backward = launch_of(plan, "relu0.backward")
    for i in range(backward, len(launches)):
        accesses = tuple(replace(a, buffer=again) if a.buffer == r0 else a for a in launches[i].accesses)
        launches[i] = replace(launches[i], accesses=accesses)
    launches.insert(
        backward,
        replace(relu, accesses=tuple(replace(a, buffer=again) if a.buffer == r0 else a for a in relu.accesses)),
    )
    return rebuilt(plan, launches, buffers, offsets)


def test_recompute():
    plan = recomputed()
    verify_plan(plan)
    assert is_right(plan)


def test_buffers_of_some_rows():
    """Half a batch at a time passes through buffers for half a batch."""
    plan = next(
        p
        for p in (random_plan(s, ONE_STREAM, layers=1) for s in range(100))
        if len([x for x in p.infer.launches if x.operations == ("i.l0",)]) == 2
        and [x.operations for x in p.infer.launches].count(("i.relu0",)) == 1
        and not [x for x in p.infer.launches if not x.operations]
        and not any(op.kind == "bias_add" for op in p.graph.infer)
        and p.buffers[buffer_of(p, "i.r0")].alias is None
    )
    y = buffer_of(plan, "i.y0")
    one, two = [x for x in plan.infer.launches if x.operations == ("i.l0",)]
    relu = next(x for x in plan.infer.launches if x.operations == ("i.relu0",))
    buffers, offsets, launches = list(plan.buffers), list(plan.offsets), []
    relu_accesses = [a for a in relu.accesses if plan.buffers[a.buffer].value is not None]
    row_bytes = buffers[y].size_bytes // buffers[y].rows.count
    for part in (one, two):
        rows = part.accesses[0].rows
        half = len(buffers)
        buffers.append(replace(buffers[y], rows=rows, size_bytes=row_bytes * rows.count))
        offsets.append(offsets[y])  # the second half takes the place of the first
        accesses = [a for a in part.accesses if plan.buffers[a.buffer].value is not None]
        accesses[2] = replace(accesses[2], buffer=half)
        launches.append(replace(part, accesses=tuple(accesses)))
        source, target = relu_accesses
        launches.append(replace(relu, accesses=(replace(source, buffer=half, rows=rows), replace(target, rows=rows))))
    changed = with_figures(
        replace(
            plan,
            buffers=tuple(buffers),
            offsets=tuple(offsets),
            infer=replace(plan.infer, launches=tuple(launches), waits=()),
        )
    )
    verify_plan(changed)
    assert is_right(changed)
    wrong = replace(changed, infer=replace(changed.infer, launches=tuple(launches[i] for i in (0, 2, 1, 3))))
    assert refusal(with_figures(wrong)).code == "MBC124"


def test_an_invalid_graph_is_refused_first():
    graph = chain_graph(3, [4])
    plan = replace(plain(), graph=replace(graph, train=graph.train[1:]))
    assert refusal(plan).code.startswith("MBC05")


def test_conversion_through_a_narrow_type():
    """A bf16 copy of an fp32 value has lost digits, so it must not replace the value."""
    plan = plain()
    index = launch_of(plan, "relu0")
    y = next(a.buffer for a in plan.train.launches[index].accesses if plan.buffers[a.buffer].value in ("y0", "b0"))
    narrow = replace(plan.buffers[y], dtype=DType.BF16, size_bytes=plan.buffers[y].size_bytes // 2, alias=None)
    changed = replace(plan, buffers=(*plan.buffers, narrow), offsets=(*plan.offsets, 0))
    refused(with_figures(changed), "MBC120", "bf16 cannot hold fp32")
