"""Programs without writes: each operation in place becomes an operation that gives a new tensor.

PyTorch's tensors are views of memory, and an operation in place changes every view of it. Here each tensor has a base
(the tensor that owns the memory) and a chain of views that leads from the base to the tensor. A write computes a new
tensor, which is put back along the chain into a new version of the base. A view that is read after a write is computed
again, from the newest version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mbc.interchange.aten.operands import Refused
from mbc.interchange.aten.operation_schemas import Schema, out_of_place, schema_of
from mbc.interchange.aten.views import ViewStep, part_of, scattered, viewed
from mbc.interchange.program import Argument, Node, Program, TensorMeta, TensorName, operands_of, tensors_of, with_names

_COUNTER = "num_batches_tracked"
_STATISTICS = ("running_mean", "running_var")
_ANEW = "compute a new tensor in each call"


def functionalize(program: Program) -> Program:
    """Return a program that computes the same outputs without operations in place.

    Nodes that no output needs are left out, except for nodes that change buffers of the model. A write that cannot be
    translated becomes a node with a refusal.
    """
    return _Functional(program).run()


@dataclass(frozen=True, slots=True)
class _Alias:
    """A tensor of the program: its base, the views that lead to it, and its newest value.

    `name` is the tensor's value at `version` of the base.
    """

    base: str
    chain: tuple[ViewStep, ...]
    name: str
    version: int


class _Functional:
    """The nodes so far, the aliases of all tensors, and the newest value and version of each base."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._tensors: dict[str, TensorMeta] = dict(program.tensors)
        self._nodes: list[Node] = []
        self._aliases: dict[str, _Alias] = {}
        self._newest: dict[str, tuple[str, int]] = {}
        self._without_gradients: set[str] = set()  # tensors that a region without gradients computed
        self._refused: list[Node] = []  # writes that cannot be translated, whether or not their results are used
        self._changing = _changing(program)
        self._counts: dict[str, int] = {}

    def run(self) -> Program:
        for node in self._program.nodes:
            self._take(node)
        outputs = tuple(map(self._current, self._program.outputs))
        nodes = _live(self._nodes, set(outputs), {id(node) for node in self._refused})
        return replace(self._program, nodes=nodes, outputs=outputs, tensors=self._tensors, counts=self._counts)

    def _take(self, node: Node) -> None:
        schema = schema_of(node.target)
        written = schema.written if schema is not None else ()
        name = node.target.removeprefix("aten.").partition(".")[0]
        is_unknown_write = schema is None and name.endswith("_") and not name.endswith("__")
        if (written or is_unknown_write) and node.refusal is None:
            self._write(node, written[0].name if len(written) == 1 else "")
            return
        taken = with_names(node, self._current)
        read = [name for key, value in node.arguments.items() for name in tensors_of(value) if key not in _STATISTICS]
        changed = next((self._changing[b] for b in (self._alias(n).base for n in read) if b in self._changing), None)
        if changed is not None and node.refusal is None:
            reason = f"it reads '{changed}', which each step changes"
            taken = replace(taken, refusal=(reason, "let only the layers read their counters and running statistics"))
        self._nodes.append(taken)
        if not node.has_gradients:
            self._without_gradients.update(node.outputs)
        for number, output in enumerate(node.outputs):
            argument = viewed(node, number, self._tensors)
            if argument is None:
                self._alias(output)
            else:
                operand = node.arguments[argument]
                assert isinstance(operand, TensorName)
                self._view(output, self._alias(operand.name), ViewStep(node, number, argument))

    # ---- aliases ----

    def _alias(self, name: str) -> _Alias:
        """Return the alias of a tensor; the tensor is its own base unless a view was entered."""
        return self._aliases.setdefault(name, _Alias(name, (), name, 0))

    def _value(self, base: str) -> tuple[str, int]:
        return self._newest.get(base, (base, 0))

    def _view(self, output: str, of: _Alias, step: ViewStep) -> None:
        self._aliases[output] = _Alias(of.base, (*of.chain, step), output, self._value(of.base)[1])

    def _current(self, name: str) -> str:
        """Return the current meaning of a tensor's name, which is the view of the newest version of its base."""
        alias = self._alias(name)
        newest, version = self._value(alias.base)
        if alias.version != version:
            value = newest
            for step in alias.chain:
                value = self._again(step, value)
            self._aliases[name] = replace(alias, name=value, version=version)
        return self._aliases[name].name

    def _again(self, step: ViewStep, viewed_name: str) -> str:
        """Return the result of a view that is computed again, from another version of the viewed tensor."""
        names = tuple(self._fresh(output) for output in step.node.outputs)
        arguments = {**step.node.arguments, step.argument: TensorName(viewed_name)}
        self._nodes.append(replace(step.node, arguments=arguments, outputs=names))
        return names[step.result]

    def _fresh(self, name: str) -> str:
        """Return a new name for another version of a tensor, of the same shape and type."""
        stem, number = name.partition("@")[0], 1
        while f"{stem}@{number}" in self._tensors:
            number += 1
        if name in self._tensors:
            self._tensors[f"{stem}@{number}"] = self._tensors[name]
        return f"{stem}@{number}"

    # ---- writes ----

    def _write(self, node: Node, argument: str) -> None:
        operand = node.arguments.get(argument)
        if not isinstance(operand, TensorName):
            self._refuse(node, f"it writes to several tensors, or to an unknown one ({node.target})", _ANEW)
            return
        if self._counts_calls(node, operand.name):
            return
        target = out_of_place(node.target)
        functional = schema_of(target)
        if functional is not None and functional.viewed(0) is not None:
            self._regard(replace(node, target=target), operand.name, argument)
            return
        try:
            self._check_writable(node, operand.name)
            taken = with_names(replace(node, target=target, arguments=_in_order(node, functional)), self._current)
            result = self._fresh(operand.name)
            self._nodes.append(replace(taken, outputs=(result, *node.outputs[1:])))
            self._store(node, operand.name, result)
        except Refused as error:
            self._refuse(node, error.reason, error.remedy)
            return
        for output in node.outputs[:1]:
            self._aliases[output] = self._aliases[operand.name]

    def _counts_calls(self, node: Node, name: str) -> bool:
        """Count a batch norm's call if the node only increases `num_batches_tracked`.

        Returns:
            False if the node is anything else.
        """
        held = self._program.held.get(self._alias(name).base)
        by = node.arguments.get("other")
        if held is None or node.target != "aten.add_.Tensor" or not held.key.endswith(_COUNTER):
            return False
        if not isinstance(by, int) or node.arguments.get("alpha", 1) != 1:
            return False
        self._counts[held.storage] = self._counts.get(held.storage, 0) + by
        self._aliases[node.outputs[0]] = self._alias(name)
        return True

    def _regard(self, node: Node, name: str, argument: str) -> None:
        """Enter a change of shape in place (`squeeze_`). From now on the name means a view."""
        taken = with_names(node, self._current)
        self._nodes.append(taken)
        self._view(node.outputs[0], self._alias(name), ViewStep(node, 0, argument))
        self._aliases[name] = self._aliases[node.outputs[0]]

    def _check_writable(self, node: Node, name: str) -> None:
        """Raise Refused for a write that would change an input or the model, or that gradients would not see.

        Raises:
            Refused: The write cannot be translated.
        """
        alias = self._alias(name)
        held = self._program.held.get(alias.base)
        if held is not None:
            raise Refused(f"it changes '{held.key}' while it runs", _ANEW)
        if alias.base in self._program.inputs:
            raise Refused(f"it changes the input '{alias.base}'", "use the operation that is not in place")
        if not node.has_gradients and alias.base not in self._without_gradients:
            raise Refused(
                "it writes, under torch.no_grad(), to a tensor that gradients flow through",
                "write outside of no_grad()",
            )
        if any(step.node.target.startswith("aten.detach") for step in alias.chain):
            raise Refused("it changes a detached tensor whose memory others share", "clone the detached tensor first")
        for other in operands_of(node):
            if self._alias(other).base == alias.base and self._overlaps(alias.chain, self._alias(other).chain):
                reason = "it reads and writes overlapping parts of one tensor, so that the order of writes decides"
                raise Refused(reason, "clone the tensor that it reads first")

    def _overlaps(self, one: tuple[ViewStep, ...], other: tuple[ViewStep, ...]) -> bool:
        """Return whether two views of one base may share elements; equal views count as not overlapping."""
        for a, b in zip(one, other, strict=False):
            if a == b or self._is_same_view(a, b):
                continue
            first, second = (part_of(step, self._tensors[_viewed(step)], self._tensors) for step in (a, b))
            if first is None or second is None or first[0] != second[0]:
                return True
            return not first[1].isdisjoint(second[1])
        return len(one) != len(other)

    def _is_same_view(self, a: ViewStep, b: ViewStep) -> bool:
        arguments = [{k: v for k, v in s.node.arguments.items() if k != s.argument} for s in (a, b)]
        return (a.node.target, a.result, arguments[0]) == (b.node.target, b.result, arguments[1])

    def _store(self, node: Node, name: str, result: str) -> None:
        """Put a new value of a tensor back into its base, view by view."""
        alias = self._alias(name)
        newest, version = self._value(alias.base)
        bases = [newest]
        for step in alias.chain[:-1]:
            bases.append(self._again(step, bases[-1]))
        value = result
        for step, base in zip(reversed(alias.chain), reversed(bases), strict=True) if alias.chain else ():
            put = scattered(step, self._tensors[base], self._tensors)
            if put is not None:
                value = self._put(node, base, value, *put)
        self._newest[alias.base] = (value, version + 1)
        self._aliases[name] = replace(alias, name=result, version=version + 1)

    def _put(self, node: Node, base: str, value: str, target: str, arguments: Mapping[str, Argument]) -> str:
        whole = self._fresh(base)
        is_part = target.endswith("_scatter.default")
        tensors = {"self": TensorName(base), "src": TensorName(value)} if is_part else {"self": TensorName(value)}
        self._nodes.append(replace(node, target=target, arguments={**tensors, **arguments}, outputs=(whole,)))
        return whole

    def _refuse(self, node: Node, reason: str, remedy: str) -> None:
        """Enter a write that cannot be translated, even if no output needs it, because the model would differ."""
        self._refused.append(replace(node, refusal=(reason, remedy)))
        self._nodes.append(self._refused[-1])
        for output in node.outputs:
            self._alias(output)


