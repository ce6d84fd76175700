"""Writes the text of a source from a network's blocks and body."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mbc.interchange.blocks import Block, Item, find_blocks, literal
from mbc.interchange.modules import Group, build_tree
from mbc.interchange.source_names import FRESH, Names
from mbc.interchange.steps import OPERATORS, Imported, Number

WIDTH = 116
_CUT = 4  # stages of a pipe after which it may end, where a module ends
_OF_LOG_PROBABILITIES = ("nll", "kl_divergence")  # losses of log probabilities, which few models return
_OF_SEGMENTATION = ("dice", "tversky", "focal")
LOSSES = ("softmax_cross_entropy", "binary_cross_entropy", "mse", "l1", "smooth_l1", *_OF_SEGMENTATION)
_OF_CLASSES = ("softmax_cross_entropy", "nll", *_OF_SEGMENTATION)  # their targets are class numbers
_BY_POSITION = (*_OF_CLASSES, "kl_divergence")  # means over samples and positions, but not over classes


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one output, against a target of its own.

    Attributes:
        loss: One of `LOSSES`.
        settings: Its settings as the language writes them: `smoothing=0.1`.
        weight: Its factor in the sum of all losses.
        soft: Whether the target of `softmax_cross_entropy` gives the probability of each class.
        reduction: `mean` over samples and positions (and over channels if the loss compares elements); `sum`; `rows`,
            the sum over a sample, divided by the number of samples; `elements`, the mean over all elements.
        factor: The factor that makes the language's layer equal to PyTorch's loss.
    """

    loss: str
    settings: str = ""
    weight: float = 1.0
    soft: bool = False
    reduction: str = "mean"
    factor: float = 1.0

    @property
    def output(self) -> str:
        """The name of an output that has this loss."""
        of_logits = ("binary_cross_entropy", *_OF_LOG_PROBABILITIES, *_OF_CLASSES)
        return "logits" if self.loss in of_logits and "logits=false" not in self.settings else "prediction"

    @property
    def of_classes(self) -> bool:
        """True if the target holds class numbers."""
        return self.loss in _OF_CLASSES and not self.soft and "sigmoid=true" not in self.settings

    def target(self, shape: tuple[int, ...]) -> str:
        """Return the shape and type of the target of an output with this shape."""
        sizes = ["batch", *map(str, shape[2:] if self.of_classes else shape[1:])]
        return f"[{', '.join(sizes)}] : {'class' if self.of_classes else 'float'}"

    def line(self, output: str, target: str, shape: tuple[int, ...]) -> str:
        """Return the statement of the loss of an output with this shape."""
        text = f"({output}, {target}) |> {self.loss}" + (f"({self.settings})" if self.settings else "")
        places = math.prod(shape[2:] if self.loss in _BY_POSITION else shape[1:])
        factors = {"sum": ("batch", str(places)), "rows": (str(places),), "elements": (f"1 / {(*shape, 1)[1]}",)}
        own = (literal(float(self.weight)), literal(float(self.factor)))
        numbers = [n for n in (*own, *factors.get(self.reduction, ())) if n not in ("1", "1.0")]
        return f"  loss {' * '.join([*numbers, f'({text})'])}" if numbers else f"  loss {text}"


def write_source(
    network: Imported,
    loss: str | Sequence[Objective | None],
    title: str,
    flat: bool = False,
    training: Sequence[str] = (),
) -> str:
    """Return the source of a network.

    Args:
        network: The imported network.
        loss: The name of the loss of all outputs, or the loss of each output; None for an output without a loss.
        title: The comment in the first line.
        flat: True for a source without blocks, with whole labels.
        training: Entries of the `train` section, in addition to `frozen`.
    """
    objectives = (Objective(loss),) * len(network.outputs) if isinstance(loss, str) else tuple(loss)
    names = Names()
    name = names.free(network.name)
    root = build_tree(network)
    if flat:
        root = Group("", root.name, network.steps, root.inputs, root.outputs, False)
    blocks, body = find_blocks(network, root, names.of_block)
    lines = [f"# {title}", ""]
    for block in blocks:
        lines += [*_block(block), ""]
    lines += _network(network, name, body, objectives, names)
    if training:
        frozen = "".join(f'"{pattern}", ' for pattern in _patterns(network))
        entries = [*training, *([f"frozen = ({frozen.strip()})"] if frozen else [])]
        lines += ["", "train {", *(f"  {entry}" for entry in entries), "}"]
    elif network.frozen:
        patterns = ", ".join(f'"{pattern}"' for pattern in _patterns(network))
        lines += ["", f"train {{ frozen = ({patterns}) }}" if "," in patterns else f"train {{ frozen = {patterns} }}"]
    return "\n".join([*lines, ""])


