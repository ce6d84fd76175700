"""ONNX's own tests of single operators, imported and evaluated by the interpreter.

    python benchmarks/onnx_node_tests.py [--only NAME] [--refusals]

The package `onnx` holds a model of each test with inputs and expected outputs. Tests with an input of fp32
count, except dropout in training mode, which draws random numbers. Most of these models have nothing to
train, so each gets one more input, one more output, and a parameter between these. The inputs of a test are
read in two variants: in the first, the first input of floats is the network's and the other inputs are
weights of the file; in the second, all inputs of floats are the network's. Inputs of integers and truth
values are always constants of the file.

A test is `equal` if one variant computes the expected outputs and no variant computes anything else,
`different` if a variant computes something else, `refused` if both are refused. No input may end in
`MBC304` or `traceback`.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from record import ROOT, start, write  # noqa: F401 - also puts the checkout into the path

from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.parse import parse
from mbc.interchange.importing import ImportedModel, import_model
from mbc.ir.types import Precision
from mbc.passes.training_step import differentiate
from mbc.source import Source
from tests.ir.execution import execute, types_of

NAME = "onnx_node_tests"
EQUAL, DIFFERENT, REFUSED, MISTAKE, TRACEBACK = "equal", "different", "refused", "MBC304", "traceback"
WORST_FIRST = (TRACEBACK, MISTAKE, DIFFERENT, EQUAL, REFUSED)
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # the tests' own relative tolerance; beside the largest element
# What a user gets for a file that is not taken as it is; any other code would be a mistake of mbc.
REFUSALS = frozenset(("MBC303", "MBC350", "MBC351", "MBC352", "MBC353"))
_RANDOM = "test_training_dropout"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outcome:
    """The verdict on one test, and the reason where it is not equal."""

    name: str
    operator: str
    verdict: str
    reason: str = ""


def load_cases() -> list[Any]:
    """Return the node tests of the package `onnx` that have an input of fp32."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = load_model_tests(kind="node")
    return [case for case in cases if not case.name.startswith(_RANDOM) and any(True for _ in variants(case))]


def operator_of(case: Any) -> str:
    """Return the operator of a test. The test of an expanded operator is called by its own name."""
    nodes = [node.op_type for node in case.model.graph.node]
    if len(nodes) == 1:
        return nodes[0]
    words = {name.lower(): name for name in _operators()}
    parts = case.name.removeprefix("test_").split("_")
    joined = ("".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((words[word] for word in joined if word in words), "several")


def _operators() -> set[str]:
    return {schema.name for schema in onnx.defs.get_all_schemas()}


def _is_float(value: Any) -> bool:
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type == TensorProto.FLOAT


def variants(case: Any) -> Iterator[tuple[Any, list[Array], list[Array]]]:
    """Yield the models of one test, each with its inputs and expected outputs."""
    inputs, outputs = case.data_sets[0]
    names = [value.name for value in case.model.graph.input]
    arrays = zip(names, inputs, strict=False)
    given = {name: np.asarray(value) for name, value in arrays if isinstance(value, np.ndarray | np.generic)}
    floats = [v.name for v in case.model.graph.input if _is_float(v) and v.name in given]
    if not all(isinstance(output, np.ndarray | np.generic) for output in outputs):
        return  # sequences of tensors
    wanted = [np.asarray(output) for output in outputs]
    seen: set[tuple[str, ...]] = set()
    rows = given[floats[0]].shape[:1] if floats else ()
    fed = [n for n in floats if given[n].shape[:1] == rows and given[n].ndim]
    for fed_names in (tuple(floats[:1]), tuple(fed)):
        if fed_names and fed_names not in seen:
            seen.add(fed_names)
            beside = np.ones((*(rows or (1,)), 2), np.float32)
            yield trained(case.model, given, fed_names), [*(given[n] for n in fed_names), beside], [*wanted, beside]


def trained(model: Any, given: dict[str, Array], fed: Sequence[str]) -> Any:
    """Return the model with a trained parameter beside it. `fed` stay inputs; all other inputs become constants."""
    created = onnx.ModelProto()
    created.CopyFrom(model)
    graph = created.graph
    inputs = [value for value in graph.input if value.name in fed]
    for value in graph.input:
        if value.name in given and value.name not in fed:
            graph.initializer.append(numpy_helper.from_array(given[value.name], value.name))
    del graph.input[:]
    graph.input.extend(inputs)
    graph.input.append(
        helper.make_tensor_value_info("mbc.x", TensorProto.FLOAT, (*(given[fed[0]].shape[:1] or (1,)), 2))
    )
    graph.output.append(helper.make_tensor_value_info("mbc.y", TensorProto.FLOAT, None))
    graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "mbc.weight"))
    graph.node.append(helper.make_node("Mul", ["mbc.x", "mbc.weight"], ["mbc.y"], name="mbc.train"))
    return created


