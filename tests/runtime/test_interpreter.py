"""The interpreter against a plain evaluation of the graph, and all faults of plans that it can find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.hardware.streams import Space, Stream
from mbc.ir.types import DType, Layout
from mbc.ops import KINDS
from mbc.ops.base import Call
from mbc.plan.model import Access, Buffer, Copy, Kernel, Launch, Mode, Plan, Program, Rows
from mbc.runtime.bindings import find_places
from mbc.runtime.cpu import Interpreter
from mbc.runtime.formats import canonical_dtype, loaded, stored_bytes
from mbc.runtime.launch_order import Transfers, execution_order
from mbc.runtime.module import Module
from tests.runtime.nets import batch, small_plan


def evaluated(plan: Plan, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return every value of the training graph, computed operation by operation; of the plan only types are used."""
    graph = plan.graph
    values = dict(given)
    for operation in graph.train:
        kind = KINDS[operation.kind]
        types = tuple(graph.values[name].type for name in operation.outputs)
        if kind.view:
            results = (values[operation.inputs[0]].reshape(types[0].shape),)
        else:
            assert kind.evaluate is not None
            call = Call(types, 0, graph.batch, graph.precision)
            results = kind.evaluate(operation.attributes, [values[name] for name in operation.inputs], call)
        for name, result in zip(operation.outputs, results, strict=True):
            dtype = graph.values[name].type.dtype
            data = stored_bytes(result, dtype, Layout.CHANNELS_FIRST)
            values[name] = loaded(data, result.shape, dtype, Layout.CHANNELS_FIRST)
    return values


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "fp64"])
@pytest.mark.parametrize("micro_batch", [0, 2])
def test_a_step_computes_its_graph(precision: str, micro_batch: int):
    plan = small_plan(precision, micro_batch)
    net = Module(plan, seed=3, device="cpu")
    places = find_places(plan)
    image, target = batch()
    given = {name: net.state(name) for name in net.states}
    given["image"] = image.astype(canonical_dtype(plan.graph.values["image"].type.dtype))
    given["target"] = target.astype(np.int32)
    machine = net._machine
    control = machine.read(places.control).copy()
    control[0:8].view("<u8")[0], control[16:24].view("<f8")[0], control[24:28].view("<u4")[0] = 1, 0.05, 1
    given[places.control.value] = control
    values = evaluated(plan, given)

    loss = float(net.step(image, target, lr=0.05))

    exact: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-6} if micro_batch and precision != "fp64" else {"rtol": 1e-6, "atol": 1e-7}
    )
    if precision in ("bf16", "fp16") and micro_batch:
        exact = {"rtol": 2e-2, "atol": 1e-3}  # BLAS adds in another order for other sizes: a last bit of 8 or 11
    np.testing.assert_allclose(loss, values[plan.graph.loss][0], **exact)
    for state, after in plan.graph.updates:
        if state in net.states:
            np.testing.assert_allclose(net.state(state), values[after], err_msg=state, **exact)
    assert net.correct == values[plan.graph.metrics[0]][0] == net.metrics["accuracy"] * 6


def test_the_arena_is_of_the_planned_size():
    plan = small_plan()
    assert Interpreter(plan).arena.nbytes == plan.predictions.arena_bytes
    assert Interpreter(plan).arena.ctypes.data % 256 == 0


@pytest.mark.parametrize("transfers", list(Transfers))
def test_steps_are_repeatable_bit_for_bit(transfers: Transfers):
    def trained() -> np.ndarray:
        net = Module(small_plan(), device="cpu", transfers=transfers)
        for seed in range(3):
            net.step(*batch(seed), lr=0.1)
        return net.state("first.weight")

    np.testing.assert_array_equal(trained(), trained())


# ---------------------------------------------------------------------------------------------- wrong plans


def launch_of(plan: Plan, kind: str) -> int:
    kinds = {operation.name: operation.kind for operation in plan.graph.train}
    return next(
        i for i, launch in enumerate(plan.train.launches) if launch.operations and kinds[launch.operations[0]] == kind
    )


