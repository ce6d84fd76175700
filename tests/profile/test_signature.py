"""Requests as text: read back equal, whatever the operation."""

from __future__ import annotations

import pytest

from mbc.hardware.spec import find_spec
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Request
from mbc.kernels.providers import PROVIDERS
from mbc.ops.base import NoAttributes
from mbc.ops.batch_normalize import BatchNormalizeBackward
from mbc.ops.matrix import Linear
from mbc.optimize.candidates.table import CandidateTable
from mbc.optimize.fusion.fused_remat_match import all_fused_remats
from mbc.optimize.fusion.select_groups import Fusion
from mbc.plan.model import Rows
from mbc.profile.model import Extent, Measurement
from mbc.profile.signature import described, read_signature, rows_of, shelf_of, shelf_of_signature, signature, with_rows
from tests.graphs import training_graph
from tests.profile.profiles import profile, request

NETWORK = """
network n(batch = 6, channels = 6) {
  input x[batch, 3, 12, 12] : float
  input target[batch] : class
  a = x |> conv(channels, 3, pad=(1, 0, 1, 2), stride=2) |> bn |> relu |> lrn(3) |> dropout(0.25)
  b = x |> conv_transpose(channels, 3, pad=1) |> maxpool(2) |> leaky_relu(0.1)
  c = (a |> avgpool(2), b |> avgpool(2)) |> concat |> upsample(2)
  logits = c |> global_avgpool |> linear(6)
  output logits
  loss (logits, target) |> softmax_cross_entropy(smoothing=0.1)
}
train { optimizer = adamw(weight_decay=0.01)  precision = bf16 }
"""


def test_every_request_of_a_network_is_read_back():
    graph = training_graph(NETWORK)
    table = CandidateTable(graph, find_spec("h200"), ())
    asked = {table.request(o, Rows(0, 6)) for o in (*graph.train, *graph.infer)}
    assert len({r.kind for r in asked}) > 20
    for one in asked:
        assert read_signature(signature(one)) == one


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"kind":"frobnicate"}', signature(request()).replace("fp32[8", "fp9[8")]
)
def test_texts_that_describe_no_operation(text):
    with pytest.raises(ValueError):
        read_signature(text)


@pytest.mark.parametrize("kind", ["convolution", "convolution_backward_data", "convolution_backward_filter"])
def test_slices_are_one_family(kind):
    assert with_rows(request(16, kind), 8) == request(8, kind)
    assert with_rows(request(16, kind), 0) == with_rows(request(3, kind), 0)
    assert with_rows(request(16, kind), 0) != with_rows(request(16, kind, channels=8), 0)


@pytest.mark.parametrize("kind", ["convolution", "convolution_backward_data", "convolution_backward_filter"])
def test_a_filter_with_as_many_channels_as_there_are_rows_keeps_them(kind):
    assert with_rows(request(4, kind, channels=4), 2) == request(2, kind, channels=4)


def test_vectors_belong_to_channels():
    image, bias = TensorType((4, 4), DType.FP32), TensorType((4,), DType.FP32)
    add = Request("bias_add", NoAttributes(), (image, bias), (image,), Precision.FP32)
    assert with_rows(add, 2).inputs == (TensorType((2, 4), DType.FP32), bias)


def test_sums_over_rows_keep_their_shape():
    x, dy, dw = TensorType((4, 4), DType.FP32), TensorType((4, 4), DType.FP32), TensorType((4, 4), DType.FP32)
    gradient = Request("linear_backward_filter", Linear((4,)), (x, dy), (dw,), Precision.FP32)
    assert with_rows(gradient, 2).outputs == (dw,)
    assert {t.shape for t in with_rows(gradient, 2).inputs} == {(2, 4)}


def test_requests_without_rows_are_separate_families():
    filter_ = TensorType((4, 4, 3, 3), DType.FP32)
    update = Request("sgd", NoAttributes(), (filter_, filter_), (filter_,), Precision.FP32)
    assert with_rows(update, 2) is update


def at(batch: int, channels: int) -> dict[tuple[str, tuple[str, ...]], Request]:
    """Return the requests with rows of a step on this mini-batch, those of fused launches included."""
    graph = training_graph(NETWORK, ("batch", str(batch)), ("channels", str(channels)))
    table = CandidateTable(graph, find_spec("h200"), PROVIDERS)
    fused = (launch for group in Fusion.of(table).possible[0] for launch in group.launches)
    return {
        (o.name, o.outputs): table.request(o, table.whole)
        for o in (*graph.train, *fused, *(remat.operation for remat in all_fused_remats(table)))
        if any(name in graph.values and graph.values[name].per_sample for name in (*o.inputs, *o.outputs))
        and "cross_entropy" not in o.kind  # class numbers are vectors
    }


@pytest.mark.parametrize("channels", [6, 16])
def test_a_mini_batch_is_of_the_family_of_another_one(channels: int):
    """In one case there are as many channels as rows."""
    few, many = at(6, channels), at(16, channels)
    assert few.keys() == many.keys() and len(few) > 40
    assert any("batch_statistics" in r.kind for r in few.values())
    for key, one in few.items():
        assert with_rows(one, 16) == many[key], one.kind
        assert with_rows(many[key], 6) == one, one.kind
        family = with_rows(one, 0)
        assert family == with_rows(many[key], 0), one.kind
        assert {shelf_of(family)} == {shelf_of_signature(signature(r)) for r in (one, many[key], family)}


def test_rows_and_description():
    assert rows_of(request(5)) == 5
    assert rows_of(Request("x", NoAttributes(), (TensorType((), DType.FP32),), (), Precision.FP32)) == 1
    assert described(request(5)) == "convolution fp32 [5, 4, 8, 8] 3x3"


def test_requests_of_one_family_with_as_many_rows_hide_nothing_of_each_other():
    """A part of a mini-batch and a whole one have different gradients at equal rows. One of both failed."""
    image, vector = TensorType((4, 2, 2, 2), DType.FP32), TensorType((2,), DType.FP32)
    part, whole = (
        Request(
            "batch_normalize_backward",
            BatchNormalizeBackward(1e-5, count),
            (image, image, *[vector] * 5),
            (image,),
            Precision.FP32,
        )
        for count in (64, 16)
    )
    assert with_rows(part, 0) == with_rows(whole, 0)
    candidates = [c for p in PROVIDERS for c in p.candidates(whole, find_spec("h200"))]
    assert candidates
    measured = profile(
        {
            whole: [
                Measurement(c.provider, c.name, c.settings, c.layouts, 0, 5.0, 0.1, True, False, (), 0.0)
                for c in candidates
            ]
        },
        {whole: Extent(1 << 40), part: Extent(0, "could not be measured: it failed")},
    )
    assert len(measured.candidates(whole)) == len(candidates)
