"""How these tests read a source: its first lines may be `# --set NAME=VALUE` or `# --network NAME`."""

from __future__ import annotations

import re
from pathlib import Path

from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.ir.graph import Network, Role
from mbc.source import Source

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases"


def lower_text(text: str, *settings: str, network: str | None = None, name: str = "test.mbc") -> Lowered:
    pairs = tuple((s.partition("=")[0], s.partition("=")[2]) for s in settings)
    return lower(parse(Source(name, text)), pairs, network)


def lower_file(path: Path, *settings: str) -> Lowered:
    text = path.read_text(encoding="utf-8")
    settings += tuple(re.findall(r"^# --set (.*)$", text, re.MULTILINE))
    network = re.search(r"^# --network (.*)$", text, re.MULTILINE)
    return lower_text(text, *settings, network=network[1] if network else None, name=path.name)


def parameter_count(network: Network) -> int:
    return sum(v.type.elements for v in network.values.values() if v.role is Role.PARAMETER)


def wrap(body: str, header: str = "", parameters: str = "") -> str:
    """A whole network around statements that bind `y` to a tensor made of `image` [4, 3, 8, 8]."""
    return f"""{header}
network test(batch = 4{parameters}) {{
  input image[batch, 3, 8, 8] : float
  input target[batch] : class
  {body}
  logits = y |> linear(10) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}}
"""
