"""nnU-Net's trainer beside the trainer with steps of mbc: time of an epoch, Dice, and a training that is killed.

* `speed`: nnU-Net's benchmark without data loading, with and without `MBC_MEMORY`. `--network` chooses the original
  network (2 x 128^3) or a preset of residual encoders (L: 2 x 160 x 192 x 192; XL: 2 x 192 x 256 x 256; 16 classes).
* `dice`: a drawn data set that nnU-Net plans and preprocesses; both trainers, three seeds, equal weights and batches.
* `killed`: two equal trainings with steps of mbc. The first runs to its end; the script kills the second several times
  by SIGKILL and continues it from its last checkpoint. The result is how far their losses differ.

Each training is a process of its own. Rows are written one by one; another call runs those that are missing.

    python nnunet_training.py [--only speed dice killed] [--network original L XL] [--memory none 4GB] [--limit 280]

On a GPU the first step of a network measures kernels; `MBC_MEASURE_FOR=60s` limits that.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from record import ROOT, attempt, results, show, start

from mbc.pytorch.nnunet import TRAINERS

NAME, CASES, SEEDS, KILLS = "Dataset001_Drawn", 20, (0, 1, 2), 3
STOCK, OURS = "nnUNetTrainer", "nnUNetTrainerMbc"
NO_LOADING = "Benchmark_5epochs_noDataLoading"
# The networks of speed: plans file, patch in place of that of the plans, MBC_MEMORY of the trainings, and classes with
# the background, of which the drawn data set has three.
PRESETS = {
    "original": ("nnUNetPlans", (128, 128, 128), ("none", "4GB", "3.4GB"), 3),
    "L": ("nnUNetResEncUNetLPlans", (160, 192, 192), ("none", "12GB", "11GB", "10GB"), 16),
    "XL": ("nnUNetResEncUNetXLPlans", (192, 256, 256), ("none", "20GB", "16GB"), 16),
}


@dataclass(frozen=True)
class Training:
    """One training, in a process of its own.

    Attributes:
        trainer: Name of the trainer, as `nnUNetv2_train -tr` takes it.
        folder: Where nnU-Net's folders are.
        device: `cuda` or `cpu`.
        seed: Seed of the weights, and of each epoch's batches.
        epochs: Epochs of the whole training.
        iterations: Steps of an epoch.
        resumes: Whether the training continues from its last checkpoint.
        memory: `MBC_MEMORY`, or nothing.
        network: For a benchmark of speed, its name in `PRESETS`.
        patch: For such a benchmark, the sides of its patch.
        limit_s: Seconds after which the process is ended.
    """

    trainer: str
    folder: str
    device: str
    seed: int
    epochs: int
    iterations: int
    resumes: bool = False
    memory: str = ""
    network: str = ""
    patch: tuple[int, ...] = ()
    limit_s: float | None = None

    def begin(self) -> subprocess.Popen[str]:
        """Start the process. Its last line of output is the result as JSON."""
        variables = nnunet_folders(Path(self.folder).parent, Path(self.folder))
        variables |= {"nnUNet_n_proc_DA": "0", "MBC_MEMORY": self.memory or "auto"}  # one process draws, by its seed
        variables |= {} if self.network else {"nnUNet_compile": "f"}  # compiling takes longer than training
        command = [sys.executable, __file__, "--child", json.dumps(asdict(self))]
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with Path(self.folder, "errors.txt").open("a", encoding="utf-8") as errors:
            return subprocess.Popen(
                command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def ended(self) -> dict[str, Any]:
        """Return the result of the whole training."""
        process = self.begin()
        try:
            output, _ = process.communicate(timeout=self.limit_s)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(Path(self.folder, "errors.txt").read_text(encoding="utf-8").strip().splitlines()[-1])
        return json.loads(output.strip().splitlines()[-1])

    @property
    def losses_file(self) -> Path:
        """File of the training losses of all epochs, which the process writes after each epoch."""
        return Path(self.folder, "losses.json")


def trained(training: Training) -> dict[str, Any]:
    """Train in this process, and return losses, Dice, and the time of the fastest epoch in seconds."""
    torch: Any = importlib.import_module("torch")
    finder: Any = importlib.import_module("nnunetv2.utilities.find_objects")
    kind: Any = finder.recursive_find_trainer_class_by_name(training.trainer)

    taken: list[float] = []

    class Seeded(kind):
        """Draws the batches of each epoch by the seed and the number of the epoch."""

        def on_train_epoch_start(self) -> None:
            seed = 1000 * training.seed + self.current_epoch
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            super().on_train_epoch_start()

        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            taken.extend(taken_gb())
            losses = [float(loss) for loss in self.logger.get_value("train_losses", step=None)]
            training.losses_file.write_text(json.dumps(losses), encoding="utf-8")

    Seeded.__name__ = kind.__name__  # names folders and checkpoints
    base = Path(training.folder).parent / "preprocessed" / NAME
    plans, dataset = (json.loads((base / f"{name}.json").read_text("utf-8")) for name in ("nnUNetPlans", "dataset"))
    if training.network:
        file, _, _, classes = PRESETS[training.network]
        planned = (ROOT / "tests" / "cases" / "nnunet" / f"{file}.json").read_text("utf-8")  # by nnU-Net's planners
        plans["configurations"] = json.loads(planned)["configurations"]
        plans["configurations"]["3d_fullres"]["patch_size"] = [*training.patch]
        dataset["labels"] = {"background": 0, **{f"organ {n}": n for n in range(1, classes)}}
    plans["continue_training"] = training.resumes
    torch.manual_seed(training.seed)
    trainer: Any = Seeded(plans, "3d_fullres", 0, dataset, torch.device(training.device))
    trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.save_every = training.epochs, training.iterations, 1
    trainer.num_val_iterations_per_epoch = max(1, training.iterations // 5)
    trainer.initialize()
    if training.resumes:
        trainer.load_checkpoint(str(Path(trainer.output_folder, "checkpoint_latest.pth")))
    trainer.run_training()
    if getattr(trainer, "crashed_with_runtime_error", False):
        raise RuntimeError("the training crashed: nnU-Net's log says why")
    times = [trainer.logger.get_value(f"epoch_{edge}_timestamps", step=None) for edge in ("end", "start")]
    fastest_s = min(end - begin for end, begin in zip(*times, strict=True))
    result = {"fastest_epoch_s": fastest_s, "taken_gb": max(taken, default=None)}
    if training.network:
        return result
    trainer.perform_actual_validation()
    summary = json.loads(Path(trainer.output_folder, "validation", "summary.json").read_text("utf-8"))
    return {**result, "dice": summary["foreground_mean"]["Dice"]}


def taken_gb() -> list[float]:
    """Return the memory that this process takes on the GPU, as nvidia-smi shows it; nothing without a GPU."""
    from mbc.hardware.target import current_gpu
    from mbc.runtime.usage import own_bytes

    here = current_gpu()
    taken = None if here is None else own_bytes(here.bus_id)
    return [] if taken is None else [taken / 1e9]


def nnunet_folders(data: Path, outputs: Path) -> dict[str, str]:
    """Return nnU-Net's variables for a folder with data, and a folder for what it trains."""
    folders = {"raw": data / "raw", "preprocessed": data / "preprocessed", "results": outputs, "extTrainer": TRAINERS}
    return {f"nnUNet_{name}": str(path) for name, path in folders.items()}


