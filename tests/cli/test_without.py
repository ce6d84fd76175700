"""`--without`: techniques left out of a plan, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mbc.cli.arguments import parse
from mbc.cli.arguments.shared import options

ROOM = ("--gpu", "v100", "--set", "batch=256", "--set", "memory.device=14GB")


def worked(mbc, *arguments):
    """Return the micro-batches of every operation, and the largest workspace."""
    Path("wide.mbc").write_text(SOURCE)
    operations = mbc("show", "wide.mbc", *ROOM, "--json", *arguments).json["train"]["operations"]
    return {o["name"]: tuple(o["micro_batches"]) for o in operations}, max(o["workspace_bytes"] for o in operations)


# AlexNet's second convolution, on a GPU whose fast kernels for fp32 need workspace.
SOURCE = """\
network wide(batch = 256, classes = 10) {
  input image[batch, 3, 224, 224] : float
  input target[batch] : class
  x = image |> conv(64, 11, stride=4, pad=2, bias=true) |> relu |> maxpool(3, 2)
  logits = x |> conv(192, 5, pad=2, bias=true) |> relu |> global_avgpool |> linear(classes)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9) }
"""


def test_without_micro_batches_nothing_is_divided(mbc):
    divided, _ = worked(mbc, "--workspace-limit", "64MiB")
    assert any(len(rows) > 1 for rows in divided.values())
    whole, _ = worked(mbc, "--workspace-limit", "64MiB", "--without", "micro_batches")
    assert all(len(rows) == 1 for rows in whole.values())


def test_without_workspace_each_takes_the_least(mbc):
    _, most = worked(mbc)
    _, least = worked(mbc, "--without", "workspace")
    assert least < most


def test_techniques_are_named_together_or_one_by_one():
    def of(*words):
        return options(parse(["show", "net.mbc", *words])).without

    assert of() == frozenset()
    assert (
        of("--without", "offload, micro_batches")
        == of("--without", "offload", "--without", "micro_batches")
        == {"offload", "micro_batches"}
    )


def test_an_unknown_technique(capsys):
    with pytest.raises(SystemExit):
        parse(["show", "net.mbc", "--without", "magic"])
    assert "'magic' is none of offload, recompute, micro_batches, workspace" in capsys.readouterr().err
