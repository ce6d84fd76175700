"""Arguments of the commands that run training steps."""

from __future__ import annotations

import argparse

from mbc.cli.arguments.argument_types import blocks, count, duration, modes, numbers, peers, seed, target
from mbc.cli.arguments.shared import Commands, add_json, add_measuring, add_planning, add_sharing, command
from mbc.options import MODES, PEERS
from mbc.train.schedule import KINDS, USUAL_RATES


def add_train(commands: Commands) -> None:
    """Add `mbc train`."""
    parser = command(
        commands, "train", "Train a network on data; a source is planned first, and built where there is a GPU.",
        "  mbc train net.mbc --data train.npz --test test.npz --epochs 20 --lr 0.1 --schedule cosine\n"
        "  mbc train resnet50 --data folder_of_npy --checkpoint resnet50.safetensors\n"
        "  mbc train resnet50 --data loader:batches --resume resnet50.safetensors\n"
        "  mbc train resnet50 --data folder_of_npy --gpus 2",
    )  # fmt: skip
    parser.add_argument("network_or_package", metavar="NET", help="a package or a source (.mbc)")
    parser.add_argument(
        "--data", required=True, metavar="DATA",
        help="an .npz or a folder of .npy with an array named like each input (or x and y, images and labels), "
        "or module:function that yields batches",
    )  # fmt: skip
    parser.add_argument("--test", metavar="DATA", help="data to test on after each epoch")
    parser.add_argument(
        "--settings", dest="settings_file", metavar="FILE",
        help="read options from a file that mbc tune -o wrote; options on the command line take precedence",
    )  # fmt: skip
    parser.add_argument(
        "--epochs", type=count, default=10, help="number of epochs, including those before --resume (default 10)"
    )
    parser.add_argument(
        "--target", type=target, metavar="METRIC=VALUE",
        help="end after the first epoch that reaches the target: accuracy=0.97 (on test data if given), loss=0.1, "
        "or a METRIC as for --plateau-metric",
    )  # fmt: skip
    usual = ", ".join(f"{rate} for {kind}" for kind, rate in USUAL_RATES.items())
    parser.add_argument(
        "--lr", type=float, metavar="RATE", help=f"learning rate, the largest of its schedule (default {usual})"
    )
    _add_schedule(parser)
    parser.add_argument("--seed", type=seed, help="seed of initial weights, shuffling and dropout (default 0)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where it can)"
    )
    parser.add_argument(
        "--gpus",
        type=count,
        metavar="N",
        help="start N ranks on this machine, one a GPU (with --device cpu by mpiexec)",
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="write weights and progress here after each epoch, and on Ctrl-C"
    )
    parser.add_argument("--checkpoint-every", type=count, metavar="STEPS", help="also write it after every STEPS steps")
    parser.add_argument(
        "--keep-best", nargs="?", const=True, metavar="METRIC",
        help="also keep the best epoch (w.best.safetensors beside w.safetensors) by METRIC, as for --plateau-metric",
    )  # fmt: skip
    parser.add_argument(
        "--evaluate", choices=("weights", "ema"), default="weights",
        help="test the weights after each epoch, or their moving averages, train { ema } (default weights)",
    )  # fmt: skip
    parser.add_argument(
        "--save-ema", metavar="FILE", help="write the moving averages here after each epoch, as weights"
    )
    parser.add_argument("--resume", metavar="FILE", help="continue from such a checkpoint, and by default write to it")
    parser.add_argument(
        "--weights", metavar="FILE", help="start with these weights (a file of mbc import), unless resumed"
    )
    parser.add_argument("--log", metavar="FILE", help="write the figures of each epoch here, as lines of JSON")
    parser.add_argument("--log-every", type=count, metavar="STEPS", help="also write figures after every STEPS steps")
    parser.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write these figures for TensorBoard (pip install 'mbc-compiler[tensorboard]')",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write a page with the plan and the curves of these figures at the end"
    )
    parser.add_argument(
        "--record", metavar="FILE",
        help="write measured and predicted times of each launch of a step on the GPU; mbc report --with shows them",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FOLDER", help="package to write when a source is built")
    add_planning(parser)
    add_measuring(parser)
    add_json(parser)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedule", choices=KINDS, default="constant", help="schedule of the learning rate (default constant)"
    )
    parser.add_argument(
        "--warmup", type=float, default=0.0, metavar="EPOCHS",
        help="raise the rate from 0 over EPOCHS; for one-cycle, the rising part (default 0.3 of the epochs)",
    )  # fmt: skip
    parser.add_argument(
        "--step-epochs",
        type=float,
        default=30.0,
        metavar="EPOCHS",
        help="schedule step: EPOCHS between two steps (default 30)",
    )
    parser.add_argument(
        "--milestones",
        type=numbers,
        default=(),
        metavar="E,E",
        help="schedule multi-step: epochs after which the rate changes",
    )
    parser.add_argument(
        "--step-factor", type=float, default=0.1, metavar="FACTOR",
        help="schedules step, multi-step and plateau: factor of the rate (default 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--power", type=float, default=1.0, help="schedule poly: exponent of the remaining share (default 1)"
    )
    parser.add_argument(
        "--patience", type=int, default=10, metavar="EPOCHS",
        help="schedule plateau: epochs without a better metric before the rate changes (default 10)",
    )  # fmt: skip
    parser.add_argument(
        "--plateau-metric", metavar="METRIC",
        help="schedule plateau: loss, accuracy, test-accuracy, the name of a metric of the source, or test- and that "
        "name (default test-accuracy where there is one, else loss)",
    )  # fmt: skip


