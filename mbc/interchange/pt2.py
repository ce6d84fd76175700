"""Reads the files of `torch.export.save` (.pt2) without PyTorch, so that no code of a file is ever executed.

`torch.export.load` unpickles (weights that are subclasses of tensors, custom objects) and evaluates symbolic sizes with
SymPy. An import needs only the archive's JSON and raw bytes: `models/NAME.json` is the graph, as
`torch/_export/serde/schema.py` declares it; `data/weights/NAME_weights_config.json` maps each tensor to its file.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from mbc.errors import MbcError
from mbc.files import read_file
from mbc.interchange.program import (
    NUMPY,
    Argument,
    Array,
    Dynamic,
    Held,
    Node,
    Opaque,
    Program,
    Subgraph,
    TensorMeta,
    TensorName,
)
from mbc.interchange.pt2_source_lines import gradient_refusal, module_calls, opaque_line, source_line
from mbc.interchange.refusal import Refusal, printable, report_refusals
from mbc.units import show_size

LARGEST_FILE = 16 << 30
LARGEST_GRAPH = 512 << 20
MOST_ENTRIES = 200_000
SCHEMA = 8  # major version of the graph's schema: PyTorch 2.8 to 2.14
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64",
    9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
}  # fmt: skip
_SYMBOL = re.compile(r"Symbol\('(\w+)'[^()]*\)")  # a symbol as SymPy writes it


def read_pt2(path: Path) -> Program:
    """Return the program of a .pt2 file.

    Raises:
        MbcError: MBC300 (no such file, or not a whole one), MBC301 (a form that is not supported), MBC302 (weights that
            are missing, damaged or pickled), MBC303 (inputs or outputs that are no tensors).
    """
    try:
        data = read_file(path, LARGEST_FILE)
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        _report_broken(path, getattr(error, "strerror", None) or str(error), cause=error)
    try:
        return _Reader(path, archive).program()
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        _report_broken(path, f"its graph is damaged ({type(error).__name__}: {printable(str(error))})", cause=error)
    except RecursionError as error:
        _report_broken(path, "its graph is nested too deeply", cause=error)
    except (ValueError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        _report_broken(path, printable(str(error)), cause=error)


def _report_broken(path: Path, reason: str, cause: BaseException | None = None) -> NoReturn:
    remedy = "give a whole file that torch.export.save wrote: torch.export.save(torch.export.export(model, (x,)), FILE)"
    raise MbcError("MBC300", f"cannot read '{path}': {reason}", remedy) from cause


class _Reader:
    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._archive = archive
        entries = archive.infolist()
        if len(entries) > MOST_ENTRIES:
            raise ValueError(f"it has {len(entries)} entries; at most {MOST_ENTRIES} are supported")
        if sum(entry.compress_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts overlap")
        # `a/models/model.json` -> `models/model.json`: every entry begins with the archive's own name.
        self._entries = {entry.filename.partition("/")[2]: entry for entry in entries}

    def program(self) -> Program:
        graphs = sorted(n for n in self._entries if n.startswith("models/") and n.endswith(".json"))
        if not graphs:
            if any(entry.filename == "serialized_exported_program.json" for entry in self._archive.infolist()):
                raise self._old("torch 2.7 or older wrote it")
            raise ValueError("it holds no exported program")
        if len(graphs) > 1:
            raise ValueError(f"it holds {len(graphs)} programs, but only one can be imported")
        name = graphs[0].removeprefix("models/").removesuffix(".json")
        document = self._json(graphs[0])
        version = document["schema_version"]["major"]
        if version != SCHEMA:
            raise self._old(f"its graph has schema version {version!r}, but only version {SCHEMA} is supported")
        module = document["graph_module"]
        graph = module["graph"]
        tensors = {key: _meta(meta) for key, meta in graph["tensor_values"].items()}
        payloads = self._payloads(f"data/weights/{name}_weights_config.json")
        constants = self._payloads(f"data/constants/{name}_constants_config.json")
        inputs: list[str] = []
        held: dict[str, Held] = {}
        for spec in module["signature"]["input_specs"]:
            self._input(spec, tensors, payloads, constants, inputs, held)
        outputs, mutated = _outputs(module["signature"]["output_specs"])
        # Keys that no node reads are also part of the state_dict.
        read_keys = {value.key for value in held.values()}
        for key, payload in payloads.items():
            if key not in read_keys:
                held[f"unread {key}"] = _held(key, "buffer", payload, True)
        arrays = self._arrays(held.values(), {**payloads, **constants})
        nodes = tuple(_node(node) for node in graph["nodes"])
        writer = f"torch {printable(str(document.get('torch_version', '?')), 40)}"
        opaque = next(filter(None, map(opaque_line, graph["nodes"])), None)
        return Program(tuple(inputs), held, nodes, outputs, tensors, mutated, arrays, writer, opaque=opaque)

    def _old(self, reason: str) -> MbcError:
        remedy = "export the model again with PyTorch 2.8 to 2.14"
        return MbcError("MBC301", f"cannot read '{self._path}': {reason}", remedy)

    def _input(
        self,
        spec: Mapping[str, Any],
        tensors: Mapping[str, TensorMeta],
        payloads: Mapping[str, Any],
        constants: Mapping[str, Any],
        inputs: list[str],
        held: dict[str, Held],
    ) -> None:
        """Enter one input of the graph: an input of the model, or a tensor that the model holds.

        Raises:
            MbcError: MBC302 for weights, MBC303 for an input that is no tensor.
            ValueError: The input is of a kind that is not supported.
        """
        (kind, body), *_ = spec.items()
        argument = body.get("arg", {})
        if kind == "user_input":
            tensor = _argument(argument)
            if not isinstance(tensor, TensorName):
                raise ValueError(f"an input of the model is no tensor ({printable(json.dumps(argument), 60)})")
            inputs.append(tensor.name)
            return
        if kind == "constant_input":
            _refuse_input(printable(str(body.get("name", "?")), 40))
        if kind not in ("parameter", "buffer", "tensor_constant"):
            raise ValueError(f"the model takes an input of the kind '{printable(str(kind), 40)}'")
        key = str(body.get("parameter_name") or body.get("buffer_name") or body.get("tensor_constant_name"))
        name = argument["name"]
        where = payloads if key in payloads else constants
        if key not in where:
            raise self._weights(f"'{printable(key)}' is missing")
        entry = _held(key, "constant" if kind == "tensor_constant" else kind, where[key], body.get("persistent", True))
        said = tensors.get(name)
        if said is not None and said.static and said.shape != entry.meta.shape:
            raise self._weights(
                f"'{printable(key)}' has the shape {entry.meta.shape}, but the graph states {said.shape}"
            )
        held[name] = entry

    # ---- numbers ----

    def _weights(self, reason: str) -> MbcError:
        remedy = "save the program again, with plain tensors as parameters and buffers"
        return MbcError("MBC302", f"cannot read the weights of '{self._path}': {reason}", remedy)

    def _payloads(self, entry: str) -> Mapping[str, Any]:
        if entry not in self._entries:
            return {}
        return {str(key): value for key, value in self._json(entry)["config"].items() if value["tensor_meta"]}

    def _arrays(self, held: Any, payloads: Mapping[str, Any]) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        for value in held:
            payload = payloads[value.key]
            if value.storage in arrays:
                continue
            folder = "constants" if value.kind == "constant" or not value.persistent else "weights"
            arrays[value.storage] = self._array(value, payload, folder)
        return arrays

    def _array(self, value: Held, payload: Mapping[str, Any], folder: str) -> Array:
        shown = printable(value.key)
        if payload["use_pickle"]:
            raise self._weights(f"'{shown}' is pickled: reading it could run any code")
        if value.meta.dtype not in NUMPY or not value.meta.static:
            raise self._weights(f"'{shown}' is of the type {value.meta.dtype}")
        entry = self._entries.get(f"data/{folder}/{payload['path_name']}")
        if entry is None:
            raise self._weights(f"'{shown}' is missing")
        dtype, shape = NUMPY[value.meta.dtype], value.meta.sizes
        strides = [int(s["as_int"]) for s in payload["tensor_meta"]["strides"]]
        offset = int(payload["tensor_meta"]["storage_offset"]["as_int"])
        if len(strides) != len(shape) or min((*shape, *strides, offset), default=0) < 0:
            raise self._weights(f"the layout of '{shown}' is damaged")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        needed = (last + 1) * dtype.itemsize if math.prod(shape) else 0
        there = math.prod(shape) * dtype.itemsize  # elements may share bytes in the file, but have their own here
        if entry.file_size < max(needed, there) or entry.compress_type != zipfile.ZIP_STORED:
            raise self._weights(
                f"'{shown}' takes {show_size(max(needed, there))}, but its file has {show_size(entry.file_size)}"
                + (", packed" if entry.compress_type != zipfile.ZIP_STORED else "")
            )
        raw = np.frombuffer(self._read(entry.filename, entry.file_size), np.uint8)
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        flat = raw[: len(raw) // dtype.itemsize * dtype.itemsize].view(dtype)
        view = np.lib.stride_tricks.as_strided(flat[offset:], shape, [s * dtype.itemsize for s in strides])
        return np.ascontiguousarray(view).reshape(shape)

    # ---- the archive ----

    def _json(self, name: str) -> Any:
        entry = self._entries[name]
        if entry.file_size > LARGEST_GRAPH:
            raise ValueError(f"'{name}' has {show_size(entry.file_size)}: too long to be read")
        return json.loads(self._read(entry.filename, entry.file_size))

    def _read(self, filename: str, size: int) -> bytes:
        with self._archive.open(filename) as file:
            data = file.read(size + 1)
        if len(data) != size:
            raise ValueError(f"'{printable(filename)}' is cut short")
        return data


def _held(key: str, kind: str, payload: Mapping[str, Any], persistent: bool) -> Held:
    meta = payload["tensor_meta"]
    storage = json.dumps([payload["path_name"], meta["sizes"], meta["strides"], meta["storage_offset"], kind])
    return Held(key, kind, _meta(meta), storage, bool(persistent))


def _meta(meta: Mapping[str, Any]) -> TensorMeta:
    device = meta["device"]["type"]
    dtype = _DTYPES.get(meta["dtype"], f"type {meta['dtype']!r}")
    strides = tuple(stride.get("as_int") for stride in meta.get("strides", ()))
    static_strides = (
        strides if len(strides) == len(meta["sizes"]) and all(isinstance(s, int) for s in strides) else None
    )
    sizes = tuple(_size(size) for size in meta["sizes"])
    return TensorMeta(sizes, dtype, str(device), meta["requires_grad"] is True, static_strides)


def _size(size: Mapping[str, Any]) -> int | Dynamic:
    if "as_int" in size:
        number = size["as_int"]
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 47:
            raise ValueError(f"a size of a tensor is {printable(repr(number), 40)}")
        return number
    expression = str(size.get("as_expr", {}).get("expr_str", "?"))
    return Dynamic(printable(_SYMBOL.sub(r"\1", expression), 40))


def _outputs(specs: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the outputs of the model, and the tensors that it changes.

    Raises:
        MbcError: MBC303 for an output that is no tensor.
    """
    outputs: list[str] = []
    mutated: list[str] = []
    for spec in specs:
        (kind, body), *_ = spec.items()
        if kind == "user_output":
            output = _argument(body["arg"])
            if isinstance(output, TensorName):
                outputs.append(output.name)
            elif output is not None:
                _refuse_output(output)
        elif kind in ("buffer_mutation", "user_input_mutation", "parameter_mutation"):
            mutated.append(str(body.get("buffer_name") or body.get("user_input_name") or body.get("parameter_name")))
    return tuple(outputs), tuple(mutated)


