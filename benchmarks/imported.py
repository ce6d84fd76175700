"""Networks of torchvision and timm, imported unchanged, and the distance of their results from PyTorch's.

Each network is exported in training mode and imported. Its outputs in evaluation mode and the gradients of a step are
compared with torch's. Needs torch, torchvision and timm, but no GPU.

The list has no networks with attention, of which `--attention` compares two at 224 pixels, and of one family no sizes
that only repeat others. A network counts as imported if its source compiles to a training graph and its output is
within 1e-5 of torch's. If torch's own float32 output is further than that from float64, mbc's error may be at most
twice torch's. The limits of `gradients.py` for networks hold for gradients. A check that takes longer than `--seconds`
is left out; without the check of its output, a network counts as imported with `checked` false.

    python benchmarks/imported.py [--only NAME,NAME] [--size 96] [--seconds 60]
    python benchmarks/imported.py --attention [--seconds 600]

Rows are written one by one. Another call continues with rows that are missing, failed or lack a check, smallest
networks first. Complete rows stay, with the digest of the code that computed them, unless `--again` is set.
"""

from __future__ import annotations

import argparse
import copy
import gc
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gradients import TIMES_TORCH
from imported_gradients import drop_nothing, exact, keeps_exact, keeps_single, single
from record import attempt, results, show, start

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.importing import ImportedModel, import_model
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.ops import KINDS
from mbc.ops.base import Array, Call
from mbc.passes.training_step import differentiate
from mbc.source import Source

LARGEST_ERROR = 1e-5
COLUMNS = ("error", "gradient_error", "torch_gradient_error", "exact_gradient_error")
CHECKS = frozenset(("error", "gradient_error", "exact_gradient_error"))
# Classifiers of 6 x 6 or 7 x 7 pixels, which smaller images would have to be pooled up to.
WHOLE_SIZE, WHOLE = 224, ("alexnet", "vgg")
TORCHVISION = (
    "alexnet", "convnext_tiny", "convnext_small", "densenet121", "densenet201", "efficientnet_b0",
    "efficientnet_b3", "efficientnet_v2_s", "googlenet", "inception_v3", "mnasnet0_5", "mnasnet1_0",
    "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_400mf", "regnet_x_1_6gf",
    "regnet_y_400mf", "regnet_y_1_6gf", "resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1", "vgg11", "vgg16_bn",
    "wide_resnet50_2",
)  # fmt: skip
ATTENTION = ("torchvision/vit_b_16", "torchvision/swin_t")
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large")
TIMM = (
    "resnet18", "resnet50", "resnet26d", "resnet50d", "resnetv2_50", "resnetv2_50x1_bit", "resnext50_32x4d",
    "seresnet50", "ecaresnet50t", "skresnet18", "res2net50_26w_4s", "resnest14d", "resnetrs50", "efficientnet_b0",
    "efficientnet_lite0", "tf_efficientnet_b0", "tf_efficientnetv2_b0", "efficientnetv2_rw_t", "mobilenetv2_100",
    "mobilenetv3_small_100", "mobilenetv3_large_100", "mobilenetv4_conv_small", "mnasnet_100", "semnasnet_075",
    "fbnetc_100", "spnasnet_100", "mixnet_s", "ghostnet_100", "hardcorenas_a", "lcnet_050", "tinynet_e",
    "rexnet_100", "regnetx_002", "regnety_002", "regnetz_b16", "densenet121", "vgg11_bn", "inception_v3",
    "inception_v4", "inception_resnet_v2", "xception41", "dpn68", "dla34", "hrnet_w18_small", "cspdarknet53",
    "cspresnet50", "darknet53", "repvgg_a0", "mobileone_s0", "convnext_atto", "convnext_tiny", "convnextv2_atto",
    "nf_resnet50", "dm_nfnet_f0", "selecsls42b", "ese_vovnet19b_dw", "gernet_s", "hgnet_tiny",
    "inception_next_tiny", "repghostnet_050",
)  # fmt: skip


NETWORKS = (
    *(f"torchvision/{name}" for name in TORCHVISION),
    *(f"segmentation/{name}" for name in SEGMENTATION),
    *(f"timm/{name}" for name in TIMM),
)


