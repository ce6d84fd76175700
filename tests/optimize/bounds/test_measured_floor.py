from __future__ import annotations

from dataclasses import replace

import pytest

from mbc.ops import KINDS
from mbc.optimize.bounds.io_lower_bound import fewest_bytes
from mbc.optimize.bounds.measured_floor import BANDWIDTH_SHARE, graph_floor
from mbc.optimize.candidates.table import CandidateTable
from mbc.profile.model import Measurement
from tests.graphs import training_graph
from tests.profile.profiles import GPU, LAST, measurement, profile

SOURCE = """
network net(batch = 16) {
  input image[batch, 8, 16, 16] : float
  input target[batch] : class
  y = image |> conv(8, 3, pad=1) @a |> relu |> conv(8, 3, pad=1) @b |> global_avgpool |> linear(10) @head
  output y
  loss (y, target) |> softmax_cross_entropy
}
"""


def graph():
    return training_graph(SOURCE)


def test_the_fastest_measured_kernel_whatever_its_layout_and_workspace():
    net = graph()
    table = CandidateTable(net, GPU, ())
    requests = {op.name: table.request(op, table.whole) for op in net.train if KINDS[op.kind].flops is not None}
    assert set(requests) == {
        "a", "b", "head", "a.backward_filter", "b.backward_filter", "head.backward_filter", "b.backward_data",
        "head.backward_data",
    }  # fmt: skip
    times = {name: 100.0 + i for i, name in enumerate(requests)}

    def of_kind(measured: Measurement, kind: str) -> Measurement:
        if kind.startswith("linear"):
            return replace(measured, provider="mbc", name=kind, settings=())
        return replace(measured, name=kind)

    measurements = {
        request: (
            of_kind(measurement(1, 900.0), request.kind),
            of_kind(measurement(2, times[name], 1 << 30, LAST), request.kind),
        )
        for name, request in requests.items()
    }
    assert requests["a"] == requests["b"]  # one row of the profile serves both
    times["a"] = times["b"]
    times["a.backward_filter"] = times["b.backward_filter"] = max(
        times[n] for n in ("a.backward_filter", "b.backward_filter")
    )
    floor = graph_floor(net, GPU, profile(measurements))
    assert floor.products == 8 and floor.estimated == 0 == floor.estimated_us
    assert floor.products_us == pytest.approx(sum(times.values()))
    assert floor.other_bytes == fewest_bytes(net)
    assert floor.other_us == pytest.approx(floor.other_bytes / (BANDWIDTH_SHARE * GPU.copy_gb_s * 1e3))
    assert floor.total_us == floor.products_us + floor.other_us


def test_missing_measurements_are_reported():
    floor = graph_floor(graph(), GPU, None)
    assert floor.estimated == floor.products == 8
    assert floor.estimated_us == pytest.approx(floor.products_us) and floor.products_us > 0
