"""Program -> steps: every node by its rule, every refusal remembered, and whatever nobody needs left out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from mbc.interchange.aten import NOT_TAKEN, RULES
from mbc.interchange.aten.base import Call
from mbc.interchange.aten.constants import OF_KNOWN, folded
from mbc.interchange.aten.operands import (
    PLAIN,
    UNKNOWN,
    Activation,
    Known,
    Noise,
    Operand,
    Refused,
    Result,
    Unknown,
    Untaken,
    Weight,
    shape_of,
)
from mbc.interchange.aten.parameters import computed
from mbc.interchange.aten.schema import schema_of
from mbc.interchange.finish import growing, only_parts_that_are_used, outside_of_others, renumbered
from mbc.interchange.functionalize import functionalize
from mbc.interchange.program import FLOATING, Array, Dynamic, Held, Node, Program, TensorMeta, operands_of
from mbc.interchange.refusal import Refusal, refused
from mbc.interchange.regions import inline_regions
from mbc.interchange.steps import STATISTICS, Imported, Key, Number, Setting, StateOf, Step, label_of
from mbc.ops import LAYERS
from mbc.ops.rounding import from_bf16

# Operations that check or name sizes, and give nothing that the network computes with.
_CHECKS = ("aten._assert", "aten.sym_", "aten.record_stream", "_operator.", "aten._check")
# Operations that only `ExportedProgram.run_decompositions` writes.
_DECOMPOSED = frozenset(
    f"aten.{name}.default"
    for name in (
        "convolution", "addmm", "_native_batch_norm_legit_functional", "native_batch_norm", "native_layer_norm",
        "native_group_norm", "_softmax", "_log_softmax", "max_pool2d_with_indices",
    )
)  # fmt: skip
_OF_TRUTH = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and",
     "bitwise_or", "bitwise_not", "bitwise_xor", "__and__", "__or__", "__xor__", "clone", "cat", "stack", "repeat",
     "lift_fresh_copy")
)  # fmt: skip
_NOTHING = "there is nothing like it in the language yet"


def translate(program: Program, name: str) -> Imported:
    """The network of a program. Raises MBC303, which lists all that cannot be taken."""
    decomposed = next((node.target for node in program.nodes if node.target in _DECOMPOSED), None)
    if decomposed is not None:
        reason = f"its layers are decomposed into operations such as {decomposed}"
        remedy = "export the model without run_decompositions()"
        raise refused("the model", (Refusal("the model", "the program", reason, remedy),))
    made = _Translation(functionalize(inline_regions(program)))
    outputs = made.run()
    if made.refusals:
        raise refused("the model", made.refusals)
    imported = made.imported(name, outputs)
    if not imported.trained:
        raise refused("the model", (_without_training(imported),))
    return imported


def _without_training(imported: Imported) -> Refusal:
    reason = "all parameters that it computes with are frozen" if imported.frozen else "it computes with no parameter"
    remedy = "set requires_grad=True for those that are to be trained" if imported.frozen else "export a model to train"
    return Refusal("the model", "the program", reason, remedy)


class _Translation:
    """The steps so far; what rules write themselves into."""

    def __init__(self, program: Program) -> None:
        self.refusals: list[Refusal] = []
        self._program = program
        self._operands: dict[str, Operand] = {}
        self._steps: list[Step] = []
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._makers: dict[int, Step] = {}
        self._node: Node | None = None
        self._owner: dict[str, tuple[str, str, Mapping[str, Setting]]] = {}  # storage -> label, op, settings
        self._aliases: dict[str, list[str]] = defaultdict(list)
        for held in program.held.values():
            self._aliases[held.storage].append(held.key)
        self._arrays: dict[str, Array] = dict(program.arrays)
        self._constants: dict[str, Held] = {}  # by storage
        self._claimed: set[str] = set()

    # ---- the program ----

    def run(self) -> tuple[int, ...]:
        """Translate everything; returns the values of the outputs, as far as there are any."""
        self._enter_inputs()
        for held in self._program.held.values():
            if held.kind == "parameter" and held.meta.dtype != "float32":
                self._refuse_whole(held.key, f"its parameters are {held.meta.dtype}", "call model.float() first")
        for node in self._program.nodes:
            self._node = node
            self._take(node)
        outputs: list[int] = []
        for output in self._program.outputs:
            value = self._output(output)
            if value is not None and value in outputs:
                self._refuse_whole(output, "it returns this tensor twice", "return it once, and use it twice outside")
            elif value is not None:
                outputs.append(value)
        if not self._program.outputs:
            self._refuse_whole("", "it returns no tensor", "return what the loss needs")
        for name in self._program.mutated:
            self._refuse_whole(name, "it changes this tensor while it runs", "compute it anew in each call")
        return tuple(outputs)

    def _enter_inputs(self) -> None:
        for number, name in enumerate(self._program.inputs):
            meta = self._program.tensors[name]
            shape = tuple(size if isinstance(size, int) else 1 for size in meta.shape)
            dynamic = next((size for size in meta.shape if isinstance(size, Dynamic)), None)
            if dynamic is not None:
                reason = f"its size {list(meta.shape).index(dynamic)} is dynamic ({dynamic.name})"
                self._refuse_whole(name, reason, "export it without dynamic_shapes: --set batch=N sets the batch later")
            if meta.dtype != "float32":
                self._refuse_whole(name, f"this input is {meta.dtype}", "give float32 numbers to the model")
            if not shape:
                self._refuse_whole(name, "this input has no dimensions", "give tensors with rows to the model")
            if 0 in shape:
                remedy = "export it with an example that has rows"
                self._refuse_whole(name, f"this input has no elements, {list(shape)}", remedy)
            self._shapes[number] = shape
            self._operands[name] = UNKNOWN if dynamic is not None else Activation(number, shape)

    def _take(self, node: Node) -> None:
        """Translate a node. What depends on a node that is refused is passed over: it says nothing of its own."""
        result: Result = UNKNOWN
        try:
            operands = [self._operands.get(name) for name in operands_of(node)]
            if not node.target.startswith(_CHECKS) and not any(isinstance(x, Unknown) for x in operands):
                result = self._apply(node)
        except Refused as error:
            self._refuse(node, error.reason, error.remedy)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self._refuse(node, f"its arguments are damaged ({type(error).__name__})", "export the model again")
        results = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        self._operands.update(zip(node.outputs, results, strict=False))

    def _apply(self, node: Node) -> Result:
        if node.refusal is not None:
            raise Refused(*node.refusal)
        target, operands = node.target, [self.operand(name) for name in operands_of(node)]
        rule = folded(target, operands) or computed(target, operands) or RULES.get(target)
        if any(isinstance(operand, Known) and operand.weight is not None for operand in operands):
            rule = OF_KNOWN.get(target, rule)
        if rule is None:
            raise Refused(_NOTHING, NOT_TAKEN.get(target, "compute it by layers that docs/import.md lists"))
        for output in node.outputs:
            meta = self._program.tensors.get(output)
            if meta is not None and not meta.static:
                raise Refused("its result has a dynamic size", "export it without dynamic_shapes")
            if meta is not None and meta.dtype in FLOATING and meta.dtype != "float32":
                raise Refused(
                    f"it computes in {meta.dtype}", "export it in float32: train { precision = bf16 } says in which"
                )
        call = Call(node, self)
        if rule is not None and computed(target, operands) is rule:
            self._check_whole(node, operands)
        result = rule(call)
        call.check_all_read()
        self._check_results(node, operands, result)
        return result

    def _check_whole(self, node: Node, operands: Sequence[Operand]) -> None:
        """Refused where a parameter that is repeated would be computed with as it is held."""
        for name, operand in zip(operands_of(node), operands, strict=True):
            if shape_of(operand) != self.meta(name).sizes:
                raise Refused(
                    "it computes with a parameter that is repeated", "combine it with a tensor of the network"
                )

    def _check_results(self, node: Node, operands: Sequence[Operand], result: Result) -> None:
        """Refused where a result has not the shape or the type that the program says: no rule can forget these."""
        results = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        for output, operand in zip(node.outputs, results, strict=False):
            meta, shape = self._program.tensors.get(output), shape_of(operand)
            if meta is None or shape is None:
                continue
            is_repeated = isinstance(operand, Weight) and node.target.startswith("aten.expand")
            if shape != meta.sizes and not is_repeated:
                reason = f"its result is {list(shape)} here, and {list(meta.sizes)} in the program"
                raise Refused(reason, "please report it: mbc does not take this call as it is")
            if isinstance(operand, Activation) and meta.dtype not in FLOATING and not _keeps_type(node.target):
                raise Refused(f"it makes {meta.dtype} of what is computed", "compute in float32")

    def _output(self, name: str) -> int | None:
        operand = self._operands.get(name)
        if operand is None and name in self._program.held:
            self._refuse_whole(name, "it returns a parameter or buffer", "return what a layer gives")
            return None
        if isinstance(operand, Untaken):
            self._refuse_whole(name, operand.reason, operand.remedy)
            return None
        if operand is None or isinstance(operand, Weight | Noise | Known):
            self._refuse_whole(name, "it returns no tensor that the network computes", "return what a layer gives")
            return None
        if not isinstance(operand, Activation):
            if not self.refusals:  # which would say why
                self._refuse_whole(name, "it depends on what is not computed here", "return what a layer gives")
            return None
        self._node = None
        try:
            settled = Call(Node("output", {}, (name,)), self).settle(operand)
        except Refused as error:
            self._refuse_whole(name, f"as an output, {error.reason}", error.remedy)
            return None
        if settled.value < len(self._program.inputs):
            self._refuse_whole(name, "it returns an input as it is", "return what a layer gives")
            return None
        return settled.value

    # ---- refusals ----

    def _refuse(self, node: Node, reason: str, remedy: str) -> None:
        module = node.modules[-1] if node.modules else None
        where = f"'{module.path}' ({module.name})" if module is not None else "the model itself"
        where = f"node '{node.name}'" if node.name else where
        self.refusals.append(Refusal(where, node.shown or node.target, reason, remedy, node.line))

    def _refuse_whole(self, name: str, reason: str, remedy: str) -> None:
        what = f"'{name}'" if name else "the model"
        self.refusals.append(Refusal(what, "the program", reason, remedy))

    # ---- what rules use ----

    def operand(self, name: str) -> Operand:
        held = self._program.held.get(name)
        if held is not None and name not in self._operands:
            if not held.meta.static:
                raise Refused(f"'{held.key}' has a dynamic size", "export it without dynamic_shapes")
            return Weight(held, held.meta.sizes)
        return self._operands.get(name, UNKNOWN)

    def meta(self, name: str) -> TensorMeta:
        meta = self._program.tensors.get(name)
        if meta is None:
            raise Refused("the program does not say its result's shape", "export it without dynamic_shapes")
        return meta

    def array(self, held: Held) -> Array:
        return self._arrays[held.storage]

    def claim(self, source: str) -> bool:
        """Enter a use of a random tensor; returns whether it is the first one."""
        is_first = source not in self._claimed
        self._claimed.add(source)
        return is_first

    def hold(self, array: Array) -> Held:
        """Hold numbers that the program computes before it runs, such as a mask; equal ones once."""
        storage = f"constant {array.shape} {array.tobytes().hex()}"
        if storage not in self._constants:
            key = f"constant_{len(self._constants) + 1}"
            meta = TensorMeta(array.shape, "float32")
            self._constants[storage] = Held(key, "constant", meta, storage, persistent=False)
            self._aliases[storage].append(key)
            self._arrays[storage] = array
        return self._constants[storage]

    def step(
        self,
        op: str,
        inputs: Sequence[int | Number],
        shapes: Sequence[tuple[int, ...]],
        settings: Mapping[str, Setting],
        states: Mapping[str, tuple[Weight, tuple[int, ...]]],
        node: Node,
    ) -> tuple[Activation, ...]:
        """Append a step; its label is the path of the module that holds its parameters, or of a free parameter."""
        _check_finite([v.value for v in inputs if isinstance(v, Number)])
        layer = LAYERS.get(op)
        defaults = {} if layer is None else {p.name: p.default for p in layer.parameters}
        infinite = [] if layer is None else [p.name for p in layer.parameters if p.kind == "real"]
        for name, value in settings.items():
            _check_finite(() if name in infinite else value if isinstance(value, tuple) else (value,))
        given = {name: value for name, value in settings.items() if value != defaults.get(name)}
        label, held = "", ()
        if states:
            label, held = self._states(op, given, states, node)
        first = len(self._shapes)
        results = tuple(range(first, first + len(shapes)))
        self._shapes.update(zip(results, shapes, strict=True))
        made = Step(op, tuple(inputs), results, given, label, held, node.modules)
        self._steps.append(made)
        self._makers.update(dict.fromkeys(results, made))
        return tuple(Activation(value, shape, PLAIN) for value, shape in zip(results, shapes, strict=True))

    def maker(self, value: int) -> tuple[Step, tuple[int, ...]] | None:
        """The step that gave a value, and the shape of its first tensor. None for inputs and parameters."""
        step = self._makers.get(value)
        return (step, self._shapes[step.values[0]]) if step is not None and step.values else None

    def _states(
        self, op: str, settings: Mapping[str, Setting], states: Mapping[str, tuple[Weight, tuple[int, ...]]], node: Node
    ) -> tuple[str, tuple[StateOf, ...]]:
        module = node.modules[-1].path if node.modules else ""
        keys = {suffix: self._key(weight.held, f"{module}.{suffix}") for suffix, (weight, _) in states.items()}
        first, key = next(iter(keys.items()))
        label = label_of(key[: -len(first) - 1] if first and key.endswith(f".{first}") else key)
        owners = [self._owner.get(weight.held.storage) for weight, _ in states.values()]
        if any(owner is not None for owner in owners):
            owner = owners[0]
            if owner is None or any(other != owner for other in owners) or owner[1:] != (op, settings):
                tied = next(o[0] for o in owners if o is not None)
                raise Refused(
                    f"its parameters are tied to those of '{tied}', which is not the same layer in everything",
                    "give the layers parameters of their own, or call one module twice",
                )
            label = owner[0]
        for weight, _ in states.values():
            if weight.held.meta.dtype != "float32":
                raise Refused(f"'{weight.held.key}' is {weight.held.meta.dtype}", "call model.float() first")
            self._owner[weight.held.storage] = (label, op, settings)
        return label, tuple(StateOf(suffix, keys[suffix], shape) for suffix, (_, shape) in states.items())

    def _key(self, held: Held, wanted: str) -> str:
        """Of the keys of one tensor that of the module which runs."""
        aliases = self._aliases[held.storage]
        return wanted if wanted in aliases else held.key

    # ---- the result ----

    def imported(self, name: str, outputs: tuple[int, ...]) -> Imported:
        """The network: steps that the outputs depend on, and what becomes of every key of the `state_dict`."""
        needed = set(outputs)
        live: list[Step] = []
        for step in reversed(self._steps):
            if needed.intersection(step.results):
                needed.update(step.values)
                live.append(step)
        live.reverse()
        live = only_parts_that_are_used(live, outputs, self._shapes)
        steps = tuple(outside_of_others(growing(live)))
        inputs = tuple((given, self._shapes[n]) for n, given in enumerate(self._program.inputs) if n in needed)
        numbers = {n: i for i, n in enumerate([n for n in range(len(self._program.inputs)) if n in needed])}
        results = [value for step in steps for value in step.results]
        numbers |= {value: len(inputs) + i for i, value in enumerate(results)}
        steps = tuple(renumbered(step, numbers) for step in steps)
        keys, arrays, kept, frozen = self._keys(steps)
        return Imported(
            name,
            inputs,
            steps,
            tuple(numbers[value] for value in outputs),
            {number: self._shapes[value] for value, number in numbers.items()},
            keys,
            arrays,
            kept,
            frozen,
            self._program.writer,
        )

    def _keys(
        self, steps: Sequence[Step]
    ) -> tuple[tuple[Key, ...], dict[str, Array], dict[str, Array], tuple[str, ...]]:
        held_by_key = {held.key: held for held in (*self._program.held.values(), *self._constants.values())}
        states: dict[str, str] = {}  # storage -> state
        arrays: dict[str, Array] = {}
        frozen: list[str] = []
        for step in steps:
            for state in step.states:
                held = held_by_key[state.key]
                name = state.name(step.label)
                if held.storage in states:
                    continue
                states[held.storage] = name
                arrays[name] = np.ascontiguousarray(self.array(held)).reshape(state.shape)
                if step.op != "constant" and state.suffix not in STATISTICS and not self._trained(held):
                    frozen.append(name)
        keys: list[Key] = []
        kept: dict[str, Array] = {}
        kept_as: dict[str, str] = {}
        for held in self._program.held.values():
            if held.kind == "constant" or not held.persistent:
                continue
            state = states.get(held.storage, "")
            if not state and held.storage not in kept_as:
                array = self.array(held)
                kept[held.key] = from_bf16(array) if held.meta.dtype == "bfloat16" else array
                kept_as[held.storage] = held.key
            kept_key = kept_as.get(held.storage, "")
            per_update = 0 if state else self._program.counts.get(held.storage, 0)
            keys.append(Key(held.key, state, held.meta.sizes, held.meta.dtype, kept_key, per_update))
        return tuple(keys), arrays, kept, tuple(frozen)

    def _trained(self, held: Held) -> bool:
        """Whether any of the names of a parameter asks for a gradient."""
        return any(h.meta.trained for h in self._program.held.values() if h.storage == held.storage)


def _keeps_type(target: str) -> bool:
    """Whether an operation may give booleans or integers of a tensor: comparisons, and what moves elements alone."""
    schema = schema_of(target)
    name = target.removeprefix("aten.").partition(".")[0]
    return name in _OF_TRUTH or (schema is not None and schema.viewed(0) is not None)


def _check_finite(values: Sequence[object]) -> None:
    """Refused where one of these numbers is none that a source can say."""
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"it computes with the number {value:g}", "use finite numbers")