def size_of(name: str, size: int) -> int:
    """Return the image size of a network, in pixels: `size`, unless the network takes only one size."""
    return WHOLE_SIZE if name in ATTENTION or name.rpartition("/")[2].startswith(WHOLE) else size


def built(name: str) -> Any:
    """Return the network `family/name` with random weights."""
    family, _, own = name.partition("/")
    if family == "timm":
        import timm  # pyright: ignore[reportMissingImports]

        return timm.create_model(own, pretrained=False)
    import torchvision  # pyright: ignore[reportMissingImports]

    if family == "segmentation":
        return getattr(torchvision.models.segmentation, own)(weights=None, weights_backbone=None)
    # Their outputs with auxiliary heads are tuples with names, which torch.export cannot save.
    more = {"aux_logits": False, "init_weights": False} if own in ("googlenet", "inception_v3") else {}
    return getattr(torchvision.models, own)(weights=None, **more)


def prepared(name: str) -> Any:
    """Return a network with seeded random weights.

    Statistics are random and no weights are all zero, so that no error is multiplied by 0.
    """
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    network = built(name)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for statistic, low, high in ((module.running_mean, -0.2, 0.2), (module.running_var, 0.5, 1.5)):
                if statistic is not None:
                    statistic.uniform_(low, high)
    with torch.no_grad():  # the head of a vision transformer starts with zeros
        for parameter in network.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=0.05)
    return network


class TooLong(Exception):
    """Raised for a check that takes longer than it may."""


@contextmanager
def limited(seconds: float) -> Generator[None]:
    """Raise TooLong if the body runs longer than `seconds`; raise it at once if `seconds` is 0."""
    if seconds <= 0:
        raise TooLong

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled(model: ImportedModel) -> TrainingGraph:
    """Return the training graph of the source, in fp32."""
    created = lower(parse(Source("imported", model.source)))
    return differentiate(created.network, created.optimizer, Precision.FP32)


def forward(graph: TrainingGraph, model: ImportedModel, images: Array) -> Array:
    """Return the first output of the inference graph, in fp32."""
    states = {name: np.asarray(array, np.float32) for name, array in model.network.arrays.items()}
    env: dict[str, Array] = {graph.infer_inputs[0]: images, **states}
    for op in graph.infer:
        outputs = tuple(graph.values[v].type for v in op.outputs)
        evaluate = KINDS[op.kind].evaluate
        assert evaluate is not None
        call = Call(outputs, 0, graph.batch, Precision.FP32)
        env.update(zip(op.outputs, evaluate(op.attributes, [env[v] for v in op.inputs], call), strict=True))
    return env[graph.infer_outputs[0]]


