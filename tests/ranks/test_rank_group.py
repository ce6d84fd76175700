"""Groups of real processes: the messages that they exchange, and how they end together."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time

import pytest

from mbc.errors import OTHER_RANK_FAILED, MbcError
from mbc.ranks.agreement import check_distinct, check_same
from tests.ranks.processes import Ranks, all_end

PROMISE_S = 10.0  # in which all ranks end after the first failure
WAIT = "while True:\n    group.barrier()\n    time.sleep(0.01)"
HANG = "time.sleep(600)"  # like a call that cannot be interrupted


@pytest.mark.parametrize("size", [2, 4])
def test_gather_broadcast_and_barrier(ranks: Ranks, size: int) -> None:
    body = """
mine = bytes([group.rank]) * (1 + 100_000 * group.rank) + b"\\n\\0"
print([(one[0], len(one), one[-2:]) for one in group.gather(mine)])
print(group.broadcast(b"of 1" if group.rank == 1 else b"", root=1), group.broadcast(b"of 0"))
group.barrier()
group.agree({"version": "1", "plan": "abc"})
group.differ("GPU", str(group.rank))
"""
    processes = ranks.start(size, body)
    gathered = [(rank, 3 + 100_000 * rank, b"\n\0") for rank in range(size)]
    for process in processes:
        out, err = process.said()
        assert out == f"met\n{gathered}\nb'of 1' b'of 0'\n" and err == ""
        assert process.returncode == 0


def test_differences_are_refused_on_all_ranks(ranks: Ranks) -> None:
    body = (
        'group.agree({"driver": "580" if group.rank else "575", "plan": "p", "cuDNN": "9" if group.rank < 2 else ""})'
    )
    for process in ranks.start(3, body):
        assert (
            "error MBC263: the ranks differ in driver: 575 on rank 0; 580 on ranks 1, 2; in cuDNN: 9 on ranks 0, 1;"
            " nothing on rank 2\nhelp: " in process.said()[1]
        )
        assert process.returncode == 1


def test_common_and_own_parts_of_ranks() -> None:
    check_same([{"plan": "p"}, {"plan": "p"}])
    with pytest.raises(MbcError, match="MBC263: the ranks differ in plan: p on rank 0; nothing on rank 1"):
        check_same([{"plan": "p"}, {}])
    check_distinct("GPU", ["a", "b"])
    with pytest.raises(MbcError, match="MBC266: ranks 0, 2 have the same GPU, a"):
        check_distinct("GPU", ["a", "b", "a"])


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_waited_for(ranks: Ranks, slow: int) -> None:
    for process in ranks.start(2, f"time.sleep(3 if group.rank == {slow} else 0)\nprint(len(group.gather(b'')))"):
        assert process.said() == ("met\n2\n", "") and process.returncode == 0


@pytest.mark.parametrize(("size", "killed"), [(2, 0), (2, 1), (3, 2)])
def test_a_killed_rank_ends_all(ranks: Ranks, size: int, killed: int) -> None:
    processes = ranks.start(size, WAIT)
    for process in processes:
        process.met()
    time.sleep(random.random())
    processes[killed].kill()
    rest = [process for process in processes if process is not processes[killed]]
    all_end(rest, PROMISE_S)
    for process in rest:
        assert process.returncode == OTHER_RANK_FAILED
        words = f"error MBC264: rank {killed} of {size} failed: it ended without a message"
        assert words in process.said()[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", range(20))
def test_a_rank_killed_at_any_moment_ends_all(ranks: Ranks, moment: int) -> None:
    """The rank may also be killed before the meeting; then the other ranks give up when their time is over."""
    draws = random.Random(moment)
    size = draws.choice([2, 3, 4])
    processes = ranks.start(size, WAIT, MBC_MEETING_S="4")
    time.sleep(draws.uniform(0, 2))
    killed = processes.pop(draws.randrange(size))
    killed.kill()
    all_end(processes, PROMISE_S + 4)
    assert all(re.search("error MBC26[24]: ", process.said()[1]) for process in processes)


@pytest.mark.parametrize("killed", [0, 1])
def test_ranks_that_hang_are_ended(ranks: Ranks, killed: int) -> None:
    processes = ranks.start(3, HANG)
    for process in processes:
        process.met()
    processes[killed].send_signal(signal.SIGKILL)
    rest = [process for process in processes if process is not processes[killed]]
    all_end(rest, PROMISE_S)
    for process in rest:
        assert process.returncode == OTHER_RANK_FAILED
        assert f"is ended after 5 s: rank {killed} of 3 failed: it ended without a message" in process.said()[1]


def test_a_rank_that_writes_is_not_ended_by_the_failure_of_another_one(ranks: Ranks) -> None:
    """The writing rank gets time to end by itself afterwards, and is ended if it hangs."""
    body = """
group._grace_s = 0.5
group.barrier()
if group.rank == 1:
    raise ValueError("gone")
with group.writing():
    time.sleep(2)
    assert group.failure is not None
print("written", flush=True)
time.sleep(0.1)
print("unhurried", flush=True)
time.sleep(600)
"""
    processes = ranks.start(2, body)
    all_end(processes, PROMISE_S)
    out, err = processes[0].said()
    assert out == "met\nwritten\nunhurried\n" and "is ended after 0 s: rank 1 of 2 failed: ValueError: gone" in err
    assert processes[0].returncode == OTHER_RANK_FAILED


@pytest.mark.parametrize("asks", [0, 2])
def test_rank_0_is_asked_to_stop(ranks: Ranks, asks: int) -> None:
    """The request may come between other messages. After rank 0 has ended the training, all ranks end."""
    body = f"""
