"""Sources of tests/cases/ok become the networks that stand beside them.

`pytest tests/frontend --update-expected` writes them anew: read the difference before committing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.frontend.lower import Lowered
from mbc.ir.text import optimizer_text
from mbc.passes.check_graph import verify_network
from tests.frontend.reading import CASES, lower_file

GOOD = sorted((CASES / "ok").glob("*.mbc"))


def _summary(lowered: Lowered) -> str:
    network = lowered.network
    lines = [optimizer_text(lowered.optimizer), f"precision {lowered.precision}, deterministic {lowered.deterministic}"]
    lines.append(f"device {lowered.device_bytes}, host {lowered.host_bytes}, settings {dict(lowered.settings)}")
    lines += [f"input {name}: {network.values[name].type}" for name in network.inputs]
    lines += [f"{s.initializer.kind} {s.value}: {network.values[s.value].type}" for s in network.states]
    for op in network.operations:
        outputs = ", ".join(f"{v}: {network.values[v].type}" for v in op.outputs)
        place = f"{op.span.line}:{op.span.column}" if op.span else "nowhere"
        lines.append(f"{outputs} = {op.kind}({', '.join(op.inputs)})  # {op.name}, {place}")
    lines += [f"output {name}" for name in network.outputs]
    lines += [f"loss {weight:g} * {name}" for name, weight in network.losses]
    for name, terms in network.metrics:
        lines.append(f"metric {name} = " + " + ".join(f"{weight:g} * {value}" for value, weight in terms))
    return "\n".join([*lines, ""])


@pytest.mark.parametrize("path", GOOD, ids=[p.stem for p in GOOD])
def test_network(path: Path, update_expected: bool):
    lowered = lower_file(path)
    verify_network(lowered.network)
    expected = path.with_suffix(".txt")
    if update_expected:
        expected.write_text(_summary(lowered), encoding="utf-8")
    assert _summary(lowered) == expected.read_text(encoding="utf-8")