def _refuse_output(output: Argument) -> NoReturn:
    """Raise MBC303 for an output of the model that is no tensor."""
    shown = printable(str(output), 40)
    refusal = Refusal("the model", "the program", f"it returns a number ({shown})", "return tensors alone")
    report_refusals("the model", (refusal,))


def _refuse_input(argument: str) -> NoReturn:
    """Raise MBC303 for an argument of the model that is no tensor."""
    remedy = "export a module whose forward takes tensors alone, and holds the rest itself"
    report_refusals("the model", (Refusal(f"'{argument}'", "the program", "this input is no tensor", remedy),))


def _node(node: Mapping[str, Any]) -> Node:
    outputs: list[str] = []
    for output in node["outputs"]:
        result = _argument(output)
        outputs += [
            item.name for item in (result if isinstance(result, tuple) else (result,)) if isinstance(item, TensorName)
        ]
    metadata = cast("Mapping[str, Any]", node.get("metadata") or {})
    return Node(
        printable(str(node["target"]), 80).removeprefix("torch.ops."),
        {str(given["name"] or number): _argument(given["arg"]) for number, given in enumerate(node["inputs"])},
        tuple(outputs),
        module_calls(metadata.get("nn_module_stack", "")),
        source_line(metadata.get("stack_trace", "")),
        refusal=gradient_refusal(metadata.get("stack_trace", "")),
    )