def _viewed(step: ViewStep) -> str:
    operand = step.node.arguments[step.argument]
    assert isinstance(operand, TensorName)
    return operand.name


def _in_order(node: Node, functional: Schema | None) -> Mapping[str, Argument]:
    """Return the arguments of a node, under the names of the operation that is not in place."""
    schema = schema_of(node.target)
    if schema is None or functional is None:
        return node.arguments
    names = {own.name: other.name for own, other in zip(schema.parameters, functional.parameters, strict=False)}
    return {names.get(key, key): value for key, value in node.arguments.items()}


def _changing(program: Program) -> dict[str, str]:
    """Return the key of each buffer that layers of a program change in each step, by its name in the program."""
    names: set[str] = set()
    for node in program.nodes:
        if _changes_statistics(node):
            names.update(name for key in _STATISTICS for name in tensors_of(node.arguments.get(key)))
        names.update(tensors_of(node.arguments.get("self")) if node.target == "aten.add_.Tensor" else ())
    storages = {held.storage for name, held in program.held.items() if name in names}
    return {name: held.key for name, held in program.held.items() if held.storage in storages}


def _live(nodes: list[Node], needed: set[str], refused: set[int]) -> tuple[Node, ...]:
    """Return the nodes that `needed` tensors depend on, refused writes, and nodes that change statistics."""
    kept: list[Node] = []
    for node in reversed(nodes):
        if id(node) in refused:
            kept.append(node)
            needed.update(operands_of(node))
        elif not needed.isdisjoint(node.outputs) or _changes_statistics(node):
            if needed.isdisjoint(node.outputs):
                reason = "its result is used nowhere, but it changes its running statistics"
                node = replace(node, refusal=(reason, "use its result, or leave the call out"))
            kept.append(node)
            needed.update(operands_of(node))
    return tuple(reversed(kept))


def _changes_statistics(node: Node) -> bool:
    name = {"aten.batch_norm.default": "training", "aten.instance_norm.default": "use_input_stats"}.get(node.target, "")
    return node.arguments.get(name) is True and node.arguments.get("running_mean") is not None
