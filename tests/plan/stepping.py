"""The final contents of memory after the interpreter has run a plan of `tests.plan.chains`, byte by byte."""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from mbc.ir.control import CONTROL_BYTES, CONTROL_FIELDS
from mbc.ir.graph import Role
from mbc.ir.types import DType
from mbc.plan.model import Plan
from mbc.runtime.cpu import Interpreter
from mbc.runtime.launch_order import Transfers

_CONTROL = {"step": 1, "learning_rate": 0.05, "training": 1, "loss_scale": 1.0, "proceed": 1, "gradient_scale": 1.0}


def start_bytes(plan: Plan, name: str) -> bytes:
    """Return some value of an input or a state, which depends only on its name and shape."""
    value = plan.graph.values[name]
    if value.role is Role.CONTROL:
        data = bytearray(CONTROL_BYTES)
        for field, kind, offset in CONTROL_FIELDS:
            if field in _CONTROL:
                struct.pack_into("<" + {"u8": "Q", "u4": "I", "f8": "d", "f4": "f"}[kind[1:]], data, offset,
                                 _CONTROL[field])  # fmt: skip
        return bytes(data)
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]))
    if value.type.dtype is DType.INT32:
        return rng.integers(0, 2, value.type.shape).astype(np.int32).tobytes()
    return rng.standard_normal(value.type.shape).astype(np.float32).tobytes()


def results(plan: Plan, transfers: Transfers) -> dict[tuple[str, str], bytes]:
    """Return the bytes of every exit buffer by program and value, for inference after a training step.

    The interpreter raises its errors; its shadow checks who owns each byte.
    """
    interpreter = Interpreter(plan, transfers=transfers)
    contents: dict[tuple[str, str], bytes] = {}
    for title, program in (("train", plan.train), ("infer", plan.infer)):
        for index in program.entry:
            buffer, offset = plan.buffers[index], plan.offsets[index]
            name = buffer.value or ""
            if title == "train" or plan.graph.values[name].role is Role.INPUT:
                data = np.frombuffer(start_bytes(plan, name), np.uint8)
                interpreter.arena[offset : offset + buffer.size_bytes] = data
        interpreter.run(title)
        for index in program.exit:
            buffer, offset = plan.buffers[index], plan.offsets[index]
            contents[title, buffer.value or ""] = interpreter.arena[offset : offset + buffer.size_bytes].tobytes()
    return contents
