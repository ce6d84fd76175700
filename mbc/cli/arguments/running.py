"""Arguments of the commands that take steps."""

from __future__ import annotations

import argparse

from mbc.cli.arguments.argument_types import blocks, count, duration, modes, numbers, peers, seed, target
from mbc.cli.arguments.shared import Commands, add_json, add_measuring, add_planning, add_sharing, command
from mbc.options import MODES, PEERS
from mbc.train.schedule import KINDS, USUAL_RATES


def add_train(commands: Commands) -> None:
    made = command(
        commands, "train", "Train a network on data; a source is planned first, and built where there is a GPU.",
        "  mbc train net.mbc --data train.npz --test test.npz --epochs 20 --lr 0.1 --schedule cosine\n"
        "  mbc train resnet50 --data folder_of_npy --checkpoint resnet50.safetensors\n"
        "  mbc train resnet50 --data loader:batches --resume resnet50.safetensors\n"
        "  mbc train resnet50 --data folder_of_npy --gpus 2",
    )  # fmt: skip
    made.add_argument("network_or_package", metavar="NET", help="a package or a source (.mbc)")
    made.add_argument(
        "--data", required=True, metavar="DATA",
        help="an .npz or a folder of .npy with an array named like each input (or x and y, images and labels), "
        "or module:function that yields batches",
    )  # fmt: skip
    made.add_argument("--test", metavar="DATA", help="data to test on after each epoch")
    made.add_argument(
        "--settings", dest="settings_file", metavar="FILE",
        help="take these options from a file, as mbc tune -o writes it; those given here count before it",
    )  # fmt: skip
    made.add_argument("--epochs", type=count, default=10, help="in all, those before --resume included (default 10)")
    made.add_argument(
        "--target", type=target, metavar="METRIC=VALUE",
        help="end after the first epoch that reaches it: accuracy=0.97 (of test data where there are any), loss=0.1, "
        "or a METRIC as --plateau-metric",
    )  # fmt: skip
    usual = ", ".join(f"{rate} for {kind}" for kind, rate in USUAL_RATES.items())
    made.add_argument("--lr", type=float, metavar="RATE", help=f"(peak) learning rate (default {usual})")
    _add_schedule(made)
    made.add_argument("--seed", type=seed, help="of initial weights, shuffling and dropout (default 0)")
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where it can)"
    )
    made.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help="start N ranks on this machine, one a GPU (with --device cpu by mpiexec)",
    )
    made.add_argument(
        "--checkpoint", metavar="FILE", help="write weights and progress here after each epoch, and on Ctrl-C"
    )
    made.add_argument("--checkpoint-every", type=count, metavar="STEPS", help="and within epochs after so many steps")
    made.add_argument(
        "--keep-best", nargs="?", const=True, metavar="METRIC",
        help="keep the best epoch's beside it (w.best.safetensors beside w.safetensors), by METRIC as --plateau-metric",
    )  # fmt: skip
    made.add_argument(
        "--evaluate", choices=("weights", "ema"), default="weights",
        help="what is tested after each epoch: the weights, or their moving averages, train { ema } (default weights)",
    )  # fmt: skip
    made.add_argument("--save-ema", metavar="FILE", help="write the moving averages here after each epoch, as weights")
    made.add_argument("--resume", metavar="FILE", help="go on from such a file; keeps writing to it by default")
    made.add_argument(
        "--weights", metavar="FILE", help="begin with these weights (as mbc import writes them) unless it is resumed"
    )
    made.add_argument("--log", metavar="FILE", help="write the figures of each epoch here, as lines of JSON")
    made.add_argument(
        "--log-every", type=count, metavar="STEPS", help="and after so many steps, too, those of the steps between"
    )
    made.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write the same for TensorBoard (pip install 'mbc-compiler[tensorboard]')",
    )
    made.add_argument(
        "--report", metavar="FILE", help="write the plan as a page with the curves of these figures at the end"
    )
    made.add_argument(
        "--record", metavar="FILE",
        help="write what each launch of a step takes on the GPU, beside its prediction: mbc report --with shows it",
    )  # fmt: skip
    made.add_argument("-o", "--output", metavar="FOLDER", help="package to write when a source is built")
    add_planning(made)
    add_measuring(made)
    add_json(made)


