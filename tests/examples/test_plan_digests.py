"""Plans stay equal, byte by byte, unless a change is meant to change them.

The digests are of 31 networks, precisions and budgets on the bundled profile. After a change that is meant to change
plans, `--update-expected` writes the new digests to `plan_digests.json`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mbc.compiler import compile_plan
from mbc.options import Options
from mbc.plan.file import dump_plan
from mbc.source import Source

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KNOWN = Path(__file__).with_name("plan_digests.json")
NETWORKS = (
    "alexnet", "alexnet_caffe", "densenet121", "googlenet", "inception_v4", "mobilenet_v2", "resnet", "resnet_deep",
    "unet", "vgg16",
)  # fmt: skip
OTHERS = (
    "resnet depth=50 batch=256 train.precision=bf16",
    "resnet depth=50 batch=184 train.precision=bf16 memory.device=6GB",
    "resnet depth=50 batch=128 memory.device=6GB",
    "vgg16 batch=128 memory.device=4GB",
    "unet train.precision=bf16 memory.device=6GB",
    "densenet121 train.precision=bf16 memory.device=4GB",
    "alexnet memory.device=2GB",
    "resnet depth=18 batch=32 train.precision=tf32",
    "resnet depth=18 batch=8 train.precision=fp16",
    "resnet depth=50 batch=1 train.precision=bf16",
    "01_digits/net",
)
CASES = (*(f"{name} train.precision={p}" for name in NETWORKS for p in ("bf16", "fp32")), *OTHERS)
QUICK = (
    "alexnet train.precision=bf16",
    "vgg16 train.precision=fp32",
    "alexnet_caffe train.precision=bf16",
    *OTHERS[-4:],
)


@dataclass(frozen=True)
class Digest:
    """Digest of a plan. `plan`: digest of its file without mbc's version and the settings (`--set`)."""

    plan: str
    measured_share: float


def digest_of(case: str) -> Digest:
    name, *settings = case.split()
    path = EXAMPLES / f"{name}.mbc"
    pairs = tuple((key, value) for key, value in (setting.split("=") for setting in settings))
    network = path.read_text(encoding="utf-8").split("\n# `mbc compile")[0]  # without the comment on what it prints
    source = Source(f"examples/{name}.mbc", network)
    plan = compile_plan(source, Options(gpu="h200", settings=pairs))
    text = dump_plan(replace(plan, settings=())).replace(f'"mbc":"{plan.version}"', "")
    # The digests were written down when a plan file had the folder of its source.
    text = text.replace(f'"sources":[{{"name":"{path.name}"', f'"sources":[{{"name":"{source.name}"')
    lines = [line for line in text.splitlines() if not line.startswith('"checksum"')]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return Digest(digest, plan.predictions.measured_share)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_the_plan_is_the_same_as_before(case: str, update_expected: bool) -> None:
    recorded = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {"ortools": "", "plans": {}}
    solver = importlib.metadata.version("ortools")
    digest = digest_of(case)
    if update_expected:
        recorded["ortools"] = solver
        recorded["plans"][case] = [digest.plan, digest.measured_share]
        KNOWN.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    if recorded["ortools"] != solver:
        pytest.skip(f"digests are of plans made with OR-Tools {recorded['ortools']}, here is {solver}")
    assert recorded["plans"][case] == [digest.plan, digest.measured_share]


DIGEST = """
import sys
from tests.examples.test_plan_digests import digest_of
print(digest_of(sys.argv[1]).plan)
"""


@pytest.mark.parametrize("seed", ["110", "118"])  # two under which names of equal groups once came in another order
def test_the_plan_does_not_depend_on_the_order_of_sets(seed: str) -> None:
    case = "resnet depth=18 batch=8 train.precision=fp16"
    done = subprocess.run(
        [sys.executable, "-c", DIGEST, case], cwd=EXAMPLES.parent, env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == digest_of(case).plan
