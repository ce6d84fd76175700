"""The steps of a network that rules of ATen operations add to."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from mbc.interchange.aten.operands import PLAIN, UNKNOWN, Activation, Operand, Refused, Weight
from mbc.interchange.finish import growing, only_parts_that_are_used, outside_of_others, renumbered
from mbc.interchange.program import Array, Held, Node, Program, TensorMeta
from mbc.interchange.steps import STATISTICS, Imported, Key, Number, Setting, StateOf, Step, label_of
from mbc.ops import LAYERS
from mbc.ops.rounding import from_bf16


class NetworkBuilder:
    """The steps so far, the operands of all tensors, and the numbers that the network holds."""

    def __init__(self, program: Program) -> None:
        """Create a network without steps, for the numbers that a program holds."""
        self.operands: dict[str, Operand] = {}
        self._program = program
        self._steps: list[Step] = []
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._makers: dict[int, Step] = {}
        self._owner: dict[str, tuple[str, str, Mapping[str, Setting]]] = {}  # label, layer and settings, by storage
        self._aliases: dict[str, list[str]] = defaultdict(list)
        for held in program.held.values():
            self._aliases[held.storage].append(held.key)
        self._arrays: dict[str, Array] = dict(program.arrays)
        self._constants: dict[str, Held] = {}  # by storage
        self._claimed: set[str] = set()

    def enter_input(self, number: int, shape: tuple[int, ...]) -> None:
        """Enter the shape of an input of the program; its number is its value."""
        self._shapes[number] = shape

    # ---- what rules use ----

    def operand(self, name: str) -> Operand:
        """Return the operand that stands for a tensor of the program.

        Raises:
            Refused: The tensor is held, and has a dynamic size.
        """
        held = self._program.held.get(name)
        if held is not None and name not in self.operands:
            if not held.meta.static:
                raise Refused(f"'{held.key}' has a dynamic size", "export it without dynamic_shapes")
            return Weight(held, held.meta.sizes)
        return self.operands.get(name, UNKNOWN)

    def meta(self, name: str) -> TensorMeta:
        """Return the shape, strides and type of a tensor of the program.

        Raises:
            Refused: The program does not state them.
        """
        meta = self._program.tensors.get(name)
        if meta is None:
            raise Refused("the program does not state its result's shape", "export it without dynamic_shapes")
        return meta

    def array(self, held: Held) -> Array:
        """Return the numbers of a parameter, buffer or constant."""
        return self._arrays[held.storage]

    def is_training(self) -> bool:
        """Return whether the program, or a node of it, is known to be in training mode."""
        arguments = (node.arguments for node in self._program.nodes)
        return self._program.is_training or any(True in (a.get("training"), a.get("train")) for a in arguments)

    def claim(self, source: str) -> bool:
        """Mark a random mask as used.

        Returns:
            False if the mask was used before.
        """
        is_first = source not in self._claimed
        self._claimed.add(source)
        return is_first

    def hold(self, array: Array) -> Held:
        """Return a constant with numbers that the import computes, such as a mask. Equal numbers share one constant."""
        storage = f"constant {array.shape} {array.tobytes().hex()}"
        if storage not in self._constants:
            key = f"constant_{len(self._constants) + 1}"
            meta = TensorMeta(array.shape, "float32")
            self._constants[storage] = Held(key, "constant", meta, storage, persistent=False)
            self._aliases[storage].append(key)
            self._arrays[storage] = array
        return self._constants[storage]

    def step(
        self, op: str, inputs: Sequence[int | Number], shapes: Sequence[tuple[int, ...]],
        settings: Mapping[str, Setting], states: Mapping[str, tuple[Weight, tuple[int, ...]]], node: Node,
    ) -> tuple[Activation, ...]:  # fmt: skip
        """Return the results of a new step.

        The step's label is the path of the module that holds its parameters, or the key of a free parameter.
        """
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
        step = Step(op, tuple(inputs), results, given, label, held, node.modules)
        self._steps.append(step)
        self._makers.update(dict.fromkeys(results, step))
        return tuple(Activation(value, shape, PLAIN) for value, shape in zip(results, shapes, strict=True))

    def maker(self, value: int) -> tuple[Step, tuple[int, ...]] | None:
        """Return the step that gave a value, and the shape of its first input; None for inputs and parameters."""
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
                    f"its parameters are tied to those of '{tied}', which is a different layer or has other settings",
                    "give each layer its own parameters, or call one module twice",
                )
            label = owner[0]
        for weight, _ in states.values():
            if weight.held.meta.dtype != "float32":
                raise Refused(f"'{weight.held.key}' is {weight.held.meta.dtype}", "call model.float() first")
            self._owner[weight.held.storage] = (label, op, settings)
        return label, tuple(StateOf(suffix, keys[suffix], shape) for suffix, (_, shape) in states.items())

    def _key(self, held: Held, wanted: str) -> str:
        """Return the key of a tensor in the module that runs, if the tensor has several keys."""
        aliases = self._aliases[held.storage]
        return wanted if wanted in aliases else held.key

    # ---- the result ----

    def imported(self, name: str, outputs: tuple[int, ...]) -> Imported:
        """Return the network: the steps that the outputs depend on, and the state of every key of the `state_dict`."""
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
        states: dict[str, str] = {}  # names of states, by storage
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
        """Return whether a parameter requires a gradient under any of its names."""
        return any(h.meta.trained for h in self._program.held.values() if h.storage == held.storage)


def _check_finite(values: Sequence[object]) -> None:
    """Raise Refused if one of the numbers is not finite, so that a source cannot state it.

    Raises:
        Refused: A number is infinite or NaN.
    """
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"it computes with the number {value:g}", "use finite numbers")
