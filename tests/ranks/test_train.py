"""`mbc train` with several ranks on the CPU: `--gpus N` starts mpiexec, or a launcher has started the ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mbc.cli import main
from mbc.train.training_checkpoint import read_progress
from tests.ranks.processes import LONG_S, ROOT, variables
from tests.ranks.test_mpi import AS_ROOT, MPIEXEC, with_mpi
from tests.report.pages import data_of

SOURCE = """\
network tiny(batch = 8, classes = 3) {
  input image[batch, 1, 6, 6] : float
  input target[batch] : class
  logits = image |> conv(4, 3, pad=1) |> bn |> relu |> global_avgpool |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
"""
DIGITS = ROOT / "examples" / "01_digits"
COMMAND = (
    sys.executable, "-m", "mbc.cli", "train", "tiny.mbc", "--data", "data.npz", "--epochs", "2", "--device", "cpu",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.mbc").write_text(SOURCE)
    draws = np.random.default_rng(0)
    np.savez(
        tmp_path / "data.npz", images=draws.normal(size=(32, 1, 6, 6)).astype(np.float32), labels=np.arange(32) % 3
    )
    return tmp_path


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | AS_ROOT


def run_in(
    folder: Path, *command: str, within_s: float = LONG_S, given: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with these further variables of the environment."""
    env = environment() | dict(given or {})
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=within_s, check=False)


def _run(folder: Path, *more: str, subject: str = "tiny.mbc", **given: str) -> subprocess.CompletedProcess[str]:
    command = [subject if word == "tiny.mbc" else word for word in COMMAND]
    return run_in(folder, *command, *more, given=given)