def evaluate(imported: ImportedModel, inputs: Sequence[Array]) -> list[Array]:
    """Return what the network computes in evaluation mode, in fp32."""
    created = lower(parse(Source("imported", imported.source)))
    graph = differentiate(created.network, created.optimizer, Precision.FP32)
    env = dict(imported.network.arrays) | dict(zip(graph.infer_inputs, inputs, strict=True))
    env = execute(graph.infer, types_of(graph), env, graph.batch, Precision.FP32)
    return [env[name] for name in graph.infer_outputs]


def judge(case: Any, folder: Path) -> Outcome:
    """Return the worst verdict on the variants of a test."""
    operator = operator_of(case)
    outcomes: dict[str, str] = {}
    for model, inputs, wanted in variants(case):
        verdict, reason = _attempt(model, inputs, wanted, folder)
        outcomes.setdefault(verdict, reason)
    verdict = next(v for v in WORST_FIRST if v in outcomes)
    return Outcome(case.name, operator, verdict, outcomes[verdict])


def _attempt(model: Any, inputs: Sequence[Array], wanted: Sequence[Array], folder: Path) -> tuple[str, str]:
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            imported = import_model(file, "net", "mse")
            result = evaluate(imported, inputs)
    except MbcError as error:
        verdict = REFUSED if error.code in REFUSALS else MISTAKE
        return verdict, f"{error.code}: {error.message}"
    except Exception as error:
        return TRACEBACK, f"{type(error).__name__}: {error}"
    return (EQUAL, "") if _are_equal(result, wanted) else (DIFFERENT, _difference(result, wanted))


def _are_equal(items: Sequence[Array], wanted: Sequence[Array]) -> bool:
    if len(items) != len(wanted):
        return False
    for ours, theirs in zip(items, wanted, strict=True):
        finite = np.abs(theirs[np.isfinite(theirs)])
        absolute = ABSOLUTE * max(1.0, float(finite.max(initial=0.0)))
        if ours.shape != theirs.shape or not np.allclose(ours, theirs, RELATIVE, absolute, equal_nan=True):
            return False
    return True


def _difference(items: Sequence[Array], wanted: Sequence[Array]) -> str:
    shapes = [list(a.shape) for a in items], [list(a.shape) for a in wanted]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]}, not {shapes[1]}"
    with np.errstate(all="ignore"):
        worst = max(float(np.nanmax(np.abs(a - b), initial=0.0)) for a, b in zip(items, wanted, strict=True))
    return f"off by {worst:.3g}"


def run(only: str = "") -> list[Outcome]:
    """Judge every test whose name contains `only`."""
    with tempfile.TemporaryDirectory() as folder:
        return [judge(case, Path(folder)) for case in load_cases() if only in case.name]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only tests whose name holds this")
    parser.add_argument("--refusals", action="store_true", help="list what is refused, by operator and reason")
    arguments = parser.parse_args()
    outcomes = run(arguments.only)
    by_operator: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        by_operator[outcome.operator][outcome.verdict] += 1
    counts = Counter(outcome.verdict for outcome in outcomes)
    for outcome in outcomes:
        if outcome.verdict in (DIFFERENT, MISTAKE, TRACEBACK):
            print(f"{outcome.verdict}: {outcome.name}: {outcome.reason[:300]}")
    if arguments.refusals:
        reasons = Counter((o.operator, o.reason.split("\n")[1].strip()[:150] if "\n" in o.reason else o.reason[:150])
                          for o in outcomes if o.verdict == REFUSED)  # fmt: skip
        for (operator, reason), number in reasons.most_common():
            print(f"{number:4} {operator}: {reason}")
    print(f"{len(outcomes)} tests: " + ", ".join(f"{counts[v]} {v}" for v in reversed(WORST_FIRST)))
    if not arguments.only:
        rows = [{"name": operator, **dict(sorted(c.items()))} for operator, c in sorted(by_operator.items())]
        write(NAME, rows, onnx=onnx.__version__, tests=len(outcomes), counts={v: counts[v] for v in WORST_FIRST})


if __name__ == "__main__":
    start(main)
