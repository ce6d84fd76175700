"""nnU-Net's trainer with steps of mbc, beside nnU-Net's own: equal losses, files that both read, refusals in time."""

from __future__ import annotations

import copy
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mbc.errors import MbcError
from mbc.pytorch.nnunet import training_memory
from tests.pytorch.nnunet import drawn

torch: Any = drawn.torch
OURS, STOCK = "nnUNetTrainerMbc", "nnUNetTrainer"
BENCHMARK = "nnUNetTrainerMbcBenchmark_5epochs_noDataLoading"


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with drawn.drawn_data(tmp_path_factory.mktemp("nnunet")) as folder:
        yield folder


def begun(name: str, configuration: str, labels: str, device: str = "cpu") -> Any:
    trainer = drawn.trainer_of(name, configuration, labels, device)
    trainer.on_train_start()
    trainer.on_train_epoch_start()
    return trainer


def steps(trainer: Any, labels: str, first: int, last: int) -> list[float]:
    trainer.network.train()
    return [float(trainer.train_step(drawn.batch_of(trainer, seed, labels))["loss"]) for seed in range(first, last)]


def validated(trainer: Any, labels: str) -> dict[str, Any]:
    trainer.network.eval()
    with torch.no_grad():
        return trainer.validation_step(drawn.batch_of(trainer, 99, labels))


def saved(trainer: Any, folder: Path) -> str:
    file = folder / f"{type(trainer).__name__}.pth"
    trainer.logger.log("train_losses", 0.0, 0)
    trainer.save_checkpoint(str(file))
    return str(file)


def logits(trainer: Any) -> Any:
    """Return the logits of a whole volume, as validation after training predicts them in windows."""
    module: Any = importlib.import_module("nnunetv2.inference.predict_from_raw_data")
    predictor = module.nnUNetPredictor(device=trainer.device, allow_tqdm=False)
    trainer.set_deep_supervision_enabled(False)
    trainer.network.eval()
    predictor.manual_initialization(
        trainer.network, trainer.plans_manager, trainer.configuration_manager, None, trainer.dataset_json, STOCK, (0,)
    )
    case = trainer.dataset_class(trainer.preprocessed_dataset_folder, ["0"]).load_case("0")
    try:
        return predictor.predict_sliding_window_return_logits(torch.from_numpy(case[0][:]))
    finally:
        trainer.set_deep_supervision_enabled(True)


# With an ignored label PyTorch computes the loss, which nnU-Net defines for outputs without a labelled voxel, too.
SETTINGS = (("3d_fullres", "classes", True), ("2d", "regions", True), ("2d", "ignored", False))


@pytest.mark.parametrize(("configuration", "labels", "whole"), SETTINGS)
def test_numbers_and_files_are_those_of_nnunet(tmp_path: Path, configuration: str, labels: str, whole: bool) -> None:
    ours, theirs = (begun(name, configuration, labels) for name in (OURS, STOCK))
    assert (ours.planned is not None) == whole
    assert steps(ours, labels, 0, 3) == pytest.approx(steps(theirs, labels, 0, 3), rel=1e-5)
    ours_validated, wanted = validated(ours, labels), validated(theirs, labels)
    assert ours_validated.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(ours_validated[name], value, rtol=1e-4, atol=2, err_msg=name)  # a tie of two classes
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-3, atol=1e-3)
    # Each trainer loads the checkpoint that the other trainer wrote, and goes on with its weights and momentum.
    of_ours, of_theirs = saved(ours, tmp_path), saved(theirs, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{STOCK}.pth", f"{OURS}.pth"]
    further = steps(theirs, labels, 3, 5)
    assert steps(ours, labels, 3, 5) == pytest.approx(further, rel=1e-4)
    theirs.load_checkpoint(of_ours)
    ours.load_checkpoint(of_theirs)
    assert steps(theirs, labels, 3, 5) == pytest.approx(further, rel=1e-4)
    assert steps(ours, labels, 3, 5) == pytest.approx(further, rel=1e-4)
    resumed = drawn.trainer_of(OURS, configuration, labels)
    resumed.load_checkpoint(of_ours)  # as `nnUNetv2_train --c`, before the step is planned
    resumed.on_train_start()
    resumed.lr_scheduler.step(0)
    assert steps(resumed, labels, 3, 5) == pytest.approx(further, rel=1e-4)
    weights = theirs.network.state_dict()
    for key, tensor in resumed.network.state_dict().items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-3, atol=1e-4, msg=key)


PREDICT = """
import sys
sys.modules["mbc"] = None
import numpy, torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False)
predictor.initialize_from_trained_model_folder(sys.argv[1], (0,))
predictor.allowed_mirroring_axes = (0,)
data = torch.from_numpy(numpy.load(sys.argv[2]))
numpy.save(sys.argv[3], predictor.predict_sliding_window_return_logits(data).numpy())
"""


