"""A random program in the making: the text of a PyTorch module, each statement of which runs as soon as it is drawn.

Running a statement gives the shapes of its values, and drops statements that PyTorch itself refuses. The text is the
whole program: a finding is replayed, cut and read as text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from exactness import stirred
from torch import nn  # pyright: ignore[reportMissingImports]

MOST_ELEMENTS = 20_000
LARGEST_NUMBER = 1e3


Draw = Callable[["Draft"], str | None]


def operation(family: str) -> Callable[[Draw], Draw]:
    """Make a function one of the operations that `draw_operation` draws from."""

    def register(draw: Draw) -> Draw:
        draw.__dict__["family"] = family
        return draw

    return register


@dataclass
class Text:
    """A module as the statements of its `__init__` and of its `forward`, with the shape of its input.

    A statement of several lines, such as a region of `torch.no_grad()`, is one entry.
    """

    shape: tuple[int, ...]
    held: list[str] = field(default_factory=list[str])
    body: list[str] = field(default_factory=list[str])
    result: str = "x"

    def code(self) -> str:
        """Return the source of the class `Drawn`."""
        held = "".join(f"        {line}\n" for line in self.held)
        body = "".join(f"        {line}\n" for statement in self.body for line in statement.split("\n"))
        return (
            "class Drawn(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"{held}\n    def forward(self, x):\n{body}        return {self.result}\n"
        )

    def module(self, seed: int) -> nn.Module:
        """Return the module with seeded weights, none of which has a special value such as 0 or 1."""
        space = _names()
        torch.manual_seed(seed)
        exec(compile(self.code(), f"<program {seed}>", "exec"), space)
        created = space["Drawn"]()
        return stirred(created).train()

    def input(self, seed: int) -> torch.Tensor:
        """Return the program's input."""
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))


def _names() -> dict[str, Any]:
    return {"torch": torch, "nn": nn, "F": nn.functional}


class Draft:
    """The program being drawn.

    The functions of `program_vocabulary` choose values from it and write statements into it.
    """

    def __init__(self, seed: str, shape: tuple[int, ...]) -> None:
        """Begin a program with an input of this shape."""
        self.random = random.Random(seed)
        torch.manual_seed(self.random.getrandbits(48))
        self.text = Text(shape)
        self.values: list[str] = ["x"]  # oldest first
        self._module = nn.Module()
        self._space = {**_names(), "self": self._module, "x": self.text.input(0).double().requires_grad_()}
        self._count = 0

    # ---- reading the draft ----

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value."""
        return tuple(self._space[name].shape)

    def pick(self, least: int = 1, most: int = 9, besides: str = "", shape: tuple[int, ...] | None = None) -> str:
        """Draw a value of a rank between `least` and `most`, most often a late one.

        Raise LookupError if there is none.
        """
        fits = [
            name
            for name in self.values
            if least <= len(self.shape(name)) <= most
            and name != besides
            and (shape is None or self.shape(name) == shape)
        ]
        if not fits:
            raise LookupError("no value has this rank")
        return fits[-1] if self.random.random() < 0.65 else self.random.choice(fits)

    def axis(self, name: str, samples: float = 0.03) -> int:
        """Draw an axis, rarely that of the samples; one axis in three is written as a negative number."""
        rank = len(self.shape(name))
        axis = 0 if rank == 1 or self.random.random() < samples else self.random.randrange(1, rank)
        return axis - rank if self.random.random() < 0.33 else axis

    # ---- numbers ----

    def number(self, low: float, high: float) -> float:
        """Draw a number."""
        return round(self.random.uniform(low, high), self.random.choice((1, 2, 3)))

    def exact(self, low: float, high: float) -> float:
        """Draw a number that fp32 holds exactly, because programs hold the numbers that fill tensors in fp32."""
        return round(self.random.uniform(low, high) * 64) / 64

    def one_of(self, *choices: Any) -> Any:
        """Draw one of the choices."""
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    # ---- writing into the draft ----

    def layer(self, text: str) -> str:
        """Add a module, and return the text that calls it."""
        return self._hold("layer", text)

    def parameter(self, *shape: int) -> str:
        """Declare a parameter and return its name."""
        return self._hold("weight", f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) * 0.5 + 0.1)")

    def buffer(self, *shape: int) -> str:
        """Declare a buffer and return its name."""
        self._count += 1
        name = f"buffer{self._count}"
        persistent = "" if self.chance(0.7) else ", persistent=False"
        line = f"self.register_buffer('{name}', torch.randn({', '.join(map(str, shape))}){persistent})"
        self._run(line)
        self.text.held.append(line)
        self._module.double()
        return f"self.{name}"

    def _hold(self, kind: str, text: str) -> str:
        self._count += 1
        line = f"self.{kind}{self._count} = {text}"
        self._run(line)
        self.text.held.append(line)
        self._module.double()
        return f"self.{kind}{self._count}"

    def name(self) -> str:
        """Return a new name."""
        self._count += 1
        return f"v{self._count}"

    def write(self, statement: str, *names: str) -> None:
        """Run a statement and keep it; `names` are the values that it makes. Raise the exceptions of PyTorch."""
        self._run(statement)
        for name in names:
            value = self._space[name]
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                raise ValueError("it makes no tensor of numbers")
            if not 0 < value.numel() <= MOST_ELEMENTS or not bool(value.abs().amax() < LARGEST_NUMBER):
                raise ValueError("its numbers are too many or too large")
        self.text.body.append(statement)
        self.values += [name for name in names if name not in self.values]

    def let(self, expression: str) -> str:
        """Write the value of an expression under a new name."""
        name = self.name()
        self.write(f"{name} = {expression}", name)
        return name

    def attempt(self, draw: Draw) -> bool:
        """Draw an operation. If it cannot be drawn here, leave the program as it was."""
        held, body, values, count = len(self.text.held), len(self.text.body), len(self.values), self._count
        try:
            created = draw(self)
            if isinstance(created, str):
                self.let(created)
        except (LookupError, RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError):
            del self.text.held[held:], self.text.body[body:], self.values[values:]
            self._count = count + 50  # names of the failed attempt are not used again
            self._again()
            return False
        return True

    def _again(self) -> None:
        """Run the program from its beginning, because a dropped statement may have changed values."""
        self._space = {**_names(), "self": self._module, "x": self.text.input(0).double().requires_grad_()}
        for statement in self.text.body:
            self._run(statement)

    def _run(self, statement: str) -> None:
        exec(statement, self._space)
