from __future__ import annotations

from mbc.bench.recipe import dropout_masks, recipe
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Network
from mbc.source import Source
from tests.runtime.nets import SMALL, small_plan


def network(text: str = SMALL) -> Network:
    return lower(parse(Source("n.mbc", text)), (), None).network


def test_layers_get_their_biases():
    calls = {call.operation.name: call for call in recipe(network(), ("convolution", "linear"))}
    assert calls["second"].operands[2:] == ("second.bias",) and calls["second"].result == "second.bias_add"
    assert len(calls["first"].operands) == 2 and calls["head"].operands[2:] == ("head.bias",)
    assert not any("bias_add" in name for name in calls)
    apart = [call.operation.kind for call in recipe(network(), ("convolution",))]
    assert apart.count("bias_add") == 1
    assert [c.operation for c in recipe(network(), ())] == list(network().operations)


def test_a_value_is_dropped_after_its_last_use_and_not_before():
    for takes in ((), ("convolution", "linear")):
        graph = network()
        held = {*graph.inputs, *(state.value for state in graph.states)}
        for call in recipe(graph, takes):
            assert held.issuperset(call.operands)
            held.add(call.result)
            held.difference_update(call.dead)
        assert held.issuperset(graph.outputs)
        assert held.isdisjoint(("image", "second.weight")), "nothing is held that nobody reads any more"


def test_masks_are_those_of_a_module():
    masks = dropout_masks(network(), seed=3, step=2)
    (mask,) = masks.values()
    assert mask.shape == (6, 4, 3, 3) and 0.6 < mask.mean() < 0.95
    operation = next(op for op in small_plan().graph.train if op.kind == "dropout")
    assert next(iter(masks)) == operation.name
    assert (dropout_masks(network(), 3, 3)[operation.name] != mask).any()
