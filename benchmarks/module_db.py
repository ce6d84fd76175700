"""PyTorch's own samples of its modules through export, import and interpreter, compared in fp64.

The samples are those of `torch.testing._internal.common_modules.module_db`. Outputs, loss, all gradients and running
statistics are compared (`exactness.py`).

The first tensor of each sample is multiplied by a trained parameter, so that modules without parameters have a gradient
to compare. A loss of two tensors is used as in `from_torch(loss=...)`: the first tensor is the model's output, the
second the target. Only the first 40 samples of a module are used. Needs torch and `pip install expecttest`, which
PyTorch's testing package requires; no GPU.

    python benchmarks/module_db.py [--workers 4] [--only nn.GELU,nn.GroupNorm] [--seconds 60]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from exactness import Judge, Verdict, judge, stirred
from random_programs import TooLong, reasons, stop
from record import show, start, write
from torch import nn  # pyright: ignore[reportMissingImports]

MOST_SAMPLES = 40
OF_PYTORCH = ("not exported", "not finite")  # verdicts on samples that PyTorch itself does not train


class Scaled(nn.Module):
    """A module whose first tensor is multiplied by a trained parameter, with the sample's other arguments."""

    def __init__(self, module: nn.Module, given: Sequence[Any], named: dict[str, Any]) -> None:
        """Take a module, and the arguments of its sample."""
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.25))
        self.module = module
        self.given = [TENSOR if isinstance(value, torch.Tensor) else value for value in given]
        self.named = {name: TENSOR if isinstance(value, torch.Tensor) else value for name, value in named.items()}

    def forward(self, x: Any, *others: Any) -> Any:
        """Return the module's output for the scaled first tensor."""
        tensors = iter((x * self.scale if x.is_floating_point() else x, *others))
        given = [next(tensors) if value == TENSOR else value for value in self.given]
        named = {name: next(tensors) if value == TENSOR else value for name, value in self.named.items()}
        return self.module(*given, **named)


TENSOR = "a tensor"
# Operations before losses that take probabilities, or their logarithms.
HEADS = {
    nn.NLLLoss: nn.LogSoftmax(1), nn.KLDivLoss: nn.LogSoftmax(1), nn.BCELoss: nn.Sigmoid()
}  # fmt: skip


def samples(name: str) -> Iterator[tuple[nn.Module, tuple[Any, ...], str | Judge]]:
    """Yield the samples of a module of the database, each as a model, its inputs, and the loss of its output.

    A sample of a loss becomes the loss of a model before it, as in `from_torch(loss=...)`.
    """
    from torch.testing._internal.common_modules import module_db  # pyright: ignore[reportMissingImports]

    (info,) = (info for info in module_db if info.name == name)
    torch.manual_seed(0)
    given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for number, sample in enumerate(given):
        if number == MOST_SAMPLES:
            return
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        given, named = sample.forward_input.args, sample.forward_input.kwargs
        if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
            module(*given, **named)
        inputs = tuple(value for value in (*given, *named.values()) if isinstance(value, torch.Tensor))
        if isinstance(module, nn.modules.loss._Loss) and len(inputs) == 2:
            head = HEADS.get(type(module), nn.Identity())
            yield Scaled(head, inputs[:1], {}), inputs[:1], Judge(module, inputs[1])
        else:
            yield stirred(Scaled(module, given, dict(named))), inputs, "mse"


def names() -> list[str]:
    """Return the names of all samples."""
    from torch.testing._internal.common_modules import module_db  # pyright: ignore[reportMissingImports]

    return [info.name for info in module_db]


def verdicts(name: str, seconds: float, only: Sequence[int] = ()) -> list[tuple[str, Verdict]]:
    """Return a verdict for each sample of a module."""
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, stop)
    rows: list[tuple[str, Verdict]] = []
    for number, (model, inputs, loss) in enumerate(samples(name)):
        if only and number not in only:
            continue
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            rows.append((f"{name}/{number}", judge(model, inputs, loss)))
        except TooLong:
            rows.append((f"{name}/{number}", Verdict("timeout")))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="modules of the database, or samples such as nn.GELU/2")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one sample")
    options = parser.parse_args()
    if "/" in options.only:
        name, _, number = options.only.partition("/")
        for sample, verdict in verdicts(name, options.seconds, (int(number),)):
            print(f"{sample}: {verdict.kind}: {verdict.detail}")
        return
    chosen = options.only.split(",") if options.only else names()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        for created in pool.map(partial(verdicts, seconds=options.seconds), chosen):
            rows += [
                {"name": name, "verdict": v.kind, "refused": v.refused, "detail": "" if v.kind == "equal" else v.detail}
                for name, v in created
            ]
    table: list[dict[str, Any]] = []
    for name in chosen:
        own = [row for row in rows if row["name"].rpartition("/")[0] == name]
        counts = Counter(row["verdict"] for row in own)
        others = {kind: n for kind, n in counts.items() if kind != "equal"}
        why = dict(reasons(row["detail"] for row in own).most_common(6))
        table.append({"name": name, "samples": len(own), "equal": counts["equal"], **others, "reasons": why})
    totals = Counter(row["verdict"] for row in rows)
    wrong = [row for row in rows if row["verdict"] not in ("equal", "refused", *OF_PYTORCH)]
    failed = [row for row in rows if row["verdict"] in OF_PYTORCH]
    if not options.only:
        write("module_db", table, samples=len(rows), verdicts=dict(totals), wrong=wrong, not_exported=failed)
    show(table, ("name", "samples", "equal", "refused", "different", "traceback", "MBC304", *OF_PYTORCH))
    print(dict(totals))
    if wrong:
        raise SystemExit(f"{len(wrong)} samples are neither equal nor refused; the first: {wrong[0]['name']}")


if __name__ == "__main__":
    start(main)
