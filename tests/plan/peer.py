"""Plans that offload to another GPU's memory, made of plans that offload to the host."""

from __future__ import annotations

from dataclasses import replace

from mbc.hardware.streams import STREAM_FROM, STREAM_TO, Space
from mbc.plan.model import Plan, Program

_STREAMS = {way[Space.HOST]: way[Space.PEER] for way in (STREAM_TO, STREAM_FROM)}


def lent(plan: Plan) -> Plan:
    """Return the plan with a peer's memory in place of the host's."""

    def program(old: Program) -> Program:
        launches = (replace(x, stream=_STREAMS.get(x.stream, x.stream)) for x in old.launches)
        return replace(old, launches=tuple(launches))

    size_bytes = plan.predictions.host_bytes
    return replace(
        plan,
        buffers=tuple(replace(b, space=Space.PEER) if b.space is Space.HOST else b for b in plan.buffers),
        train=program(plan.train),
        infer=program(plan.infer),
        predictions=replace(plan.predictions, host_bytes=0, peer_bytes=size_bytes),
        peer_limit_bytes=size_bytes,
    )
