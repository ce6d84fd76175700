"""Arguments of `mbc predict`."""

from __future__ import annotations

from mbc.cli.arguments.argument_types import spatial_axes, tolerance
from mbc.cli.arguments.shared import Commands, add_json, add_planning, command
from mbc.options import AVERAGES, WEIGHTINGS


def add_predict(commands: Commands) -> None:
    """Add `mbc predict`."""
    parser = command(
        commands, "predict", "Predict images or volumes of any size with trained weights, window by window.",
        "  mbc predict unet --weights unet.safetensors --data scan.nii.gz -o predicted --mirror 0,1,2\n"
        "  mbc predict resnet50 --weights resnet50.safetensors --data test.npz --probabilities -o predicted",
    )  # fmt: skip
    add = parser.add_argument
    add("network_or_package", metavar="NET", help="a package or a source (.mbc)")
    add("--weights", required=True, metavar="FILE", help="trained weights: a checkpoint of mbc train")
    add("--data", required=True, metavar="PATH", help="an .npy, .npz, .nii or .nii.gz, or a folder of such files")
    add("--labels", metavar="PATH", help="class numbers of the data: print the Dice score of each class")
    add("-o", "--output", required=True, metavar="FOLDER", help="write the results here, by the names of the files")
    add("--force", action="store_true", help="replace existing files")
    add("--probabilities", action="store_true", help="write probabilities, not class numbers")
    add("--overlap", type=tolerance, default=0.5, metavar="SHARE", help="share of a window in the next (default 0.5)")
    add("--weighting", choices=WEIGHTINGS, default=WEIGHTINGS[0], help="of a window's positions (default %(default)s)")
    add("--mirror", type=spatial_axes, default=(), metavar="A,A", help="average over copies mirrored along 0, 1, 2")
    add("--average", choices=AVERAGES, default=AVERAGES[0], help="values that are averaged (default %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto: a GPU where it can)")
    add_planning(parser)
    add_json(parser)