_NOT_FINITE = ("Infinity", "-Infinity", "NaN")  # JSON has no numbers for them
_PLAIN = ("as_int", "as_float", "as_bool", "as_string")
_LISTS = ("as_ints", "as_floats", "as_bools", "as_strings")


def _argument(argument: Mapping[str, Any]) -> Argument:
    """Return a value of the union `Argument`, which is a dictionary whose only key is the kind."""
    (kind, value), *_ = argument.items()
    if kind == "as_none":
        return None
    if kind == "as_float" and value in _NOT_FINITE:
        return float(value)
    if kind in _PLAIN:
        return printable(value) if isinstance(value, str) and kind == "as_string" else value
    if kind in _LISTS:
        return tuple(value)
    if kind == "as_tensor":
        return TensorName(str(value["name"]))
    if kind == "as_tensors":
        return tuple(TensorName(str(item["name"])) for item in value)
    if kind == "as_optional_tensors":
        return tuple(_argument(item) for item in value)
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        return _argument(value) if "as_name" not in value else Opaque("a number that depends on data")
    if kind == "as_sym_ints":
        return tuple(_argument(item) if "as_name" not in item else Opaque("a size") for item in value)
    if kind in ("as_scalar_type", "as_memory_format", "as_layout", "as_device"):
        return Opaque(f"{kind} {_DTYPES.get(value, value) if kind == 'as_scalar_type' else ''}".strip())
    return _subgraph(value["graph"]) if kind == "as_graph" else Opaque(printable(str(kind), 40))


def _subgraph(graph: Mapping[str, Any]) -> Subgraph:
    inputs, outputs = (
        tuple(tensor.name if isinstance(tensor := _argument(given), TensorName) else "" for given in graph[side])
        for side in ("inputs", "outputs")
    )
    tensors = {key: _meta(meta) for key, meta in graph["tensor_values"].items()}
    return Subgraph(inputs, outputs, tuple(map(_node, graph["nodes"])), tensors)
