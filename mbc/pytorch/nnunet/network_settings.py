"""Settings of `network.mbc` for a configuration of nnU-Net, and larger and smaller patches of it."""

from __future__ import annotations

from pathlib import Path

from mbc.pytorch.nnunet.plans_file import Configuration, Dataset, Sizes
from mbc.source import Source

LEAST_EDGE = 4  # extent at the lowest resolution below which nnU-Net's planners do not go

Settings = tuple[tuple[str, str], ...]


def source() -> Source:
    """Return the source of nnU-Net's networks."""
    return Source("nnunet.mbc", Path(__file__).with_name("network.mbc").read_text(encoding="utf-8"))


def settings_of(configuration: Configuration, dataset: Dataset) -> Settings:
    """Return the settings of a configuration's network as options of the compiler."""
    c = configuration
    values = {
        "batch": c.batch, "patch": c.patch, "classes": dataset.classes, "features": c.features, "kernels": c.kernels,
        "channels": dataset.channels + c.cascaded * dataset.foreground, "strides": c.strides, "blocks": c.blocks,
        "decoder_convs": c.decoder_convs, "residual_encoder": c.residual, "bias": c.bias, "batch_dice": c.batch_dice,
        "regions": dataset.regions,
    }  # fmt: skip
    return tuple((name, str(value).lower()) for name, value in values.items())


def patches(configuration: Configuration) -> tuple[Sizes, ...]:
    """Return patches that the network takes, the smallest first, the configuration's own patch among them.

    As in nnU-Net's planners, the axis that is the smallest (or largest) share of the median image grows (or shrinks).
    No axis grows beyond the image, or shrinks below `LEAST_EDGE` elements at the lowest resolution.
    """
    c, steps = configuration, configuration.divisors
    most = [max(p, -(-m // d) * d) for p, m, d in zip(c.patch, c.median, steps, strict=True)]
    least = [min(p, LEAST_EDGE * d) for p, d in zip(c.patch, steps, strict=True)]
    all_of_them = [c.patch]
    for sign, limits in ((1, most), (-1, least)):
        patch = list(c.patch)
        while axes := [a for a, size in enumerate(patch) if size != limits[a]]:
            axis = min(axes, key=lambda a: sign * patch[a] / c.median[a])
            patch[axis] += sign * steps[axis]
            all_of_them.insert(len(all_of_them) if sign > 0 else 0, tuple(patch))
    return tuple(all_of_them)