def _block(block: Block) -> list[str]:
    given = ", ".join(p.name if p.default is None else f"{p.name} = {literal(p.default)}" for p in block.parameters)
    tensors = ["x"] if len(block.inputs) == 1 else [f"x{n}" if n else "x" for n in range(len(block.inputs))]
    body = _Body(block, dict(zip(block.inputs, tensors, strict=True)), {"x"} if block.uses_channels else set())
    body.run()
    results = [body.text_of(value) for value in block.outputs]
    statements = [*body.statements, f"return {_tuple(results)}"]
    of = _tuple(tensors)
    head = f"block {block.name}({given}) on {of} {{" if given else f"block {block.name} on {of} {{"
    return [head, *(line for s in statements for line in _wrapped(s)), "}"]


def _tuple(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _network(
    network: Imported, name: str, body: Block, objectives: Sequence[Objective | None], names: Names
) -> list[str]:
    batch = network.inputs[0][1][0]
    inputs: list[str] = []
    input_names: dict[int, str] = {}
    for number, (given, shape) in enumerate(network.inputs):
        called = names.free("image" if len(network.inputs) == 1 and len(shape) == 4 else given)
        input_names[number] = called
        inputs.append(f"  input {called}[{', '.join(['batch', *map(str, shape[1:])])}] : float")
    body_of = _Body(body, input_names, set(input_names.values()), cut=True)
    body_of.run()
    statements = body_of.statements
    outputs: list[str] = []
    for value, objective in zip(network.outputs, objectives, strict=True):
        outputs.append(body_of.bind(value, names.free("prediction" if objective is None else objective.output)))
    targets, losses = _losses(network, outputs, objectives, names)
    return [
        f"network {name}(batch = {batch}) {{",
        *inputs,
        *targets,
        *(line for s in statements for line in _wrapped(s)),
        f"  output {', '.join(outputs)}",
        *losses,
        "}",
    ]


def _losses(
    network: Imported, outputs: Sequence[str], objectives: Sequence[Objective | None], names: Names
) -> tuple[list[str], list[str]]:
    """Return the declarations of the targets, and the losses; each output has a target of its own."""
    targets: list[str] = []
    lines: list[str] = []
    for name, value, objective in zip(outputs, network.outputs, objectives, strict=True):
        if objective is not None:
            target = names.free("target")
            targets.append(f"  input {target}{objective.target(network.shapes[value])}")
            lines.append(objective.line(name, target, network.shapes[value]))
    return targets, lines


def _patterns(network: Imported) -> list[str]:
    """Return patterns for the parameters that are not trained; one pattern covers all of them below a path."""
    every = [state.name(s.label) for s in network.steps for state in s.states]
    trained = {name for name in every if not name.endswith((".running_mean", ".running_var"))} - set(network.frozen)
    patterns: list[str] = []
    for name in network.frozen:
        parts = name.split(".")
        wholes = (".".join(parts[:n]) + ".*" for n in range(1, len(parts)))
        pattern = next((w for w in wholes if not any(t.startswith(w[:-1]) for t in trained)), name)
        if pattern not in patterns:
            patterns.append(pattern)
    return patterns


@dataclass
class _Chain:
    """An expression: its head, and the stages of a pipe after it; `of` are the values that it reads."""

    head: str
    of: tuple[int, ...]
    stages: list[str] = field(default_factory=list[str])
    operator: str = ""
    module: str = ""

    def text(self) -> str:
        return " |> ".join([self.head, *self.stages])


class _Body:
    """Statements of one body. A value that only one stage reads has no name."""

    def __init__(self, block: Block, names: Mapping[int, str], locked: set[str], cut: bool = False) -> None:
        self.statements: list[str] = []
        self._block = block
        self._names = dict(names)
        self._locked = locked  # names that must keep their value
        self._cut = cut
        self._chains: dict[int, _Chain] = {}
        self._uses = Counter(v for item in block.body for v in item.inputs if not isinstance(v, Number))
        self._uses.update(block.outputs)
        self._labels = Counter(item.label for item in block.body if item.label)
        self._operands: set[int] = set()  # the operands of the current item
        self._layers: dict[str, str] = {}  # names of layers that are applied several times, by label

    def run(self) -> None:
        for item in self._block.body:
            self._take(item)

    def _take(self, item: Item) -> None:
        values = {value for value in item.inputs if not isinstance(value, Number)}
        self._uses.subtract(v for v in item.inputs if not isinstance(v, Number))
        self._operands = values
        chain = self._operator(item) if item.text in OPERATORS else self._layer(item)
        self._operands = set()
        chain.module = item.module
        results = list(item.results)
        if len(results) > 1:
            names = [self._fresh(chain, value) for value in item.results]
            self.statements.append(f"{', '.join(names)} = {chain.text()}")
            return
        result = results[0]
        self._chains[result] = chain
        if self._uses[result] != 1:
            self.bind(result)

    def _operator(self, item: Item) -> _Chain:
        texts: list[str] = []
        inlined: tuple[int, ...] = ()
        for number, operand in enumerate(item.inputs):
            if isinstance(operand, Number):
                shown = literal(operand.value)
                texts.append(f"({shown})" if shown.startswith("-") and number else shown)
                continue
            chain = self._chains.get(operand)
            sums = chain is not None and not chain.stages and chain.operator == item.text and item.text in "+*"
            if chain is not None and sums and number == 0:
                texts.append(chain.text())
                del self._chains[operand]
                inlined = chain.of  # the names must stay until this expression is written
                self._operands = self._operands | set(inlined)
            else:
                texts.append(self._tensor(operand))
        of = (*inlined, *(v for v in item.inputs if not isinstance(v, Number)))
        return _Chain(f"{texts[0]} {item.text} {texts[1]}", of, operator=item.text)

    def _layer(self, item: Item) -> _Chain:
        text = self._stage(item)
        values = [v for v in item.inputs if not isinstance(v, Number)]
        if not values:
            return _Chain(text, ())
        if len(values) > 1:
            names = [self._tensor(value) for value in values]
            return _Chain(f"({', '.join(names)})", tuple(values), [text])
        chain = self._chains.pop(values[0], None)
        if chain is not None and self._cut and len(chain.stages) >= (_CUT if chain.module != item.module else 2 * _CUT):
            self._chains[values[0]] = chain
            self.bind(values[0])
            chain = None
        if chain is None:
            return _Chain(self._names[values[0]], (values[0],), [text])
        chain.stages = [*chain.stages, text]
        return chain

    def _stage(self, item: Item) -> str:
        """Return a layer with its label; a layer that is applied several times is bound to a name first."""
        text = f"{item.text} @{item.label}" if item.label else item.text
        if self._labels[item.label] < 2 or not item.label:
            return text
        if item.label not in self._layers:
            name = f"layer_{item.label.replace('.', '_')}"
            self._layers[item.label] = name
            self.statements.append(f"{name} = {text}")
        return self._layers[item.label]

    def _tensor(self, value: int) -> str:
        """Return an operand: the expression of a free parameter, or the name of any other value."""
        chain = self._chains.get(value)
        return self.text_of(value) if chain is not None and not chain.of and not chain.stages else self.bind(value)

    def text_of(self, value: int) -> str:
        """Return the expression of a value, at the end of the body."""
        chain = self._chains.pop(value, None)
        return self._names[value] if chain is None else chain.text()

    def bind(self, value: int, wanted: str = "") -> str:
        """Return the name of a value, and bind the value if it has no name or is `wanted` to have another name."""
        chain = self._chains.pop(value, None)
        if chain is None:
            if wanted and self._names[value] != wanted:
                self.statements.append(f"{wanted} = {self._names[value]}")
                self._names[value] = wanted
            return self._names[value]
        name = self._fresh(chain, value, wanted)
        self.statements.append(f"{name} = {chain.text()}")
        return name

    def _fresh(self, chain: _Chain, value: int, wanted: str = "") -> str:
        """Return a name for the result of a chain: the name of its first operand, if no later statement reads it."""
        read = {v for other in self._chains.values() if other is not chain for v in other.of}
        live = {
            name for v, name in self._names.items() if self._uses[v] > 0 or v in read | self._operands
        } | self._locked
        mine = [self._names[v] for v in chain.of if v in self._names]
        ordered = [wanted] if wanted else [*mine, "x", *FRESH, *(f"y{n}" for n in range(2, 10_000))]
        name = next(n for n in ordered if n == wanted or n not in live)
        for v in [v for v, n in self._names.items() if n == name]:
            del self._names[v]
        self._names[value] = name
        return name


def _wrapped(statement: str) -> list[str]:
    """Return the lines of a statement, broken before stages of its pipe."""
    stages = statement.split(" |> ")
    lines: list[str] = []
    line = f"  {stages[0]}"
    for stage in stages[1:]:
        if len(line) + 4 + len(stage) > WIDTH:
            lines.append(line)
            line = f"        |> {stage}"
        else:
            line += f" |> {stage}"
    return [*lines, line]