def with_launch(plan: Plan, index: int, change: Callable[[Launch], Launch]) -> Plan:
    launches = list(plan.train.launches)
    launches[index] = change(launches[index])
    return replace(plan, train=replace(plan.train, launches=tuple(launches)))


def moved(plan: Plan, buffer: int, offset: int) -> Plan:
    offsets = list(plan.offsets)
    offsets[buffer] = offset
    return replace(plan, offsets=tuple(offsets))


def failure(plan: Plan, **settings: Any) -> MbcError:
    """Return the error of one step of a plan."""
    with pytest.raises(MbcError) as caught:
        Module(plan, device="cpu", **settings).step(*batch(), lr=0.1)
    return caught.value


def test_buffers_that_overlap_are_caught():
    plan = small_plan()
    places = find_places(plan)
    weight = places.states["first.weight"]
    # The result of the first convolution now overlaps the weights.
    written = plan.train.launches[launch_of(plan, "convolution")].accesses[2].buffer
    error = failure(moved(plan, written, weight.offset_bytes))
    assert error.code in ("MBC141", "MBC144")


def test_reading_another_buffers_bytes_names_both():
    plan = small_plan()
    # A value that nothing takes over, small enough to cover nothing else, of a launch that reads no control block.
    aliased = {buffer.alias for buffer in plan.buffers}
    control = find_places(plan).control.buffer
    available_bytes = plan.buffers[control].size_bytes
    output = next(
        access.buffer
        for launch in plan.train.launches
        if control not in (access.buffer for access in launch.accesses)
        for access in launch.accesses
        if access.mode is Mode.WRITE and plan.buffers[access.buffer].value is not None
        if access.buffer not in aliased and plan.buffers[access.buffer].alias is None
        if plan.buffers[access.buffer].size_bytes <= available_bytes
    )
    error = failure(moved(plan, output, find_places(plan).control.offset_bytes))
    assert error.code == "MBC141"
    assert "('control', rows [0, 1))" in error.message
    rows = plan.buffers[output].rows
    whole = f"('{plan.buffers[output].value}', rows [{rows.start}, {rows.stop}))"
    assert f"belong to buffer {output} {whole}" in error.message


def without_a_write(plan: Plan) -> Plan:
    """Return the plan without a launch that writes a value into bytes that no other buffer uses."""
    taken = [(plan.offsets[b], plan.offsets[b] + buffer.size_bytes, b) for b, buffer in enumerate(plan.buffers)]

    def alone(buffer: int) -> bool:
        """Return whether no other buffer ever shares the buffer's memory."""
        start, stop, _ = taken[buffer]
        return all(low >= stop or high <= start for low, high, other in taken if other != buffer)

    index = next(
        i for i, launch in enumerate(plan.train.launches)
        if any(a.mode is Mode.WRITE and plan.buffers[a.buffer].value is not None and alone(a.buffer)
               for a in launch.accesses)
    )  # fmt: skip
    launches = plan.train.launches[:index] + plan.train.launches[index + 1 :]
    return replace(plan, train=replace(plan.train, launches=launches, waits=()))


def test_a_missing_write_is_caught():
    error = failure(without_a_write(small_plan()))
    assert error.code == "MBC142"
    assert "were never written" in error.message and "launch" in error.message


def test_a_slice_that_was_not_written_is_caught():
    plan = small_plan("fp32", 2)
    index = launch_of(plan, "convolution")
    cut = replace(plan.train, launches=plan.train.launches[:index] + plan.train.launches[index + 1 :], waits=())
    assert failure(replace(plan, train=cut)).code == "MBC142"


def test_rows_outside_of_a_buffer_are_caught():
    def change(launch: Launch) -> Launch:
        first = replace(launch.accesses[0], rows=Rows(0, 7))
        return replace(launch, accesses=(first, *launch.accesses[1:]))

    error = failure(with_launch(small_plan(), launch_of(small_plan(), "convolution"), change))
    assert error.code == "MBC143"
    assert "rows [0, 7) are not in buffer" in error.message


