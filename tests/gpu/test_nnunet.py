"""nnU-Net's trainer with steps of mbc on a GPU: nnU-Net's numbers in fp16, its files, and memory within the limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mbc.codegen.toolchain import find_toolchain
from mbc.hardware.target import current_gpu
from mbc.measure.fleet import visible_gpus
from mbc.runtime.usage import own_bytes

drawn: Any = pytest.importorskip("tests.pytorch.nnunet.drawn")
cases: Any = pytest.importorskip("tests.pytorch.nnunet.test_nnunet_trainer")
ranks: Any = pytest.importorskip("tests.pytorch.nnunet.test_nnunet_ranks")
LIMIT_BYTES = 4_000_000_000


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    missing = ["a GPU"] if current_gpu() is None else [*map(str, find_toolchain().missing)]
    if missing:  # the fixture `gpu` would take memory
        pytest.skip(f"needs {'; '.join(missing)}")
    monkeypatch.setenv("MBC_MEMORY", f"{LIMIT_BYTES}B")
    monkeypatch.setenv("nnUNet_compile", "f")
    with drawn.drawn_data(tmp_path) as folder:
        yield folder


@pytest.mark.parametrize(("labels", "whole"), [("classes", True), ("ignored", False)])
def test_numbers_files_and_memory(tmp_path: Path, labels: str, whole: bool) -> None:
    ours, theirs = (cases.begun(name, "3d_fullres", labels, "cuda") for name in (cases.OURS, cases.STOCK))
    assert (ours.planned is not None) == whole
    assert cases.steps(ours, labels, 0, 4) == pytest.approx(cases.steps(theirs, labels, 0, 4), abs=1e-2)
    judged, wanted = (float(cases.validated(trainer, labels)["loss"]) for trainer in (ours, theirs))
    assert judged == pytest.approx(wanted, abs=1e-2)
    drawn.torch.testing.assert_close(cases.logits(ours).float(), cases.logits(theirs).float(), rtol=0.05, atol=0.05)
    file = cases.saved(ours, tmp_path)
    further = cases.steps(ours, labels, 4, 6)
    theirs.load_checkpoint(file)
    assert theirs.grad_scaler.get_scale() == ours.grad_scaler.get_scale()
    assert cases.steps(theirs, labels, 4, 6) == pytest.approx(further, abs=1e-2)
    ours.load_checkpoint(file)
    assert cases.steps(ours, labels, 4, 6) == pytest.approx(further, abs=2e-3)
    here = current_gpu()
    taken = None if here is None else own_bytes(here.bus_id)
    assert taken is None or taken <= LIMIT_BYTES


def test_two_gpus_train_as_without_mbc(tmp_path: Path) -> None:
    if len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs")
    ranks.both(tmp_path, "cuda", 1e-2)
    assert (tmp_path / f"{ranks.TRAINERS[1]}.1.pt").exists()
