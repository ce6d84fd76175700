"""Comparison of epochs."""

from __future__ import annotations

import dataclasses

from mbc.train.epoch import Epoch


def timeless(epoch: Epoch) -> Epoch:
    """Return the epoch without its seconds, which differ from run to run."""
    return dataclasses.replace(epoch, seconds=0, waited_seconds=0)
