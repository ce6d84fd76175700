"""Imports a model of another framework as a source and weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mbc.errors import LayerError, MbcError
from mbc.frontend.format import format_source
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.from_onnx.read import read_onnx, report_batch_given_twice
from mbc.interchange.program import Line, Program
from mbc.interchange.pt2 import read_pt2
from mbc.interchange.refusal import Refusal, printable, report_refusals
from mbc.interchange.steps import Imported
from mbc.interchange.translate import translate
from mbc.interchange.write import write_source
from mbc.passes.check_graph import verify_network
from mbc.source import Source

ONNX = ".onnx"  # the suffix of ONNX files


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """An imported network, and its source in the layout of `mbc fmt`."""

    network: Imported
    source: str


def import_model(
    path: Path, name: str, loss: str = "softmax_cross_entropy", flat: bool = False, batch: int | None = None
) -> ImportedModel:
    """Return the network and the source of a model's file.

    A file that ends in `.onnx` is an ONNX model; any other file is an exported program of PyTorch. A RuntimeWarning is
    given if an exported program may leave out a backward pass.

    Args:
        path: The file.
        name: The name of the network.
        loss: One of `mbc.interchange.write.LOSSES`; each output has this loss with a target of its own.
        flat: True for a source without blocks.
        batch: Samples of a mini-batch, if an ONNX file leaves them open.

    Raises:
        MbcError: MBC300 to MBC304 (exported programs), MBC349 to MBC353 (ONNX files).
    """
    program = _program(path, batch)
    network = translate(program, name)
    if program.opaque is not None:
        warnings.warn(_without_backward(program.opaque), RuntimeWarning, stacklevel=2)
    title = f"Imported from {printable(path.name)} ({network.writer})."
    source = write_source(network, loss, title, flat)
    check_source(source, network)
    return ImportedModel(network, format_source(Source("the written source", source)))


def _without_backward(line: Line) -> str:
    where = f"'{line.code}' ({line.file}:{line.number})" if line.file else "a region without gradients"
    return (
        f"{where} may apply a torch.autograd.Function, whose backward pass is not in an exported program:"
        " use mbc.from_torch, which sees it"
    )


def _program(path: Path, batch: int | None) -> Program:
    if path.suffix == ONNX:
        return read_onnx(path, batch)
    if batch is not None:
        report_batch_given_twice(path, batch)
    return read_pt2(path)


def check_source(text: str, network: Imported) -> None:
    """Check a source that was written for a network; its losses have targets of the outputs' shapes.

    Raises:
        MbcError: MBC303 if a layer does not accept its tensors or settings; MBC304 if the source is refused for another
            reason, or has other states than the network.
    """
    try:
        lowered = lower(parse(Source("the written source", text))).network
        verify_network(lowered)
    except LayerError as error:
        report_refusals("the model", (Refusal("the model", "its source", error.message, error.remedy),), cause=error)
    except MbcError as error:
        _report_difference(f"the source that was written is refused: {error.code}: {error.message}", cause=error)
    states = {s.value: lowered.values[s.value].type.shape for s in lowered.states}
    wanted = {name: array.shape for name, array in network.arrays.items()}
    wrong = sorted(name for name in states.keys() | wanted.keys() if states.get(name) != wanted.get(name))
    if wrong:
        name = wrong[0]
        _report_difference(f"'{name}' is {states.get(name)} in the source that was written, and was {wanted.get(name)}")


def _report_difference(reason: str, cause: BaseException | None = None) -> NoReturn:
    remedy = "if an exporter wrote the file, this is a mistake of mbc: please report it"
    raise MbcError("MBC304", f"the imported network would differ from the model: {reason}", remedy) from cause
