"""Attention on one GPU: a training step of ViT-B/16 by mbc beside torch.compile in the same run (`mbc bench`), and its
kernels as the plan uses them, measured, beside torch's scaled_dot_product_attention forward and backward.

    python benchmarks/attention.py [--batch 64] [--precision bf16] [--layers 12] [--modes default] [--only step,kernels]

Without a GPU, with `--device cpu --batch 2 --layers 1 --size 32 --precision fp32`, the same runs as a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import ROOT, attempt, show, start, write

from mbc.compiler import compile_plan
from mbc.options import Measure, Options
from mbc.plan.model import Kernel
from mbc.source import Source

VIT = """
block encoder(heads, hidden) on x {
  c = x.shape[1]
  y = x |> layer_norm(1e-6) @norm1 |> conv(3 * c, 1, bias=true) @qkv |> attention(heads) |> conv(c, 1, bias=true) @proj
  y = x + y
  return y + (y |> layer_norm(1e-6) @norm2 |> conv(hidden, 1, bias=true) @fc1 |> gelu |> conv(c, 1, bias=true) @fc2)
}
network vit_b16(batch = 64, classes = 1000, layers = 12, size = 224) {
  input image[batch, 3, size, size] : float
  input target[batch] : class
  side = size // 16
  x = image |> conv(768, 16, stride=16, bias=true) @patches |> windows(side) |> padding((0, 0, 1, 0))
  x = x + (parameter((1, 768, 1, 1), std=0.02) @token |> padding((0, 0, 0, side * side)))
  x = x + parameter((1, 768, 1, side * side + 1), std=0.02) @positions
  for i in range(layers) { x = x |> encoder(12, 3072) }
  logits = x |> layer_norm(1e-6) @norm |> slice(axis=3, stop=1) |> flatten |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = adamw(weight_decay=0.05) }
"""
REPEATED = 50


def settings(a: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    own = {"batch": a.batch, "layers": a.layers, "size": a.size, "train.precision": a.precision}
    return tuple((name, str(value)) for name, value in own.items())


def step(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `mbc bench` says of the whole step."""
    source, result = folder / "vit_b16.mbc", folder / "step.json"
    source.write_text(VIT, encoding="utf-8")
    given = [argument for name, value in settings(a) for argument in ("--set", f"{name}={value}")]
    peers = ("--against", a.against, "--modes", a.modes, "--device", a.device)
    command = [sys.executable, "-m", "mbc.cli", "bench", str(source), *given, *peers, "-o", str(result)]
    subprocess.run(command, check=True, cwd=ROOT)
    return {"bench": json.loads(result.read_text(encoding="utf-8"))}


def kernels(a: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of one layer's attention: in the plan, and torch's on [N, heads, T, D] of the same size."""
    import torch  # pyright: ignore[reportMissingImports]

    on_gpu = a.device == "cuda"
    options = Options(settings=settings(a), measure=Measure.MISSING if on_gpu else Measure.NEVER)
    plan = compile_plan(Source("vit_b16.mbc", VIT), options if on_gpu else Options(gpu="h200", settings=settings(a)))
    found: dict[str, Any] = {}
    for launch in plan.train.launches:
        if isinstance(launch.work, Kernel) and launch.work.name.startswith("attention"):
            found[f"mbc {launch.work.name}"] = launch.work.time_us
            found["measured"] = launch.work.measured
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(a.precision, torch.float32)
    tokens = (a.size // 16) ** 2 + 1
    q, k, v = (torch.randn(a.batch, 12, tokens, 64, dtype=dtype, device=a.device, requires_grad=True) for _ in range(3))
    dy = torch.randn_like(q)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        found["torch forward"] = _us(lambda: attend(q, k, v), on_gpu)
    y = attend(q, k, v)
    found["torch backward"] = _us(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), on_gpu)
    return found


def _us(call: Callable[[], object], on_gpu: bool) -> float:
    """Mean of calls that are enqueued one after another."""
    import torch  # pyright: ignore[reportMissingImports]

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(5):
        call()
    wait()
    began = time.perf_counter()
    for _ in range(REPEATED):
        call()
    wait()
    return (time.perf_counter() - began) * 1e6 / REPEATED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--against", default="torch,torch.compile")
    parser.add_argument("--modes", default="default")
    parser.add_argument("--only", default="step,kernels")
    a = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if "kernels" in a.only:
            rows.append(attempt(lambda: kernels(a), "kernels"))
        if "step" in a.only:
            rows.append(attempt(lambda: step(a, Path(folder)), "step"))
    print(write(f"attention_{a.precision}_{a.batch}", rows))
    show([row for row in rows if row["name"] == "kernels"], sorted({key for row in rows for key in row} - {"bench"}))


if __name__ == "__main__":
    start(main)
