"""Two GPUs of one machine as two machines: predicted beside measured collectives through the network.

`NCCL_P2P_DISABLE` and `NCCL_SHM_DISABLE` forbid NCCL to copy between the GPUs directly or through shared host memory.
NCCL then sends everything through TCP sockets, as it does between machines without a faster network. The script
measures collectives twice: first with the sizes and numbers of thread blocks of `mbc profile --gpu all`, then with
sizes and numbers between those. `measured_us` is the second time. `predicted_us` is what mbc interpolates from the
first times, and `by_rate_us` what it predicts from the rate of one connection alone, as for `--node-link RATE`.

    python benchmarks/two_machines.py

Needs two GPUs and some 2 minutes. Asked is an error of at most 15 % for all-reduces of 1 MiB and more. Writes
`results/two_machines.json`.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from modules import median
from record import need_gpu, show, start, write

from mbc.hardware.collective_times import CollectiveKind, CollectiveModel, CollectiveTime, Link
from mbc.measure.collective_fleet import measure_collectives
from mbc.measure.collective_timing import KIB, MIB, SIZES_BYTES
from mbc.units import show_size

# NCCL: no peer access, no shared memory of the host, no InfiniBand, and sockets of the machine itself.
AS_TWO_MACHINES = {
    "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
FIRST_CTAS, SECOND_CTAS = (2, 8), (4, 8)
SECOND_SIZES = tuple(size * unit for unit, size in ((KIB, 64), (KIB, 512), (MIB, 2), (MIB, 8), (MIB, 32), (MIB, 128)))
LEAST_BYTES, MOST_ERROR = MIB, 0.15
SENT_BYTES, CHUNK_BYTES = 1 << 30, 4 << 20
COLUMNS = ("name", "predicted_us", "measured_us", "error", "by_rate_us", "by_rate_error", "passed")


def connection_gbit(sent_bytes: int = SENT_BYTES) -> float:
    """Return the rate of one TCP connection of the machine with itself, in Gb/s."""
    chunk = bytes(CHUNK_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as connection:
                for _ in range(sent_bytes // CHUNK_BYTES):
                    connection.sendall(chunk)

        sender = threading.Thread(target=send)
        sender.start()
        received, buffer = 0, bytearray(CHUNK_BYTES)
        with server.accept()[0] as connection:
            began_s = time.perf_counter()
            while count := connection.recv_into(buffer):
                received += count
            taken_s = time.perf_counter() - began_s
        sender.join()
    return received * 8 / taken_s / 1e9


def rows_of(
    first: Sequence[CollectiveTime], second: Sequence[CollectiveTime], network_gbit: float
) -> list[dict[str, Any]]:
    """Return the row of each collective of the second run.

    Args:
        first: Times of the first run.
        second: Times of the second run.
        network_gbit: Rate of one connection.
    """
    here = CollectiveModel(Link.NVLINK, first)
    by_times, by_rate = here.across_nodes(1), here.across_nodes(1, network_gbit)
    rows: list[dict[str, Any]] = []
    for t in second:
        costs = (model.cost(t.kind, t.size_bytes, t.ranks, t.max_ctas) for model in (by_times, by_rate))
        predicted_us, rate_us = (cost.time_us for cost in costs)
        row: dict[str, Any] = {
            "name": f"{t.kind} of {show_size(t.size_bytes)}, {t.max_ctas} thread blocks",
            "predicted_us": predicted_us, "measured_us": t.time_us, "error": abs(predicted_us / t.time_us - 1),
            "by_rate_us": rate_us, "by_rate_error": abs(rate_us / t.time_us - 1),
        }  # fmt: skip
        if t.kind is CollectiveKind.ALL_REDUCE and t.size_bytes >= LEAST_BYTES:
            row["passed"] = row["error"] <= MOST_ERROR
        rows.append(row)
    return rows


def measure(gpus: Sequence[str], tell: Callable[[str], None]) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """Return the times of the first and of the second run."""
    with tempfile.TemporaryDirectory() as folder:
        runs = ((FIRST_CTAS, SIZES_BYTES), (SECOND_CTAS, SECOND_SIZES))
        times = [
            measure_collectives(gpus, Path(folder) / f"{max_ctas}.sqlite", tell, max_ctas=max_ctas, sizes_bytes=sizes)
            for max_ctas, sizes in runs
        ]
    first, second = (list(measured.times) for measured in times)
    return first, second


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0,1", help="two GPUs, as CUDA_VISIBLE_DEVICES names them")
    arguments = parser.parse_args()
    gpus = arguments.gpus.split(",")
    if len(gpus) != 2:
        parser.error("--gpus takes two GPUs, such as 0,1")
    need_gpu("nothing of it can be told without")
    os.environ.update(AS_TWO_MACHINES)
    network_gbit = connection_gbit()
    rows = rows_of(*measure(gpus, print), network_gbit)
    show(rows, COLUMNS)
    tested = [row for row in rows if "passed" in row]
    figures = {"connection_gbit": network_gbit, "median_error": median(row["error"] for row in tested)}
    passed = sum(row["passed"] for row in tested)
    print(f"one connection: {network_gbit:.1f} Gb/s; {passed} of {len(tested)} all-reduces within {MOST_ERROR:.0%}")
    print(write("two_machines", rows, **figures, passed=passed, of=len(tested)).name)


if __name__ == "__main__":
    start(main)
