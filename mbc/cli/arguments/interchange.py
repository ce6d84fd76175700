"""Arguments of the commands that read and write other frameworks' files."""

from __future__ import annotations

from mbc.cli.arguments.argument_types import count, setting
from mbc.cli.arguments.shared import Commands, add_json, command

# Losses of `mbc.interchange.write`, repeated here because help does not import that module.
LOSSES = ("softmax_cross_entropy", "binary_cross_entropy", "mse", "l1", "smooth_l1", "dice", "tversky", "focal")


def add_import(commands: Commands) -> None:
    """Add `mbc import`."""
    parser = command(
        commands, "import", "Write the source and the weights of a PyTorch or ONNX model.",
        "  mbc import model.pt2 -o net.mbc\n"
        "  mbc import model.pt2 -o net.mbc --loss mse\n"
        "  mbc import model.onnx -o net.mbc --batch 32\n"
        "  mbc train net.mbc --data train.npz --weights net.safetensors\n\n"
        "In Python: torch.export.save(torch.export.export(model.train(), (images,)), 'model.pt2').\n"
        "The file is read without PyTorch, and no code in it is executed.",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", help="an exported program (.pt2), or an ONNX model (.onnx)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the source to write (.mbc)")
    parser.add_argument("--weights", metavar="FILE", help="the weights to write (default: beside it, .safetensors)")
    parser.add_argument("--name", help="name of the network (default: that of the file)")
    parser.add_argument(
        "--loss", choices=LOSSES, default=LOSSES[0], help="loss of each output against a target (default %(default)s)"
    )
    parser.add_argument(
        "--batch", type=count, metavar="N", help="rows of a mini-batch, where an ONNX model leaves them open"
    )
    parser.add_argument(
        "--check", action="store_true",
        help="compare with the model in float64: torch loads a .pt2 file; onnx compares the outputs of an ONNX model, "
        "also without this option where that takes less than 10 s",
    )  # fmt: skip
    parser.add_argument("--flat", action="store_true", help="write no blocks: name every layer by its whole path")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    add_json(parser)


def add_export(commands: Commands) -> None:
    """Add `mbc export`."""
    parser = command(
        commands, "export", "Write trained weights as a state_dict, or the trained network as an ONNX model.",
        "  mbc export trained.safetensors --like net.safetensors -o model.safetensors\n"
        "  mbc export trained.safetensors --like net.mbc -o model.onnx\n\n"
        "In PyTorch: model.load_state_dict(safetensors.torch.load_file('model.safetensors')).",
    )  # fmt: skip
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="what mbc train or Module.save wrote (.safetensors)")
    parser.add_argument(
        "--like", required=True, metavar="FILE", help="the weights that mbc import wrote; for ONNX the source"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE",
        help="the state_dict to write (.safetensors), or the ONNX model (.onnx)",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], type=setting, metavar="NAME=VALUE",
        help="set a parameter of the source to its value in training (ONNX)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    add_json(parser)
