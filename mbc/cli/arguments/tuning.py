"""Arguments of `mbc tune`."""

from __future__ import annotations

from mbc.cli.arguments.argument_types import count, positive, seed, share, size, target
from mbc.cli.arguments.parser import Once
from mbc.cli.arguments.shared import Commands, add_json, add_planning, command
from mbc.tune.rates import RULES


def add_tune(commands: Commands) -> None:
    made = command(
        commands, "tune", "Find the mini-batch that trains fastest within a memory budget, and its learning rate.",
        "  mbc tune net.mbc --data train.npz --epochs 20 -o tuned.settings\n"
        "  mbc train net.mbc --data train.npz --settings tuned.settings\n"
        "  mbc tune resnet.mbc --dry-run --memory 12GB --gpus 2 --noise-scale 4000\n"
        "  mbc tune net.mbc --data train.npz --test test.npz --target accuracy=0.97\n\n"
        "Each batch is planned whole, so that it fits. Goodput is images/s as planned times what a row is worth\n"
        "beside one of the base batch, which is that of the source, by the gradient noise scale.",
    )  # fmt: skip
    made.add_argument("source", metavar="NET", help="the network (.mbc)")
    made.add_argument("--data", metavar="DATA", help="data to train on, as mbc train takes them")
    made.add_argument("--test", metavar="DATA", help="data that --target is told by")
    made.add_argument(
        "--memory", type=size, metavar="SIZE", help="the budget (default: the network's memory.device, or the GPU's)"
    )
    made.add_argument(
        "--gpus", dest="shared_by", type=count, default=1, action=Once, metavar="N",
        help="try up to N GPUs, each within the budget, that share a mini-batch (default 1)",
    )  # fmt: skip
    made.add_argument(
        "--epochs", type=count, default=10, help="of the training to tune for; with --target the most (default 10)"
    )
    made.add_argument(
        "--target", type=target, metavar="METRIC=VALUE",
        help="train as tuned, on as many GPUs as the batch is taken for, until an epoch reaches it, and write how many "
        "epochs that takes: accuracy=0.97, loss=0.1, or a metric of the source",
    )  # fmt: skip
    made.add_argument("--dry-run", action="store_true", help="plan alone, and train nothing")
    made.add_argument("--lr", type=positive, metavar="RATE", help="of the base batch (default: by a range test)")
    made.add_argument(
        "--noise-scale", type=positive, metavar="ROWS", help="do not measure it (default: measured while training)"
    )
    made.add_argument(
        "--rule", choices=RULES,
        help="how the rate changes with the batch (default adascale; of adamw and lamb sqrt)",
    )  # fmt: skip
    made.add_argument(
        "--most-share", type=share, default=0.25, metavar="SHARE",
        help="of the training that the tuning's own steps may take, 300 at most (default 0.25)",
    )  # fmt: skip
    made.add_argument("--rows", type=count, metavar="N", help="of an epoch, where --data is a function")
    made.add_argument("--seed", type=seed, default=0, help="of initial weights, shuffling and dropout (default 0)")
    made.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where it can)"
    )
    made.add_argument("--state", metavar="FILE", help="write what is found here, and go on from it")
    made.add_argument("-o", "--output", metavar="FILE", help="write the settings for mbc train --settings here")
    add_planning(made)
    add_json(made)
