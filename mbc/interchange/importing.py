"""A model of another framework -> a source and weights."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from mbc.errors import LayerError, MbcError
from mbc.frontend.format import format_source
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.from_onnx.read import batch_is_said, read_onnx
from mbc.interchange.program import Line, Program
from mbc.interchange.pt2 import printable, read_pt2
from mbc.interchange.refusal import Refusal, refused
from mbc.interchange.steps import Imported
from mbc.interchange.translate import translate
from mbc.interchange.write import write_source
from mbc.passes.check_graph import verify_network
from mbc.source import Source

ONNX = ".onnx"  # how an ONNX file's name ends


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A network that was imported, and the source that says the same, as `mbc fmt` lays it out."""

    network: Imported
    source: str


def import_model(
    path: Path, name: str, loss: str = "softmax_cross_entropy", flat: bool = False, batch: int | None = None
) -> ImportedModel:
    """Read a model and write its source.

    A file that ends in `.onnx` is an ONNX model, any other an exported program of torch. `name` is the network's;
    `loss` one of `mbc.interchange.write.LOSSES`, of every output and a target of its own; `flat`: without blocks;
    `batch`: rows of a mini-batch, where an ONNX file leaves them open. Warns (RuntimeWarning) where an exported program
    may leave out a backward pass. Raises MBC300 to MBC304 and MBC349 to MBC353.
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
        " mbc.from_torch sees it"
    )


def _program(path: Path, batch: int | None) -> Program:
    if path.suffix == ONNX:
        return read_onnx(path, batch)
    if batch is not None:
        raise batch_is_said(path, batch)
    return read_pt2(path)


def check_source(text: str, network: Imported) -> None:
    """Check a source that was written for a network.

    Its losses have targets of the outputs' shapes. Raises MBC303 where a layer does not take its tensors or settings,
    and MBC304 where the source is refused otherwise or has other states than the network.
    """
    try:
        made = lower(parse(Source("the written source", text))).network
        verify_network(made)
    except LayerError as error:
        raise refused("the model", (Refusal("the model", "its source", error.message, error.remedy),)) from error
    except MbcError as error:
        raise _wrong(f"the source that was written is refused: {error.code}: {error.message}") from error
    states = {s.value: made.values[s.value].type.shape for s in made.states}
    wanted = {name: array.shape for name, array in network.arrays.items()}
    wrong = sorted(name for name in states.keys() | wanted.keys() if states.get(name) != wanted.get(name))
    if wrong:
        name = wrong[0]
        raise _wrong(f"'{name}' is {states.get(name)} in the source that was written, and was {wanted.get(name)}")


def _wrong(reason: str) -> MbcError:
    remedy = "where an exporter wrote the file this is a mistake of mbc: please report it"
    return MbcError("MBC304", f"this model is not imported as it is: {reason}", remedy)