def test_an_output_over_its_own_input_is_caught():
    plan = small_plan()
    launch = plan.train.launches[launch_of(plan, "convolution")]
    error = failure(moved(plan, launch.accesses[2].buffer, plan.offsets[launch.accesses[0].buffer]))
    assert error.code == "MBC144"
    assert "over its own operand" in error.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda launch: replace(launch, accesses=launch.accesses[:2]), "2 accesses for 3 operands"),
        (lambda launch: replace(launch, operations=()), "must run operations of the graph"),
        (lambda launch: replace(launch, operations=("nobody",)), "must run operations of the graph"),
        (
            lambda launch: replace(launch, accesses=(launch.accesses[1], launch.accesses[0], *launch.accesses[2:])),
            "operand 'image' is in buffer",
        ),
        (
            lambda launch: replace(
                launch, accesses=(replace(launch.accesses[0], mode=Mode.WRITE), *launch.accesses[1:])
            ),
            "accessed by 'write'",
        ),
        (
            lambda launch: replace(
                launch, accesses=(replace(launch.accesses[0], rows=Rows(0, 3)), *launch.accesses[1:])
            ),
            "different rows",
        ),
        (lambda launch: replace(launch, work=Copy(1.0, False)), "it must read one buffer and write one"),
    ],
)
def test_launches_that_make_no_sense_are_named(change: Callable[[Launch], Launch], message: str):
    plan = small_plan()
    index = launch_of(plan, "convolution")
    error = failure(with_launch(plan, index, change))
    assert error.code == "MBC145"
    assert message in error.message
    assert f"launch {index} of train" in error.message
    assert error.remedy == "this is a mistake of the compiler: report it with the plan file"


def test_states_that_a_program_destroys_are_caught():
    plan = small_plan()
    # The last launch of inference also writes over a parameter that nothing reads afterwards.
    output = plan.infer.launches[-1].accesses[-1].buffer
    if plan.buffers[output].value is None:
        output = plan.infer.launches[-1].accesses[-2].buffer
    wrong = moved(plan, output, find_places(plan).states["first.weight"].offset_bytes)
    with pytest.raises(MbcError) as caught:
        Module(wrong, device="cpu").forward(batch()[0])
    assert caught.value.code == "MBC141"
    assert "first.weight" in caught.value.message


def test_without_a_shadow_nothing_is_watched():
    net = Module(without_a_write(small_plan()), device="cpu", shadow=False)
    assert net.step(*batch(), lr=0.1) is not None


# ------------------------------------------------------------------------------------- copies and conversions


