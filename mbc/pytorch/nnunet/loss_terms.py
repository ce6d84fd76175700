"""nnU-Net's loss: Dice and cross entropy of each output, with the weights of deep supervision."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

torch: Any = importlib.import_module("torch")
F: Any = torch.nn.functional
CHUNK_ELEMENTS = 1 << 22  # of an output that is judged at once, so that its temporaries stay below 200 MB


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The numbers that define nnU-Net's loss.

    Attributes:
        weights: The weight of each output.
        regions: Whether outputs are regions, each with a sigmoid, or classes with a softmax.
        dice: The factor of the Dice index.
        cross_entropy: The factor of the cross entropy.
        smooth: The number added to numerator and denominator of the Dice index.
        batch: Whether a class has one index over the mini-batch.
        background: Whether class 0 has an index.
    """

    weights: tuple[float, ...]
    regions: bool
    dice: float
    cross_entropy: float
    smooth: float
    batch: bool
    background: bool

    @property
    def losses(self) -> list[tuple[str, float] | None]:
        """The loss of each output for `from_torch`; None for an output without a weight."""
        settings = {
            "background": str(self.background).lower(),
            "batch": str(self.batch).lower(),
            "sigmoid": str(self.regions).lower(),
            "cross_entropy": repr(self.cross_entropy / self.dice),
        }
        text = f"dice({self.smooth!r}, {', '.join(f'{name}={value}' for name, value in settings.items())})"
        return [(text, weight * self.dice) if weight else None for weight in self.weights]

    @property
    def offset(self) -> float:
        """nnU-Net's loss less the language's, which counts from a Dice index of 1."""
        return -self.dice * sum(self.weights)

    def targets(self, given: Sequence[Any]) -> list[Any]:
        """Return the targets of a step of `from_torch`."""
        weighted = [target for target, weight in zip(given, self.weights, strict=True) if weight]
        return [target.float() if self.regions else target[:, 0].int() for target in weighted]

    def validate(self, outputs: Sequence[Any], targets: Sequence[Any]) -> dict[str, Any]:
        """Return the results of nnU-Net's `validation_step`: the loss, and counts of voxels of each class or region.

        nnU-Net's own step keeps ten tensors of the size of the first output. Here the outputs are judged in parts.
        """
        loss, counts = 0.0, None
        for output, target, weight in zip(outputs, targets, self.weights, strict=True):
            if weight or counts is None:
                sums, entropy = self._sums(output, target)
                counts = sums[2:].sum(1) if counts is None else counts
                loss += weight * self._loss(sums[:3], entropy)
        assert counts is not None
        right, labelled, predicted = (
            row if self.regions else row[1:] for row in counts.float().cpu().numpy()[[1, 0, 2]]
        )
        return {
            "loss": torch.as_tensor(loss).float().cpu().numpy(),
            "tp_hard": right,
            "fp_hard": predicted - right,
            "fn_hard": labelled - right,
        }

    def _loss(self, sums: Any, entropy: Any) -> Any:
        """Return the loss of one output from its cross entropy and the sums of p, p y and y of each image and class."""
        if not self.background:
            sums = sums[:, :, 1:]
        if self.batch:
            sums = sums.sum(1, keepdim=True)
        predicted, common, labelled = sums
        index = (2 * common + self.smooth) / (predicted + labelled + self.smooth).clamp_min(1e-8)
        return self.cross_entropy * entropy - self.dice * index.mean()

    def _sums(self, output: Any, target: Any) -> tuple[Any, Any]:
        """Return sums over the voxels of an output, for each image and class, and its mean cross entropy.

        The sums are those of p, p y, y, of voxels that are predicted rightly, and of predicted ones, in float64.
        """
        sums, entropy = torch.zeros((5, *output.shape[:2]), dtype=torch.float64, device=output.device), 0.0
        for part, labels in _chunks(output, target):
            if self.regions:
                one_hot, p = labels.float(), torch.sigmoid(part)
                chosen = (p > 0.5).float()
                entropy += F.binary_cross_entropy_with_logits(part, one_hot, reduction="sum").double()
            else:
                one_hot = torch.zeros_like(part).scatter_(1, labels.long(), 1)
                p = torch.softmax(part, 1)
                chosen = torch.zeros_like(part).scatter_(1, part.argmax(1, keepdim=True), 1)
                entropy += F.cross_entropy(part, labels[:, 0].long(), reduction="sum").double()
            for row, values in enumerate((p, p * one_hot, one_hot, chosen * one_hot, chosen)):
                sums[row] += values.flatten(2).sum(2)
        elements = output.numel() if self.regions else output[:, 0].numel()
        return sums, entropy / elements


def _chunks(output: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """Yield parts of an output along its first spatial axis, in float32, with their targets."""
    rows = max(1, CHUNK_ELEMENTS // output[:, :, :1].numel())
    for part, labels in zip(output.split(rows, 2), target.split(rows, 2), strict=True):
        yield part.float(), labels


def terms_of(loss: Any) -> LossTerms | None:
    """Return the terms of a loss that nnU-Net builds by itself; None for any other loss, and with an ignored label.

    nnU-Net has a gradient for outputs without a labelled voxel, which the language's loss does not define.
    """
    compound: Any = importlib.import_module("nnunetv2.training.loss.compound_losses")
    dice: Any = importlib.import_module("nnunetv2.training.loss.dice")
    supervised: Any = importlib.import_module("nnunetv2.training.loss.deep_supervision")
    weights: tuple[float, ...] = (1.0,)
    if type(loss) is supervised.DeepSupervisionWrapper:
        weights, loss = tuple(float(weight) for weight in loss.weight_factors), loss.loss
    regions = type(loss) is compound.DC_and_BCE_loss
    if not regions and type(loss) is not compound.DC_and_CE_loss:
        return None
    entropy, index = loss.ce, loss.dc
    ignores = loss.use_ignore_label if regions else loss.ignore_label is not None
    plain = entropy.weight is None and entropy.reduction == "mean"
    plain &= entropy.pos_weight is None if regions else entropy.label_smoothing == 0
    if (
        ignores
        or not plain
        or type(index) is not dice.MemoryEfficientSoftDiceLoss
        or index.ddp
        or loss.weight_dice <= 0
    ):
        return None
    return LossTerms(
        weights, regions, float(loss.weight_dice), float(loss.weight_ce), float(index.smooth), bool(index.batch_dice),
        bool(index.do_bg),
    )  # fmt: skip
