"""Which networks of timm `from_torch.py` trains: drawn by a seed among those that it has for 224 pixels.

timm's registered models of that input size are shuffled by SEED. The first of each of timm's modules stands for it, so
that no family of many sizes is drawn twice. They are taken in that order where they have MOST_PARAMETERS at most, no
network of examples/ is the same, and `mbc.from_torch` takes them, until there are COUNT. Which were passed over, and
why, is in the results, too.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from typing import Any

from record import Results, attempt, results

SEED, COUNT = 39, 15
PIXELS, CLASSES = 224, 1000
MOST_PARAMETERS, MANY_PARAMETERS = 100_000_000, 10_000_000
MANY_ROWS, FEW_ROWS = 128, 64
TIMEOUT_S = 300.0
FEW_REASONS = 3
# As timm calls networks of examples/.
EXAMPLES = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "densenet121", "vgg16", "inception_v4",
    "mobilenetv2_100",
)  # fmt: skip


def drawn(kept: Results | None = None) -> dict[str, int]:
    """The networks that were drawn, and the mini-batch of each."""
    rows = (kept or results("from_torch_drawn")).rows.values()
    return {row["name"]: row["batch"] for row in rows if row.get("taken")}


def order() -> list[str]:
    """One model of each of timm's modules, in the order in which they are considered."""
    import timm  # pyright: ignore[reportMissingImports]
    from timm.models import get_pretrained_cfg, list_modules  # pyright: ignore[reportMissingImports]

    names = [name for name in timm.list_models() if (cfg := get_pretrained_cfg(name)) is not None
             and tuple(cfg.input_size) == (3, PIXELS, PIXELS)]  # fmt: skip
    random.Random(SEED).shuffle(names)
    module_of = {name: module for module in list_modules() for name in timm.list_models(module=module)}
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(module_of[name], name)
    return list(first.values())


def draw() -> Results:
    """Goes on where it stopped."""
    import timm  # pyright: ignore[reportMissingImports]

    kept = results("from_torch_drawn", seed=SEED, timm=timm.__version__)
    for name in order():
        if len(drawn(kept)) >= COUNT:
            break
        full = f"timm/{name}"
        if full not in kept.rows:
            kept.put(attempt(lambda name=name: _considered(name), full))
            row = kept.rows[full]
            print(f"{full:44} {row.get('batch') or row.get('passed_over') or row.get('failed')}", flush=True)
    return kept


def _considered(name: str) -> dict[str, Any]:
    """In a process of its own, whose memory ends with it."""
    if name in EXAMPLES:
        return {"taken": False, "passed_over": "a network of examples/"}
    try:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"taken": False, "passed_over": f"not imported within {TIMEOUT_S:.0f} s"}
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _imported(name: str) -> dict[str, Any]:
    """Whether `mbc.from_torch` takes the model, and with how many rows it is trained."""
    import torch  # pyright: ignore[reportMissingImports]
    from imported import built

    from mbc.errors import MbcError
    from mbc.pytorch.trainer import import_training

    model = built(f"timm/{name}").train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        return {"taken": False, "parameters": parameters, "passed_over": "too many parameters"}
    images = torch.randn(4, 3, PIXELS, PIXELS)
    outputs = model(images)
    if not isinstance(outputs, torch.Tensor) or outputs.ndim != 2 or outputs.shape[1] < CLASSES:
        return {"taken": False, "parameters": parameters, "passed_over": "no classifier with one output"}
    try:
        _, text, _ = import_training(model, images, loss="softmax_cross_entropy",
                                  optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    except MbcError as error:
        return {"taken": False, "parameters": parameters, "passed_over": reasons(str(error))}
    rows = FEW_ROWS if parameters > MANY_PARAMETERS else MANY_ROWS
    return {"taken": True, "parameters": parameters, "batch": rows, "lines": text.count("\n")}


def reasons(refused: str) -> str:
    """What of a refusal says why, the first few: without the paths of modules and the lines of timm's files."""
    listed = [line[line.index(": ") + 2 :] for line in refused.splitlines() if line.startswith("  '") and ": " in line]
    different = list(dict.fromkeys(listed))
    more = [f"{len(different) - FEW_REASONS} more"] if len(different) > FEW_REASONS else []
    return "; ".join((*different[:FEW_REASONS], *more)) or refused.splitlines()[0]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps(_imported(sys.argv[1])))