def prepare(folder: Path, side: int) -> None:
    """Draw volumes of `side` voxels along each axis, and let nnU-Net plan and preprocess them."""
    raw = folder / "raw" / NAME
    spec: Any = importlib.util.spec_from_file_location("prepare", ROOT / "examples" / "02_volumes" / "prepare.py")
    drawing: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    drawing.SIDES = side, side
    nibabel: Any = importlib.import_module("nibabel")
    drawn = np.random.default_rng(0)
    for part in ("imagesTr", "labelsTr"):
        (raw / part).mkdir(parents=True)
    for number in range(CASES):
        files = (f"imagesTr/{number:02}_0000.nii.gz", f"labelsTr/{number:02}.nii.gz")
        for array, file in zip(drawing.draw(drawn), files, strict=True):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), raw / file)
    labels = {"background": 0, "outer": 1, "inner": 2}
    dataset = {"channel_names": {"0": "drawn"}, "labels": labels, "numTraining": CASES, "file_ending": ".nii.gz"}
    dataset |= {"overwrite_image_reader_writer": "NibabelIO"}
    (raw / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")
    words = ["nnunetv2.experiment_planning.plan_and_preprocess_entrypoints", "-d", "1", "-c", "3d_fullres"]
    command = [sys.executable, "-m", *words, "-np", "2", "-npfp", "2"]
    subprocess.run(command, env=os.environ | nnunet_folders(folder, folder), check=True)


def killed(whole: Training, broken: Training) -> dict[str, Any]:
    """Return how far the losses of a training that is killed are from those of one that is not."""
    whole.ended()
    drawn = random.Random(0)
    for number in range(1, KILLS + 1):
        epoch = number * whole.epochs // (KILLS + 1)
        process = replace(broken, resumes=number > 1).begin()
        while process.poll() is None and len(losses(broken)) < epoch:
            time.sleep(0.05)
        time.sleep(drawn.uniform(0, 1))
        process.kill()
        process.wait()
    replace(broken, resumes=True).ended()
    pairs = [*zip(losses(whole), losses(broken), strict=True)]
    return {"kills": KILLS, "epochs": len(pairs), "largest_difference": max(abs(a - b) for a, b in pairs)}


def losses(training: Training) -> list[float]:
    """Return the training losses so far, one an epoch."""
    file = training.losses_file
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    except ValueError:  # the process is writing the file
        return []


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean difference of Dice by seed, and its standard error."""
    scores = {trainer: [row["dice"] for row in rows if row["trainer"] == trainer] for trainer in (STOCK, OURS)}
    apart = [ours - stock for stock, ours in zip(scores[STOCK], scores[OURS], strict=True)]
    return {
        "dice": statistics.mean(scores[OURS]), "stock_dice": statistics.mean(scores[STOCK]),
        "difference": statistics.mean(apart), "standard_error": statistics.stdev(apart) / len(apart) ** 0.5,
    }  # fmt: skip


def main() -> None:
    """Run the trainings that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["speed", "dice", "killed"], choices=["speed", "dice", "killed"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--side", type=int, default=64, help="voxels of a drawn volume along each axis (default 64)")
    parser.add_argument("--epochs", type=int, help="default 40; 5 for speed")
    parser.add_argument("--iterations", type=int, help="steps of an epoch (default 50; 250 for speed)")
    parser.add_argument("--network", nargs="+", default=["original"], choices=PRESETS, help="of speed")
    parser.add_argument("--memory", nargs="+", help="of speed, as MBC_MEMORY; none for no limit, stock for nnU-Net")
    parser.add_argument("--patch", nargs=3, type=int, help="of speed, in place of the preset's")
    parser.add_argument("--limit", type=float, help="seconds of one training, but for those that are killed")
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time for Dice (default 1)")
    parser.add_argument("--again", action="store_true", help="run also what the results have")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(trained(Training(**json.loads(given.child)))))
        return
    held = results("nnunet_training", again=given.again)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), given.side)

        def training(trainer: str, name: str, seed: int = 0, **more: Any) -> Training:
            size = {"epochs": given.epochs or 40, "iterations": given.iterations or 50, "limit_s": given.limit}
            return Training(trainer, f"{folder}/{name}", given.device, seed, **size | more)

        def run(name: str, work: Any) -> None:
            if not held.done(name):
                held.put(attempt(work, name))

        for network in given.network if "speed" in given.only else ():
            _, patch, memories, _ = PRESETS[network]
            for memory in given.memory or ("stock", *memories):
                trainer = STOCK if memory == "stock" else OURS
                limit = memory if memory[0].isdigit() else ""
                name = f"speed {network} {trainer} {limit}".strip()
                more = {"network": network, "patch": given.patch or patch, "memory": limit}
                more |= {"epochs": given.epochs or 5, "iterations": given.iterations or 250}
                run(name, training(trainer + NO_LOADING, name, **more).ended)
        if "killed" in given.only:
            pair = (training(OURS, name, epochs=max(4, (given.epochs or 40) // 4)) for name in ("whole", "broken"))
            run(f"killed, {given.device}", partial(killed, *pair))
        if "dice" in given.only:
            cases = {f"dice {t} seed {s}, {given.device}": (t, s) for s in SEEDS for t in (STOCK, OURS)}
            missing = [name for name in cases if not held.done(name)]
            with ThreadPoolExecutor(given.workers) as pool:
                done = pool.map(
                    lambda name: attempt(training(cases[name][0], name, cases[name][1]).ended, name), missing
                )
                for row in done:
                    held.put({**row, "trainer": cases[row["name"]][0]})
            if all(map(held.done, cases)):
                held.put({"name": f"dice, {given.device}", **compared([held.rows[name] for name in cases])})
    show(list(held.rows.values()), ["name", "fastest_epoch_s", "taken_gb", "dice", "difference", "largest_difference"])


if __name__ == "__main__":
    start(main)
