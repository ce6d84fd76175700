"""Arguments of `mbc tune`."""

from __future__ import annotations

from mbc.cli.arguments.argument_types import count, positive, seed, share, size, target
from mbc.cli.arguments.parser import Once
from mbc.cli.arguments.shared import Commands, add_json, add_planning, command
from mbc.tune.rates import RULES


def add_tune(commands: Commands) -> None:
    """Add `mbc tune`."""
    parser = command(
        commands, "tune", "Find the mini-batch that trains fastest within a memory budget, and its learning rate.",
        "  mbc tune net.mbc --data train.npz --epochs 20 -o tuned.settings\n"
        "  mbc train net.mbc --data train.npz --settings tuned.settings\n"
        "  mbc tune resnet.mbc --dry-run --memory 12GB --gpus 2 --noise-scale 4000\n"
        "  mbc tune net.mbc --data train.npz --test test.npz --target accuracy=0.97\n\n"
        "A complete plan is made for each batch, so that it fits. Goodput is the planned images/s times the\n"
        "statistical efficiency of a row, relative to the base batch (the source's), by the gradient noise scale.",
    )  # fmt: skip
    parser.add_argument("source", metavar="NET", help="the network (.mbc)")
    parser.add_argument("--data", metavar="DATA", help="data to train on, as for mbc train")
    parser.add_argument("--test", metavar="DATA", help="test data for --target")
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="the budget (default: the network's memory.device, or the GPU's)"
    )
    parser.add_argument(
        "--gpus", dest="shared_by", type=count, default=1, action=Once, metavar="N",
        help="try up to N GPUs, each within the budget, that share a mini-batch (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--epochs",
        type=count,
        default=10,
        help="epochs of the training to tune for; with --target their maximum (default 10)",
    )
    parser.add_argument(
        "--target", type=target, metavar="METRIC=VALUE",
        help="train with the tuned settings until an epoch reaches the target, and write the number of epochs: "
        "accuracy=0.97, loss=0.1, or a metric of the source",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="only plan, without training")
    parser.add_argument(
        "--lr", type=positive, metavar="RATE", help="learning rate of the base batch (default: found by a range test)"
    )
    parser.add_argument(
        "--noise-scale",
        type=positive,
        metavar="ROWS",
        help="gradient noise scale (default: measured in training steps)",
    )
    parser.add_argument(
        "--rule", choices=RULES,
        help="rule that scales the rate with the batch (default adascale; sqrt for adamw and lamb)",
    )  # fmt: skip
    parser.add_argument(
        "--most-share", type=share, default=0.25, metavar="SHARE",
        help="largest share of the training's steps that tuning may run, at most 300 (default 0.25)",
    )  # fmt: skip
    parser.add_argument("--rows", type=count, metavar="N", help="rows of an epoch, where --data is a function")
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of initial weights, shuffling and dropout (default 0)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where it can)"
    )
    parser.add_argument("--state", metavar="FILE", help="save progress here, and continue from it")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the settings for mbc train --settings here")
    add_planning(parser)
    add_json(parser)
