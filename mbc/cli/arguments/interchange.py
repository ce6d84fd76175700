"""Arguments of the commands that read and write other frameworks' files."""

from __future__ import annotations

from mbc.cli.arguments.argument_types import count, setting
from mbc.cli.arguments.shared import Commands, add_json, command

# Those of `mbc.interchange.write`, which help does not import.
LOSSES = ("softmax_cross_entropy", "binary_cross_entropy", "mse", "l1", "smooth_l1")


def add_import(commands: Commands) -> None:
    made = command(
        commands, "import", "Write the source and the weights of a PyTorch or ONNX model.",
        "  mbc import model.pt2 -o net.mbc\n"
        "  mbc import model.pt2 -o net.mbc --loss mse\n"
        "  mbc import model.onnx -o net.mbc --batch 32\n"
        "  mbc train net.mbc --data train.npz --weights net.safetensors\n\n"
        "In Python: torch.export.save(torch.export.export(model.train(), (images,)), 'model.pt2').\n"
        "The file is read without PyTorch, and nothing of it is executed.",
    )  # fmt: skip
    made.add_argument("model", metavar="MODEL", help="an exported program (.pt2), or an ONNX model (.onnx)")
    made.add_argument("-o", "--output", required=True, metavar="FILE", help="the source to write (.mbc)")
    made.add_argument("--weights", metavar="FILE", help="the weights to write (default: beside it, .safetensors)")
    made.add_argument("--name", help="of the network (default: that of the source's file)")
    made.add_argument(
        "--loss", choices=LOSSES, default=LOSSES[0], help="of every output and a target (default %(default)s)"
    )
    made.add_argument(
        "--batch", type=count, metavar="N", help="rows of a mini-batch, where an ONNX model leaves them open"
    )
    made.add_argument(
        "--check", action="store_true",
        help="compare with the model in float64, by torch, which loads the file; of ONNX outputs alone, by onnx, by "
        "default where that takes less than 10 s",
    )  # fmt: skip
    made.add_argument("--flat", action="store_true", help="without blocks: every layer by its whole path")
    made.add_argument("--force", action="store_true", help="replace files that are there")
    add_json(made)


def add_export(commands: Commands) -> None:
    made = command(
        commands, "export", "Write trained weights as a state_dict, or the trained network as an ONNX model.",
        "  mbc export trained.safetensors --like net.safetensors -o model.safetensors\n"
        "  mbc export trained.safetensors --like net.mbc -o model.onnx\n\n"
        "In PyTorch: model.load_state_dict(safetensors.torch.load_file('model.safetensors')).",
    )  # fmt: skip
    made.add_argument("checkpoint", metavar="CHECKPOINT", help="what mbc train or Module.save wrote (.safetensors)")
    made.add_argument(
        "--like", required=True, metavar="FILE", help="the weights that mbc import wrote; for ONNX the source"
    )
    made.add_argument(
        "-o", "--output", required=True, metavar="FILE",
        help="the state_dict to write (.safetensors), or the ONNX model (.onnx)",
    )  # fmt: skip
    made.add_argument(
        "--set", dest="settings", action="append", default=[], type=setting, metavar="NAME=VALUE",
        help="set a parameter of the source, as it was trained (ONNX)",
    )  # fmt: skip
    made.add_argument("--force", action="store_true", help="replace a file that is there")
    add_json(made)
