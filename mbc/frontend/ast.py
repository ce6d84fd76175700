"""The syntax tree of a source: the source as written, with its places, before anything is evaluated.

Chains (`a |> f |> g`, `a + b - c`, `p and q`) are flat, so that a long pipe is not a deep tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mbc.source import Span


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A part of the source, with its place."""

    span: Span = field(repr=False)


# ---- expressions ----


@dataclass(frozen=True, slots=True, eq=False)
class Name(Node):
    """A tensor, number, layer, block, or a word such as `bf16`, depending on the context."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Number(Node):
    """A number, `true` or `false`."""

    value: int | float | bool


@dataclass(frozen=True, slots=True, eq=False)
class Size(Node):
    """An amount of memory: `12 GB`."""

    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class String(Node):
    """Quoted text: a pattern of names."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Tuple(Node):
    """A tuple: `(1, 2, 3)`."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Argument(Node):
    """`value`, or `name=value`."""

    name: str | None
    value: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Call(Node):
    """A layer, a block or a function with its settings, such as `conv(64, 3, pad=1)`. `span` is the name's."""

    name: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Labelled(Node):
    """`layer @label`; `span` is that of the label."""

    target: Expression
    label: str


@dataclass(frozen=True, slots=True, eq=False)
class Attribute(Node):
    """`tensor.shape`; `span` is that of the attribute's name."""

    target: Expression
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Index(Node):
    """An element of a tuple: `x.shape[1]`."""

    target: Expression
    index: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Unary(Node):
    """`operator`: + | - | not."""

    operator: str
    operand: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Chain(Node):
    """`first`, and then each (operator, operand, place of the operator) from left to right.

    All operators of a chain have equal precedence: + - | * / // % | ** | one comparison | and | or.
    """

    first: Expression
    rest: tuple[tuple[str, Expression, Span], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pipe(Node):
    """`first |> stage |> stage`."""

    first: Expression
    stages: tuple[Expression, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Pick(Node):
    """`then if condition else otherwise`: only the chosen side is evaluated."""

    then: Expression
    condition: Expression
    otherwise: Expression


Expression = Name | Number | Size | String | Tuple | Call | Labelled | Attribute | Index | Unary | Chain | Pipe | Pick

# ---- statements ----


@dataclass(frozen=True, slots=True, eq=False)
class Word(Node):
    """A name where it is declared or bound."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Input(Node):
    """`input name[shape] : kind`, where the kind is a type of inputs such as float."""

    name: Word
    shape: tuple[Expression, ...]
    kind: Word  # float | class


@dataclass(frozen=True, slots=True, eq=False)
class Output(Node):
    """`output value, value`."""

    values: tuple[Expression, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Loss(Node):
    """`loss value`."""

    value: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Metric(Node):
    """`metric name = value`."""

    name: Word
    value: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Return(Node):
    """`return value`, the end of a block."""

    value: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Assign(Node):
    """`name, name = value`."""

    names: tuple[Word, ...]
    value: Expression


@dataclass(frozen=True, slots=True, eq=False)
class For(Node):
    """`for names in values @label { … }`."""

    names: tuple[Word, ...]
    values: Expression
    label: Word | None
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, eq=False)
class When(Node):
    """`if condition { … } else { … }`."""

    condition: Expression
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


Statement = Input | Output | Loss | Metric | Return | Assign | For | When

# ---- declarations ----


@dataclass(frozen=True, slots=True, eq=False)
class Parameter(Node):
    """A parameter of a block or network, with its default."""

    name: str
    default: Expression | None


@dataclass(frozen=True, slots=True, eq=False)
class Block(Node):
    """A block: `span` is that of its name."""

    name: str
    parameters: tuple[Parameter, ...]
    tensors: tuple[Word, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Network(Node):
    """A network: `span` is that of its name."""

    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Node):
    """`name = value` of a section."""

    name: str
    value: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Section(Node):
    """`train { … }` or `memory { … }`."""

    name: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program(Node):
    """A whole source."""

    networks: tuple[Network, ...]
    blocks: tuple[Block, ...]
    sections: tuple[Section, ...]