for number in range(1000000):
    if (group.rank, number) == ({asks}, 5):
        group.ask_to_stop()
        group.ask_to_stop()
    if group.rank == 0 and group.stop_asked:
        print("stops")
        raise KeyboardInterrupt
    assert group.gather(str(number).encode()) == (str(number).encode(),) * 3
    time.sleep(0.01)
"""
    processes = ranks.start(3, body)
    all_end(processes, PROMISE_S)
    assert processes[0].said()[0] == "met\nstops\n"
    for process in processes[1:]:
        assert "rank 0 of 3 failed: it was interrupted" in process.said()[1]
        assert process.returncode == OTHER_RANK_FAILED


def test_the_reason_of_the_first_failure_is_everybodys(ranks: Ranks) -> None:
    body = """
group.call_on_failure(lambda: print("aborted", flush=True))
if group.rank == 1:
    raise MemoryError("the GPU is full")
try:
    group.barrier()
finally:
    group.fail("only after rank 1")
"""
    processes = ranks.start(3, body)
    for rank, process in enumerate(processes):
        out, err = process.said()
        assert "aborted" in out and process.returncode == (1 if rank == 1 else OTHER_RANK_FAILED)
        assert rank == 1 or "rank 1 of 3 failed: MemoryError: the GPU is full" in err


def test_a_rank_that_returns_early_is_waited_for_until_the_end(ranks: Ranks) -> None:
    processes = ranks.start(2, "time.sleep(2 * group.rank)\nif group.rank:\n    raise ValueError('late')")
    assert "rank 1 of 2 failed: ValueError: late" in processes[0].said()[1]
    assert processes[0].returncode == OTHER_RANK_FAILED


@pytest.mark.parametrize("late", [0, 1])
def test_the_orderly_end_of_another_rank_is_no_failure(ranks: Ranks, late: int) -> None:
    """A rank that ends in order closes its connection; another rank that listens for a second longer must not fail."""
    body = f"""
stop = group._stop
def stop_late():
    time.sleep(1)
    print(group.failure)
    stop()
if group.rank == {late}:
    group._stop = stop_late
"""
    said = [process.said() for process in ranks.start(2, body)]
    assert said[late] == ("met\nNone\n", "") and said[1 - late] == ("met\n", "")


def test_ranks_at_different_places_of_the_program(ranks: Ranks) -> None:
    for process in ranks.start(2, "group.barrier() if group.rank else group.gather(b'')"):
        assert "failed: rank 1 is at barrier (1), but rank 0 is at gather (1)" in process.said()[1]


def test_a_forked_process_keeps_no_connection(ranks: Ranks) -> None:
    body = f"if group.rank == 1 and os.fork() == 0:\n    time.sleep(20)\n    os._exit(0)\n{WAIT}"
    processes = ranks.start(2, body)
    for process in processes:
        process.met()
    time.sleep(1)
    processes[1].kill()
    all_end(processes[:1], PROMISE_S)
    assert "rank 1 of 2 failed: it ended without a message" in processes[0].said()[1]


def test_missing_ranks_are_named(ranks: Ranks) -> None:
    more = {"MBC_JOB": f"missing {os.getpid()}", "MBC_MEETING_S": "2"}
    present = [ranks.start_one(rank, 4, "", **more) for rank in (0, 2)]
    for process in present:
        assert "error MBC262: ranks 1, 3 of 4 did not come to the meeting at " in process.said()[1]
        assert process.returncode == 1


def test_rank_0_is_missing(ranks: Ranks) -> None:
    alone = ranks.start_one(1, 2, "", MBC_JOB=f"alone {os.getpid()}", MBC_MEETING_S="1")
    out, err = alone.said()
    assert out == "" and "rank 0 of 2 did not come to the meeting at " in err and "within 1 s: No such file" in err


def test_several_machines_meet_at_an_address(ranks: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = ranks.start_one(1, 2, "print(group.gather(b'x'))", MBC_MASTER=f"127.0.0.1:{port}", MBC_JOB="tcp")
    with socket.create_server(("127.0.0.1", port)):  # some other program, which says nothing
        time.sleep(1)
    time.sleep(0.5)
    second = ranks.start_one(0, 2, "print(group.gather(b'y'))", MBC_MASTER=f"127.0.0.1:{port}", MBC_JOB="tcp")
    for process in (first, second):
        assert process.said() == ("met\n(b'y', b'x')\n", "")


def test_trainings_with_other_keys_do_not_meet(ranks: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MBC_MASTER": f"127.0.0.1:{port}", "MBC_MEETING_S": "3"}
    zero = ranks.start_one(0, 2, "", MBC_KEY="one", **common)
    other = ranks.start_one(1, 2, "", MBC_KEY="another", **common)
    assert "error MBC262: rank 1 of 2 did not come to the meeting" in zero.said()[1]
    assert "the process that listens there is not rank 0 of this training" in other.said()[1]


def test_ranks_that_count_otherwise(ranks: Ranks) -> None:
    more = {"MBC_JOB": f"count {os.getpid()}"}
    for process in (ranks.start_one(0, 2, "", **more), ranks.start_one(1, 3, "", **more)):
        assert "error MBC263: the ranks disagree on their number: rank 0 says 2, rank 1 3\n" in process.said()[1]


def test_two_processes_of_one_rank(ranks: Ranks) -> None:
    more = {"MBC_JOB": f"twice {os.getpid()}", "MBC_MEETING_S": "8"}
    processes = [ranks.start_one(rank, 3, "", **more) for rank in (0, 1, 1)]
    said = [process.said()[1] for process in processes]
    assert "rank 2 of 3 did not come" in said[0]
    assert sum("error MBC262: two processes say that they are rank 1" in one for one in said[1:]) == 1