class TestWithMpi:
    pytestmark = with_mpi

    def test_gpus_on_the_cpu(self, folder: Path) -> None:
        done = _run(
            folder, "--gpus", "2", "--json", "--checkpoint", "w.safetensors", "--log", "log", "--log-every", "3"
        )
        assert done.returncode == 0, done.stderr
        assert [epoch["epoch"] for epoch in json.loads(done.stdout)["epochs"]] == [1, 2]  # of one rank
        assert done.stderr.count("epoch 2/2") == 1
        assert (folder / "w.safetensors").exists()
        steps = [json.loads(line)["step"] for line in (folder / "log").read_text().splitlines()]
        assert steps == [3, 4, 6, 8]  # by rank 0 alone

    def test_a_page_shows_the_plans_of_all_ranks(self, folder: Path) -> None:
        """The mini-batch has rows 3, 3 and 2, so the last rank runs another plan."""
        ranks = ("--gpus", "3", "--report", "page.html")
        done = _run(folder, *ranks)
        assert done.returncode == 0, done.stderr
        assert main(["compile", str(folder / "tiny.mbc"), "--gpus", "3", "-o", str(folder / "built")]) == 0
        first = data_of((folder / "page.html").read_text())
        done = _run(folder, *ranks, subject="built")
        assert done.returncode == 0, done.stderr
        for data in (first, data_of((folder / "page.html").read_text())):
            assert data["plan"]["ranks"] == "ranks 0 and 1" and data["recorded"][0]["what"] == "training"
            assert [other["ranks"] for other in data["others"]] == ["rank 2"]

    def test_a_target_ends_all_ranks_after_the_same_epoch(self, folder: Path) -> None:
        reached = _run(folder, "--gpus", "2", "--target", "loss=10", "--checkpoint", "w.safetensors")
        assert reached.returncode == 0, reached.stderr
        assert reached.stdout.count("the target loss 10 is reached after epoch 1: ") == 1
        assert read_progress(folder / "w.safetensors").epochs == 1
        missed = _run(folder, "--gpus", "2", "--target", "loss=0", "--resume", "w.safetensors")
        assert missed.returncode == 1 and "epoch 2/2" in missed.stderr
        assert missed.stderr.count("error MBC318: loss 0 is not reached in 2 epochs: the best is ") == 1
        assert missed.stderr.count("MBC") == 1 and "go on with" not in missed.stderr
        assert read_progress(folder / "w.safetensors").epochs == 2

    def test_a_tuning_trains_to_its_target_on_the_gpus_that_it_takes(self, folder: Path) -> None:
        few = ("--gpu", "h200", "--without", "offload,recompute,concurrent_stream")
        fixed = ("--lr", "0.05", "--noise-scale", "9", "--state", "found.json")
        tune = ("tune", *COMMAND[4:], *few, *fixed, "--gpus", "2", "--json")

        def run(*more: str) -> subprocess.CompletedProcess[str]:
            return run_in(folder, *COMMAND[:3], *tune, *more, within_s=2 * LONG_S)

        assert run().returncode == 0
        state = json.loads((folder / "found.json").read_text())
        for probe in state["probes"]["2"].values():  # as two GPUs are with a larger network
            probe["images_per_s"] *= 100
        (folder / "found.json").write_text(json.dumps(state))
        reached = run("--target", "loss=10", "-o", "tuned.settings")
        assert reached.returncode == 0, reached.stderr
        result = json.loads(reached.stdout)
        assert (result["taken"]["gpus"], result["epochs"]) == (2, 1)
        assert "runs mbc train " in reached.stderr and "--gpus=2" in reached.stderr and "epoch 1/2" in reached.stderr
        settings = (folder / "tuned.settings").read_text()
        assert "gpus=2\n" in settings and "epochs=1\nschedule=constant\n" in settings
        missed = run("--target", "loss=0")
        assert missed.returncode == 1 and not missed.stdout
        assert missed.stderr.count("error MBC318: loss 0 is not reached in 2 epochs: the best is ") == 1

    def test_an_error_ends_all(self, folder: Path) -> None:
        np.savez(folder / "data.npz", images=np.zeros((32, 1, 6, 6), np.float32), labels=np.full(32, 7))
        done = _run(folder, "--gpus", "2")
        assert done.returncode != 0 and "error MBC232" in done.stderr

    def test_ranks_of_a_launcher(self, folder: Path) -> None:
        done = run_in(folder, str(MPIEXEC), "-n", "2", *COMMAND, "--gpus", "2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("after 2 epochs (cpu)") == 1 and done.stderr.count("epoch 2/2") == 1

    def test_a_package_for_two(self, folder: Path) -> None:
        package = ["compile", "tiny.mbc", "--gpus", "2", "-o", "pair", "--set", "batch=7"]  # 4 + 3 rows
        built = run_in(folder, *COMMAND[:3], *package)
        assert built.returncode == 0, built.stderr
        done = _run(folder, "--gpus", "2", "--json", subject="pair")
        assert done.returncode == 0, done.stderr
        assert [(epoch["rows"], epoch["dropped_rows"]) for epoch in json.loads(done.stdout)["epochs"]] == [(28, 4)] * 2

    @pytest.mark.exhaustive
    def test_a_training_goes_on_on_fewer_and_on_more_ranks(self, folder: Path) -> None:
        (folder / "tiny.mbc").write_text(SOURCE.replace(" |> bn", ""))  # which normalises by the rows of a rank
        alone = _run(folder, "--json", "--epochs", "3")
        seen_epochs: list[dict[str, float]] = []
        for epochs, gpus in ((1, 2), (2, 1), (3, 3)):
            more = ("--resume", "w.safetensors") if seen_epochs else ("--checkpoint", "w.safetensors")
            done = _run(folder, "--json", "--epochs", str(epochs), "--gpus", str(gpus), *more)
            assert done.returncode == 0, done.stderr
            result = json.loads(done.stdout)
            assert result["ranks"] == gpus
            seen_epochs += result["epochs"]
        for epoch, expected in zip(seen_epochs, json.loads(alone.stdout)["epochs"], strict=True):
            assert epoch["loss"] == pytest.approx(expected["loss"], rel=1e-5)

    @pytest.mark.parametrize("launcher", ["mbc", pytest.param("mpiexec", marks=pytest.mark.exhaustive)])
    def test_two_ranks_learn_the_digits(self, tmp_path: Path, launcher: str) -> None:
        pytest.importorskip("sklearn")
        subprocess.run([sys.executable, str(DIGITS / "prepare.py"), str(tmp_path)], check=True, capture_output=True)
        train = [
            *COMMAND[:4], str(DIGITS / "net.mbc"), "--data", "digits.train.npz", "--test", "digits.test.npz",
            "--epochs", "6", "--lr", "0.2", "--schedule", "cosine", "--warmup", "1", "--device", "cpu", "--json",
        ]  # fmt: skip
        command = [*train, "--gpus", "2"] if launcher == "mbc" else [str(MPIEXEC), "-n", "2", *train]
        done = run_in(tmp_path, *command, within_s=4 * LONG_S)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["ranks"], result["device"]) == (2, "cpu")
        assert result["epochs"][-1]["rows"] == 22 * 64 and result["epochs"][-1]["test_accuracy"] >= 0.98


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--set", "classes=4"), "options of planning (digest): "),
        (("--epochs", "3"), "--epochs: 2 on rank 0; 3 on rank 1"),
        (("--seed", "1"), "seed: 0 on rank 0; 1 on rank 1"),
    ],
)
def test_ranks_with_other_settings_are_refused(folder: Path, more: tuple[str, ...], words: str) -> None:
    _refused(_start_two(folder, (), more), f"the ranks differ in {words}")