def test_a_trained_fold_is_predicted_without_mbc(tmp_path: Path) -> None:
    trainer = drawn.trainer_of(OURS)
    trainer.run_training()
    case = trainer.dataset_class(trainer.preprocessed_dataset_folder, ["0"]).load_case("0")
    np.save(tmp_path / "case.npy", case[0][:])
    arguments = [trainer.output_folder_base, str(tmp_path / "case.npy"), str(tmp_path / "logits.npy")]
    environment = {name: value for name, value in os.environ.items() if name != "nnUNet_extTrainer"}
    subprocess.run([sys.executable, "-c", PREDICT, *arguments], env=environment, check=True, capture_output=True)
    # nnU-Net adds up windows in float16: some roundoffs of 2^-11 for each window that covers a voxel.
    np.testing.assert_allclose(np.load(arguments[2]), logits(trainer).numpy(), rtol=5e-3, atol=5e-3)


def test_a_loss_of_ones_own_is_pytorchs_and_a_network_of_ones_own_keeps_its_trainer() -> None:
    trainer = drawn.trainer_of(OURS, "2d")
    trainer.loss.loss.ce.label_smoothing = 0.1
    trainer.on_train_start()
    assert trainer.planned is None and np.isfinite(steps(trainer, "classes", 0, 2)).all()
    kind = drawn.trainer_class(OURS)
    assert kind._name_for_prediction() == STOCK
    other = type("Other", (kind,), {"build_network_architecture": staticmethod(lambda *_: None)})
    assert other._name_for_prediction() == "Other"


def test_the_benchmark_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a CPU")
    trainer = drawn.trainer_of(BENCHMARK)
    trainer.run_training()
    assert trainer.planned.module.control["updates"] == 4 and not trainer.crashed_with_runtime_error


def refused(code: str, words: str, call: Any, *arguments: Any) -> None:
    with pytest.raises(MbcError) as caught:
        call(*arguments)
    assert caught.value.code == code and words in str(caught.value)


def test_what_cannot_be_trained_is_refused_before_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(change: Any) -> None:
        plans: Any = copy.deepcopy(drawn.PLANS)
        change(plans)
        drawn.trainer_class(OURS)(plans, "2d", 0, drawn.DATASETS["classes"], torch.device("cpu"))

    of_first = "lack 'configurations' (the plans are those of nnU-Net 1)"
    refused("MBC396", of_first, planned, lambda p: p.update(plans_per_stage=p.pop("configurations")))
    refused("MBC396", "no configuration '2d', but 3d_fullres", planned, lambda p: p["configurations"].pop("2d"))
    lacking = "the configuration '2d' lacks 'architecture'"
    refused("MBC396", lacking, planned, lambda p: p["configurations"]["2d"].pop("architecture"))

    trainer = drawn.trainer_of(OURS)
    checkpoint = torch.load(saved(trainer, tmp_path), weights_only=False)
    name = next(iter(checkpoint["network_weights"]))
    checkpoint["network_weights"][name] = torch.zeros(2)
    torch.save(checkpoint, tmp_path / "other.pth")
    torch.save({"weights": 1}, tmp_path / "foreign.pth")
    (tmp_path / "cut.pth").write_bytes(b"PK")
    of_another = f"is of another network: '{name}' is [2], but the plans' is [4, 1, 3, 3, 3]"
    refused("MBC397", of_another, trainer.load_checkpoint, str(tmp_path / "other.pth"))
    of_nobody = "is no checkpoint of nnU-Net: it has no 'network_weights'"
    refused("MBC397", of_nobody, trainer.load_checkpoint, str(tmp_path / "foreign.pth"))
    refused("MBC397", "cannot be read", trainer.load_checkpoint, str(tmp_path / "cut.pth"))

    monkeypatch.setenv("MBC_MEMORY", "11")
    refused("MBC399", "MBC_MEMORY is no size: '11' has no unit", trainer.on_train_start)
    monkeypatch.setenv("MBC_MEMORY", "600MB")
    refused("MBC399", "does not fit into 572.2 MiB as it is: ", trainer.on_train_start)
    taken = SimpleNamespace(limit_bytes=10_000, beside_bytes=lambda *_: 20_480)
    monkeypatch.setattr(training_memory, "limit_of", lambda *_: taken)
    refused("MBC399", "PyTorch alone takes 20.0 KiB", trainer.on_train_start)

    folder = data / "preprocessed" / drawn.NAME / "nnUNetPlans_3d"
    copied = tmp_path / "nnUNetPlans_3d"
    shutil.copytree(folder, copied)
    trainer.preprocessed_dataset_folder = str(copied)
    for path in copied.glob("*.pkl"):
        path.write_bytes(b"\x80\x04}.")  # an empty dict
    refused("MBC398", "none of its 5 cases has a labelled voxel", trainer.on_train_start)
    (copied / "3_seg.b2nd").unlink()
    refused("MBC398", "'3' has no segmentation", trainer.on_train_start)
    trainer.label_manager._all_labels = trainer.label_manager.label_dict = {}
    refused("MBC398", "no label besides the background", trainer.on_train_start)
