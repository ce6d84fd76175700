"""SuperNeurons' count of AlexNet against its published peaks, and of mbc's plans by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import staircase_alexnet
import superneurons
from modules import example
from staircase_alexnet import counted_bytes

from tests.plan.chains import random_plan

MIB = 1 << 20


@pytest.mark.parametrize("name", superneurons.MODES)
def test_published_peaks(name: str) -> None:
    layers = superneurons.chain(example("alexnet_caffe", ("batch", "200")).lowered().network)
    assert len(layers) == 23  # as the paper counts them
    peak = max(moment.size_bytes for moment in superneurons.MODES[name](layers)) / MIB
    assert peak == pytest.approx(superneurons.PUBLISHED_MIB[name], rel=staircase_alexnet.NEAR)


def test_each_technique_lowers_every_network_that_is_a_chain() -> None:
    for network in ("alexnet", "vgg16"):
        layers = superneurons.chain(example(network, ("batch", "16")).lowered().network)
        peaks = [max(m.size_bytes for m in count(layers)) for count in superneurons.MODES.values()]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[-1] >= max(layer.in_bytes + layer.out_bytes for layer in layers[1:])


def test_branches_are_refused() -> None:
    with pytest.raises(SystemExit, match="is no chain"):
        superneurons.chain(example("resnet").lowered().network)


def test_what_is_counted_of_a_plan() -> None:
    plan = random_plan(3)
    counted, with_workspace = counted_bytes(plan)
    assert 0 < counted <= with_workspace < plan.predictions.arena_bytes
    gradients = {name for name in plan.graph.values if name.startswith("d.l") and not name.endswith(".data")}
    without = {b.value for b in plan.buffers} - gradients
    assert counted <= sum(b.size_bytes + 256 for b in plan.buffers if b.value in without)
