"""The numbers of rows that a profile has measured: those of most of its operations."""

from __future__ import annotations

from dataclasses import replace

from mbc.compiler import compile_plan
from mbc.ops.fused import kind_of
from mbc.optimize.candidates.measured_rows import measured_rows
from mbc.optimize.candidates.table import request_of
from mbc.options import Options
from mbc.plan.model import Rows
from mbc.source import Source
from tests.profile.profiles import measurement, profile

NETWORK = """network n {
  input x[8, 4, 8, 8] : float
  input y[8] : class
  a = x |> conv(4, 3, pad=1) @first |> relu |> conv(4, 1) @second |> global_avgpool |> linear(2) @head
  output a
  loss (a, y) |> softmax_cross_entropy
}
train { optimizer = sgd }
"""


def test_rows_with_most_measurements() -> None:
    graph = compile_plan(Source("n.mbc", NETWORK), Options(gpu="h200")).graph
    whole = Rows(0, graph.batch)
    first, second = (request_of(graph, op, whole) for op in graph.train if kind_of(op).name == "convolution")

    def of_rows(request, rows):
        inputs = (request.inputs[0].with_rows(rows), *request.inputs[1:])
        return replace(request, inputs=inputs, outputs=(request.outputs[0].with_rows(rows),))

    requests = (of_rows(first, 4), of_rows(second, 4), of_rows(first, 16))
    measured = profile({request: [measurement(1, 5.0)] for request in requests})
    assert measured_rows(graph, measured) == {4}
    assert measured_rows(graph, profile({})) == measured_rows(graph, None) == frozenset()