def add_bench(commands: Commands) -> None:
    """Add `mbc bench`."""
    parser = command(
        commands, "bench", "Time a training step of mbc and of its peers in one run, with equal data and mathematics.",
        "  mbc bench resnet.mbc --set depth=50 --set batch=256 --set train.precision=bf16\n"
        "  mbc bench net.mbc --against torch,jax -o net.bench.json\n\n"
        "Each contender runs in a process of its own, one after the other; mbc runs first and last. All start from\n"
        "the same weights, and the losses of their first steps are compared: exit code 1 if they differ. For each\n"
        "peer, all promising settings are tried (channels_last, cudnn.benchmark, fused optimizers, CUDA graphs, the\n"
        "modes of torch.compile), and the fastest counts. Peers that are not installed are listed first. With --gpus\n"
        "N the batch is shared between N GPUs: PyTorch runs DDP, and all contenders are also timed on one GPU.",
    )  # fmt: skip
    parser.add_argument("source", metavar="NET", help="the network (.mbc)")
    parser.add_argument(
        "--against", type=peers, default=PEERS, metavar="P,P", help=f"peers (default {','.join(PEERS)})"
    )
    parser.add_argument(
        "--modes", type=modes, default=MODES, metavar="M,M",
        help=f"modes of torch.compile (default {','.join(MODES)}; the last may take half an hour)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where there is one)"
    )
    add_sharing(parser)
    parser.add_argument("--seed", type=seed, default=0, help="seed of weights, inputs and dropout (default 0)")
    parser.add_argument(
        "--blocks", type=blocks, default=20, metavar="N", help="blocks of steps; their median counts (default 20)"
    )
    parser.add_argument(
        "--block", type=duration, default=0.2, metavar="TIME", help="minimum duration of a block (default 0.2s)"
    )
    parser.add_argument(
        "--most", type=duration, default=1800.0, metavar="TIME", help="time limit of a contender (default 30min)"
    )
    parser.add_argument(
        "--record", metavar="FILE",
        help="first write measured and predicted times of each launch of mbc's step on the GPU",
    )  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", help="also write all results here as JSON")
    add_planning(parser)
    add_measuring(parser)
    add_json(parser)
