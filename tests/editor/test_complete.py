"""The completions that the editor offers at each place."""

from __future__ import annotations

import pytest

from mbc.editor.complete import complete
from mbc.frontend.sections import ENTRIES, OPTIMIZERS
from mbc.ir.types import Precision
from mbc.ops import LAYERS

HEAD = """\
block unit(c, s = 1) on x { return x }
network n(batch = 2) {
  input image[batch, 3] : float
  y = image
  """

# A text up to the place, completions that are offered there, and some that are not.
OFFERED = [
    ("", {"network", "block", "train", "memory"}, {"conv", "input"}),
    (HEAD + "}\n", {"network", "memory"}, {"conv", "y"}),
    (HEAD, {"input", "loss", "for", "y", "image"}, {"conv", "network"}),
    (HEAD + "y = y |> ", {"conv", "bn", "unit", "y", *LAYERS}, {"network", "input", "range"}),
    (HEAD + "y = y |> con", {"conv", "concat"}, {"input"}),
    (HEAD + "y = ", {"image", "y", "range", "parameter", "not", "batch"}, {"input", "memory"}),
    (HEAD + "y = y |> conv(", {"channels=", "kernel=", "pad=", "batch", "he", "init="}, {"input", "network"}),
    (HEAD + "y = y |> conv(8, pad=1, ", {"kernel=", "init="}, {"pad="}),
    (HEAD + "y = y |> conv(8, init=", {"he", "xavier"}, {"pad="}),
    (HEAD + "y = y |> conv(8, bias=", {"true", "false"}, {"pad="}),
    (HEAD + "y = y |> unit(", {"c=", "s=", "batch"}, {"input"}),
    (HEAD + "y = y.", {"shape"}, {"conv"}),
    (HEAD + "input t[batch] : ", {"float", "class", "uint8"}, {"conv"}),
    (HEAD + "# y |> ", set(), {"conv"}),
    ("train { ", {f"{name} = " for name in ENTRIES["train"]}, {"device = ", "conv"}),
    ("memory { ", {"device = ", "host = "}, {"precision = "}),
    ("train { optimizer = ", set(OPTIMIZERS), {"conv", "precision = "}),
    ("train { optimizer = sgd(", {"momentum=", "nesterov="}, {"conv", "beta1="}),
    ("train { precision = ", set(map(str, Precision)), {"conv"}),
]


@pytest.mark.parametrize(("text", "there", "absent"), OFFERED, ids=[text[-20:] for text, _, _ in OFFERED])
def test_offers(text: str, there: set[str], absent: set[str]):
    labels = {offer.label for offer in complete(text, len(text))}
    assert there <= labels
    assert not absent & labels
    if not there:
        assert not labels


def test_an_offer_describes_itself():
    text = HEAD + "y = y |> "
    offers = {offer.label: offer for offer in complete(text, len(text))}
    assert offers["conv"].detail == (
        "conv(channels, kernel, stride = 1, pad = 0, dilation = 1, groups = 1, bias = false, init = he, "
        "standardize = 0, gain = 0)"
    )
    assert offers["conv"].help.startswith("Convolution along")
    assert "or more tensors" in offers["concat"].detail and offers["parameter"].detail.endswith(", needs no tensor")
    assert offers["unit"].detail == "unit(c, s)" and offers["unit"].kind == "block"
    assert offers["image"].kind == "input"
