"""Spaces that buffers are in, streams that launches run on, and the alignment of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

ALIGNMENT_BYTES = 256


def aligned(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to the alignment of buffers."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Space(StrEnum):
    """Memory of a buffer: the arena, pinned memory of the host, or memory that another GPU lends."""

    ARENA = "arena"
    HOST = "host"
    PEER = "peer"


class Stream(StrEnum):
    """Streams of launches. Launches of one stream run in order.

    TO_HOST and TO_DEVICE run copies to the host and back, TO_PEER and FROM_PEER copies to a peer's memory and back.
    CONCURRENT runs kernels at the same time as those of COMPUTE. COLLECTIVE runs collectives, which all ranks launch in
    one order.
    """

    COMPUTE = "compute"
    TO_HOST = "to_host"
    TO_DEVICE = "to_device"
    CONCURRENT = "concurrent"
    COLLECTIVE = "collective"
    TO_PEER = "to_peer"
    FROM_PEER = "from_peer"


# Streams of the copies to each space outside the arena, and of those back. Each link has two directions.
STREAM_TO: Mapping[Space, Stream] = MappingProxyType({Space.HOST: Stream.TO_HOST, Space.PEER: Stream.TO_PEER})
STREAM_FROM: Mapping[Space, Stream] = MappingProxyType({Space.HOST: Stream.TO_DEVICE, Space.PEER: Stream.FROM_PEER})
COPY_STREAMS = tuple(stream for space in STREAM_TO for stream in (STREAM_TO[space], STREAM_FROM[space]))