def imported(name: str, size: int, seconds: float, held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the length of the source and the distances of outputs and gradients from torch's, or the refusal.

    `held` has the checks of earlier calls. Of the missing checks, those that take no longer than `seconds` are made.
    """
    import torch  # pyright: ignore[reportMissingImports]

    network = prepared(name)
    size = size_of(name, size)
    images = torch.randn(2, 3, size, size)
    try:
        created = exported(network, name, images)
    except MbcError as error:
        return {"imported": False, "refused": str(error)}
    compiled(created)

    @cache
    def quiet() -> tuple[Any, ImportedModel]:
        """Return the model and its import without layers that draw random numbers."""
        return network, exported(network, name, images) if drop_nothing(network) else created

    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "error": lambda: evaluation_errors(network, created, images),
        "gradient_error": lambda: single(*quiet()),
        "exact_gradient_error": lambda: exact(*quiet()),
    }
    row: dict[str, Any] = {"lines": created.source.count("\n"), "operations": len(created.network.steps), **held}
    for column, check in checks.items():
        if column not in held:
            with suppress(TooLong), limited(seconds):
                row |= check()
    return {**row, "imported": evaluates(row), "checked": "error" in row}


def evaluates(row: Mapping[str, Any]) -> bool:
    """Return whether the checks that were made show that a network computes torch's result."""
    close = row.get("error", 0.0) <= LARGEST_ERROR
    own = row.get("torch_float64_error", 0.0)
    return close or (own > LARGEST_ERROR and row["float64_error"] <= TIMES_TORCH * own)


def evaluation_errors(model: Any, imported_model: ImportedModel, images: Any) -> dict[str, float]:
    """Return the error of the first output relative to torch's.

    If the error is large, also return the errors of mbc's and torch's outputs relative to torch's output in float64.
    """
    result = forward(compiled(imported_model), imported_model, images.numpy())
    wanted = evaluated(model, images)
    if not wanted.any():
        raise RuntimeError("torch's result is 0 everywhere, beside which nothing can be compared")
    errors = {"error": distance(result, wanted)}
    if errors["error"] > LARGEST_ERROR:
        exact = evaluated(copy.deepcopy(model).double(), images.double())
        errors |= {"float64_error": distance(result, exact), "torch_float64_error": distance(wanted, exact)}
    return errors


def evaluated(model: Any, images: Any) -> Array:
    """Return torch's first output in evaluation mode."""
    import torch  # pyright: ignore[reportMissingImports]

    with torch.no_grad():
        created = model.eval()(images)
    return (next(iter(created.values())) if isinstance(created, dict) else created).cpu().numpy()


def distance(result: Array, wanted: Array) -> float:
    """Return the relative L2 distance of two arrays."""
    return float(np.linalg.norm(result - wanted) / np.linalg.norm(wanted))


def exported(model: Any, name: str, images: Any) -> ImportedModel:
    """Return the model exported in training mode and imported."""
    import torch  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt2"
        torch.export.save(torch.export.export(model.train(), (images,)), file)
        return import_model(file, name.partition("/")[2])


def operations(refused: str) -> list[str]:
    """Return the operations that a refusal names."""
    result = [line.split(": ")[1] for line in refused.splitlines() if line.startswith("  ") and ": aten." in line]
    return sorted(set(result))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names with their family, such as timm/resnet50")
    parser.add_argument("--size", type=int, default=96, help="of the images (default 96)")
    parser.add_argument("--seconds", type=float, default=60, help="a network's check may take (default 60)")
    parser.add_argument("--attention", action="store_true", help=f"{', '.join(ATTENTION)} at {WHOLE_SIZE} pixels")
    parser.add_argument("--again", action="store_true", help="take none of the rows that are there")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = [*ATTENTION] if arguments.attention else [*NETWORKS]
    names = arguments.only.split(",") if arguments.only else names
    size, file = (WHOLE_SIZE, "imported_attention") if arguments.attention else (arguments.size, "imported")
    kept = results(file, again=arguments.again, size=size)
    for name in sorted(names, key=lambda name: kept.rows.get(name, {}).get("operations", 0)):
        held = kept.rows.get(name, {}) if kept.done(name) else {}
        if held.keys() >= CHECKS:
            continue
        held = {} if "code" in held else held  # checks of one row are of one code
        if "refused" in held or (held and arguments.seconds <= 0):
            continue
        row = attempt(lambda name=name, held=held: imported(name, size, arguments.seconds, held), name)
        kept.put(row)
        gc.collect()
        said = row.get("failed") or ", ".join(operations(row.get("refused", "")))
        figures = [format(row[key], ".1e") for key in COLUMNS if key in row]
        print(f"{name:44} {said or ' '.join(figures) or 'not checked'}", flush=True)
    rows = list(kept.rows.values())
    missing = Counter(op for row in rows for op in operations(row.get("refused", "")))
    count = sum(bool(row.get("imported")) for row in rows)
    checked = sum(bool(row.get("imported")) and bool(row.get("checked")) for row in rows)
    singles = [keeps_single(row) for row in rows if "gradient_error" in row]
    exacts = [keeps_exact(row) for row in rows if "exact_gradient_error" in row]
    kept.more |= {
        "missing": dict(missing.most_common()), "imported": count, "checked": checked, "of": len(rows),
        "fp32_gradients": sum(singles), "fp32_gradients_of": len(singles),
        "fp64_gradients": sum(exacts), "fp64_gradients_of": len(exacts),
    }  # fmt: skip
    kept.arrange(names)
    show(rows, ("name", "imported", "lines", "operations", *COLUMNS))
    print(f"{count} of {len(rows)} networks, {checked} compared; operations that others lack: {dict(missing)}")
    print(f"gradients within the rule: fp64 {sum(exacts)} of {len(exacts)}, fp32 {sum(singles)} of {len(singles)}")


if __name__ == "__main__":
    start(main)