def test_equal_options_have_one_digest_in_every_process() -> None:
    script = """
from mbc.options import TECHNIQUES, Options
options = Options(without=frozenset(TECHNIQUES))
print(options.digest, options.digest == Options().digest, list(options.without))"""
    said = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment() | {"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout.split(maxsplit=2)
        for seed in ("1", "2", "3", "4", "5", "6")
    ]  # fmt: skip
    assert len({order for _, _, order in said}) > 1, "the order of a set differs from process to process"
    assert {(digest, same) for digest, same, _ in said} == {(said[0][0], "False")}


def test_ranks_with_other_sources_are_refused(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "tiny.mbc").write_text(SOURCE.replace("conv(4", "conv(5"))
    shutil.copy(folder / "data.npz", folder / "other")
    _refused(_start_two(folder, other=folder / "other"), "the ranks differ in 'tiny.mbc' (digest): ")


@with_mpi[0]
@with_mpi[1]
def test_ranks_with_data_of_another_length_are_refused(folder: Path) -> None:
    (folder / "other").mkdir()
    shutil.copy(folder / "tiny.mbc", folder / "other")
    np.savez(folder / "other" / "data.npz", images=np.zeros((24, 1, 6, 6), np.float32), labels=np.zeros(24, int))
    words = "the ranks differ in rows of the data: 32 on rank 0; 24 on rank 1"
    at = [["-n", "1", "-wdir", str(there), *COMMAND] for there in (folder, folder / "other")]
    done = run_in(folder, str(MPIEXEC), *at[0], ":", *at[1])
    assert f"error MBC263: {words}" in done.stderr and "epoch 1" not in done.stderr and done.returncode != 0


def test_ranks_that_no_mpi_joins_are_refused_before_anything_is_planned(folder: Path) -> None:
    (folder / "tiny.mbc").write_text("this is no network")
    for process in _start_two(folder):
        said = process.communicate(timeout=LONG_S)[1]
        assert process.returncode == 1 and "error MBC265: " in said, said


def test_a_mini_batch_that_cannot_be_shared_is_refused_at_once(folder: Path) -> None:
    done = _run(folder, "--gpus", "2", "--set", "batch=1")
    assert done.returncode == 1
    assert done.stderr.startswith("error MBC280: a mini-batch of 1 cannot be shared by 2 GPUs")
    assert done.stderr.count("MBC") == 1


def _start_two(folder: Path, *more: tuple[str, ...], other: Path | None = None) -> list[subprocess.Popen[str]]:
    """Start two ranks with different arguments, the second in the folder `other`."""
    return [
        subprocess.Popen(
            [*COMMAND, *(more[rank] if more else ())], cwd=(other or folder) if rank else folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment() | variables(rank, 2, MBC_JOB=str(folder)),
        ) for rank in range(2)
    ]  # fmt: skip


def _refused(processes: list[subprocess.Popen[str]], words: str) -> None:
    for process in processes:
        said = process.communicate(timeout=LONG_S)
        assert f"error MBC263: {words}" in said[1], said
        assert process.returncode == 1 and "epoch 1" not in said[1]


def test_a_package_for_another_number_is_refused(folder: Path) -> None:
    built = run_in(folder, *COMMAND[:3], "compile", "tiny.mbc", "-o", "alone")
    assert built.returncode == 0, built.stderr
    done = _run(folder, "--gpus", "2", subject="alone")
    assert done.returncode == 1
    assert done.stderr == (
        "error MBC281: the plan is for one GPU, but 2 processes were started\nhelp: start one process, or compile with"
        " --gpus 2\n"
    )


def test_gpus_and_the_launcher_disagree(folder: Path) -> None:
    done = _run(folder, "--gpus", "3", **variables(0, 2))
    assert done.returncode == 1
    assert "error MBC266: --gpus 3 was asked for, but mbc started 2 ranks\n" in done.stderr


def test_more_gpus_than_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("mbc.cli.start_ranks.local_gpus", lambda: ())
    assert main(["train", "tiny.mbc", "--data", "data.npz", "--device", "cuda", "--gpus", "2"]) == 1
    assert "error MBC266: --gpus 2 was asked for, but this machine has 0 GPUs\nhelp: " in capsys.readouterr().err


def test_faults_are_reported_before_anything_starts(folder: Path) -> None:
    done = _run(folder, "--gpus", "2", "--lr", "-1")
    assert done.returncode == 1 and done.stderr.count("error MBC") == 1


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is not None, reason="mpi4py is installed")
def test_without_mpi(folder: Path) -> None:
    path = str(Path(shutil.which("env") or "/usr/bin/env").parent)
    done = _run(folder, "--gpus", "2", PATH=path)
    assert done.returncode == 1 and "error MBC265: " in done.stderr