def _add_schedule(made: argparse.ArgumentParser) -> None:
    made.add_argument("--schedule", choices=KINDS, default="constant", help="of the rate (default constant)")
    made.add_argument(
        "--warmup", type=float, default=0.0, metavar="EPOCHS",
        help="grow the rate from 0 over EPOCHS; of one-cycle its rising part (default 0.3 of the epochs)",
    )  # fmt: skip
    made.add_argument(
        "--step-epochs", type=float, default=30.0, metavar="EPOCHS", help="schedule step: how often (default 30)"
    )
    made.add_argument(
        "--milestones", type=numbers, default=(), metavar="E,E", help="schedule multi-step: after which epochs"
    )
    made.add_argument(
        "--step-factor", type=float, default=0.1, metavar="FACTOR",
        help="schedules step, multi-step and plateau: times what (default 0.1)",
    )  # fmt: skip
    made.add_argument("--power", type=float, default=1.0, help="schedule poly: of the remaining share (default 1)")
    made.add_argument(
        "--patience", type=int, default=10, metavar="EPOCHS",
        help="schedule plateau: epochs in a row that may pass without a better metric (default 10)",
    )  # fmt: skip
    made.add_argument(
        "--plateau-metric", metavar="METRIC",
        help="schedule plateau: loss, accuracy, test-accuracy, the name of a metric of the source, or test- and that "
        "name (default test-accuracy where there is one, else loss)",
    )  # fmt: skip


def add_bench(commands: Commands) -> None:
    made = command(
        commands, "bench", "Time a training step of mbc and of others in one run, on the same data and mathematics.",
        "  mbc bench resnet.mbc --set depth=50 --set batch=256 --set train.precision=bf16\n"
        "  mbc bench net.mbc --against torch,jax -o net.bench.json\n\n"
        "Each contender runs in a process of its own, one after the other; mbc runs first and last. All start from\n"
        "the same weights, and the losses of their first steps are compared: exit code 1 where they differ. Of each\n"
        "peer every setting that may be its best is tried (channels_last, cudnn.benchmark, fused optimizers, CUDA\n"
        "graphs, the modes of torch.compile), and the fastest counts. Peers that are not installed are named first.\n"
        "With --gpus N the batch is shared by N GPUs: PyTorch runs DDP, and everybody is timed on one of them, too.",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc)")
    made.add_argument("--against", type=peers, default=PEERS, metavar="P,P", help=f"peers (default {','.join(PEERS)})")
    made.add_argument(
        "--modes", type=modes, default=MODES, metavar="M,M",
        help=f"modes of torch.compile (default {','.join(MODES)}; the last may take half an hour)",
    )  # fmt: skip
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where there is one)"
    )
    add_sharing(made)
    made.add_argument("--seed", type=seed, default=0, help="of weights, inputs and dropout (default 0)")
    made.add_argument(
        "--blocks", type=blocks, default=20, metavar="N", help="blocks of steps; their median counts (default 20)"
    )
    made.add_argument(
        "--block", type=duration, default=0.2, metavar="TIME", help="least duration of a block (default 0.2s)"
    )
    made.add_argument(
        "--most", type=duration, default=1800.0, metavar="TIME", help="give up on a contender then (default 30min)"
    )
    made.add_argument(
        "--record", metavar="FILE",
        help="first write what each launch of mbc's step takes on the GPU, beside its prediction",
    )  # fmt: skip
    made.add_argument("-o", "--output", metavar="FILE", help="write everything as JSON here, too")
    add_planning(made)
    add_measuring(made)
    add_json(made)