def offloaded_plan() -> Plan:
    """Return a plan that offloads one activation after its first use and prefetches it for its last use."""
    plan = small_plan(serial=True)
    assert not plan.train.waits
    launches = list(plan.train.launches)
    source = launches[launch_of(plan, "convolution")].accesses[2].buffer
    uses = [
        i
        for i, launch in enumerate(launches)
        if any(a.buffer == source and a.mode is Mode.READ for a in launch.accesses)
    ]
    written, used = launch_of(plan, "convolution"), uses[-1]
    buffer = plan.buffers[source]
    host = len(plan.buffers)
    arena_end = -(-plan.predictions.arena_bytes // 256) * 256
    buffers = (*plan.buffers, replace(buffer, space=Space.HOST, alias=None), replace(buffer, alias=None))
    offsets = (*plan.offsets, 0, arena_end)
    rows = buffer.rows
    out = Launch(Copy(1.0, False), (), Stream.TO_HOST,
                 (Access(source, rows, Mode.READ), Access(host, rows, Mode.WRITE)))  # fmt: skip
    back = Launch(Copy(1.0, False), (), Stream.TO_DEVICE,
                  (Access(host, rows, Mode.READ), Access(host + 1, rows, Mode.WRITE)))  # fmt: skip
    reader = launches[used]
    launches[used] = replace(
        reader, accesses=tuple(replace(a, buffer=host + 1) if a.buffer == source else a for a in reader.accesses)
    )
    launches[used:used] = [back]
    launches[written + 1 : written + 1] = [out]
    # The launch after the copy may reuse its bytes, so it waits too.
    waits = ((written, written + 1), (written + 1, written + 2), (written + 1, used + 1), (used + 1, used + 2))
    predictions = replace(plan.predictions, arena_bytes=arena_end + buffer.size_bytes, host_bytes=buffer.size_bytes)
    program = Program(tuple(launches), waits, plan.train.entry, plan.train.exit)
    return replace(plan, buffers=buffers, offsets=offsets, train=program, predictions=predictions)


@pytest.mark.parametrize("transfers", list(Transfers))
def test_copies_through_the_host_change_nothing(transfers: Transfers):
    nets = [Module(small_plan(), device="cpu"), Module(offloaded_plan(), device="cpu", transfers=transfers)]
    for net in nets:
        net.step(*batch(), lr=0.1)
    for name in nets[0].states:
        np.testing.assert_array_equal(nets[0].state(name), nets[1].state(name))


@pytest.mark.parametrize(("transfers", "dropped"), [(Transfers.EARLY, 0), (Transfers.LATE, 3)])
def test_a_missing_wait_is_found_by_early_and_late_copies(transfers: Transfers, dropped: int):
    plan = offloaded_plan()
    waits = tuple(wait for i, wait in enumerate(plan.train.waits) if i != dropped)
    error = failure(replace(plan, train=replace(plan.train, waits=waits)), transfers=transfers)
    assert error.code in ("MBC141", "MBC142")


def test_orders_respect_streams_and_waits():
    program = offloaded_plan().train
    for transfers in Transfers:
        order = execution_order(program, transfers)
        assert sorted(order) == list(range(len(program.launches)))
        place = {index: position for position, index in enumerate(order)}
        assert all(place[earlier] < place[later] for earlier, later in program.waits)
        for stream in Stream:
            of_stream = [i for i in order if program.launches[i].stream is stream]
            assert of_stream == sorted(of_stream)


def converted(plan: Plan, dtype: DType) -> Plan:
    """Return `plan` with two conversions, through which the first convolution's output is read in channels last."""
    launches = list(plan.train.launches)
    index = launch_of(plan, "convolution")
    source = launches[index].accesses[2].buffer
    buffer = plan.buffers[source]
    end = -(-plan.predictions.arena_bytes // 256) * 256
    other = Layout.CHANNELS_LAST if buffer.layout is Layout.CHANNELS_FIRST else Layout.CHANNELS_FIRST
    size_bytes = buffer.size_bytes // buffer.dtype.size_bytes * dtype.size_bytes
    new = Buffer(buffer.value, buffer.rows, other, dtype, size_bytes)
    convert = Kernel("mbc", "convert", (), 1.0, False)
    number = len(plan.buffers)

    def conversion(read: int, written: int) -> Launch:
        accesses = (Access(read, buffer.rows, Mode.READ), Access(written, buffer.rows, Mode.WRITE))
        return Launch(convert, (), Stream.COMPUTE, accesses)

    launches[index + 1 : index + 1] = [conversion(source, number), conversion(number, source)]
    return replace(
        plan,
        buffers=(*plan.buffers, new),
        offsets=(*plan.offsets, end),
        train=replace(plan.train, launches=tuple(launches), waits=()),
        predictions=replace(plan.predictions, arena_bytes=end + size_bytes),
    )


def test_conversions_carry_the_value():
    plain, exact, rounded = (
        Module(plan, device="cpu")
        for plan in (small_plan(), converted(small_plan(), DType.FP32), converted(small_plan(), DType.BF16))
    )
    losses = [float(net.step(*batch(), lr=0.1)) for net in (plain, exact, rounded)]
    assert losses[0] == losses[1]
    assert losses[2] != losses[0] and losses[2] == pytest.approx(losses[0], rel=0.02)
