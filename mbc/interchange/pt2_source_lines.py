"""Finds the lines of the model that an operation of an exported program comes from, by its stack trace.

torch.export keeps with each operation the modules that called it and the lines of their `forward` functions. The lines
also show operations whose gradient the program does not contain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from mbc.interchange.program import Line, ModuleCall
from mbc.interchange.refusal import printable

_FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n\s*([^\n]*)')
# The application of a subclass of torch.autograd.Function, and the function's forward pass.
_APPLIED = re.compile(r"(?<![\w.])(?:\w+\.)*_*[A-Z]\w*\.apply\(")
_FORWARD = re.compile(r"^def forward\(ctx\b")
_OF_AUTOGRAD = (
    "it is a part of an autograd.Function, whose gradient the program does not contain",
    "compute it by layers, whose gradients are known",
)
_CHECKPOINTED = (
    "torch.utils.checkpoint with use_reentrant=True runs it, whose gradients the program does not have",
    "export the model with use_reentrant=False, which computes the same",
)
_OF_EXPORT = re.compile(r"[/\\]torch[/\\]_dynamo[/\\]")
_OF_TORCH = re.compile(r"[/\\]torch[/\\]")
_OF_CHECKPOINT = re.compile(r"[/\\]torch[/\\]utils[/\\]checkpoint\.py$")


def module_calls(stack: Any) -> tuple[ModuleCall, ...]:
    """Return the calls of a module stack `key,path,class;...`, outermost first, without the model itself."""
    calls: list[ModuleCall] = []
    for entry in str(stack).split(";"):
        parts = entry.split(",")
        if len(parts) == 3 and parts[1]:
            calls.append(ModuleCall(parts[0], printable(parts[1]), printable(parts[2].rpartition(".")[2], 80)))
    return tuple(calls)


def source_line(trace: Any) -> Line | None:
    """Return the innermost line of a stack trace that is not PyTorch's own."""
    frames = _frames(trace)
    own = [frame for frame in frames if not _OF_TORCH.search(frame.file)]
    return own[-1] if own else frames[-1] if frames else None


def _frames(trace: Any) -> list[Line]:
    return [Line(printable(f), int(n), printable(code, 120)) for f, n, code in _FRAME.findall(str(trace))]


def gradient_refusal(trace: Any) -> tuple[str, str] | None:
    """Return a reason and a remedy if the line of an operation shows that its gradient is another function's."""
    if _is_of_autograd(trace):
        return _OF_AUTOGRAD
    # A checkpoint without `use_reentrant` runs `fn`, whose operations are ordinary operations of the program.
    frames = (frame for frame in _frames(trace) if _OF_CHECKPOINT.search(frame.file))
    return _CHECKPOINTED if any(frame.code.startswith("outputs = run_function(") for frame in frames) else None


def opaque_line(node: Mapping[str, Any]) -> Line | None:
    """Return the line that calls more than modules before it reaches an operation; None if all calls are modules.

    torch.export records the lines of functions called `forward`: one for each module, one for each
    `torch.autograd.Function`. A strict export runs such functions in a region without gradients instead.
    """
    metadata = cast("Mapping[str, Any]", node.get("metadata") or {})
    frames = [frame for frame in _frames(metadata.get("stack_trace", "")) if not _OF_EXPORT.search(frame.file)]
    if str(node["target"]).endswith("wrap_with_set_grad_enabled"):
        return frames[-1] if frames else Line("", 0, "")
    calls = 1 + len(module_calls(metadata.get("nn_module_stack", "")))
    return frames[calls - 1] if len(frames) > calls and not _OF_TORCH.search(frames[-1].file) else None


def _is_of_autograd(trace: Any) -> bool:
    """Return whether a module's `forward` applies a `torch.autograd.Function`, whose backward pass a program lacks.

    Functions that are applied in between are not visible, because a program records only the lines of `forward`. Layers
    in an argument of `apply`, on the same line, count as part of the function.
    """
    frames = _frames(trace)
    applied = (
        _APPLIED.search(frame.code) and not _OF_TORCH.search(frame.file) and not _OF_TORCH.search(inner.file)
        for frame, inner in pairwise(frames)
    )
    return any(applied) or any(_FORWARD.search(frame.code) for frame in frames)
