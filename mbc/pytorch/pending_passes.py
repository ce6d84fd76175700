"""Forward passes of a planned model that await their backward pass.

What a backward pass reads is in the arena, which all programs of a model share. Before another pass runs there, it is
put away: copied to memory of PyTorch's, from which the backward pass takes it back. Memory alone limits how many
forward passes may wait (a GAN's real and fake images, siamese networks, a pass of a teacher in between). If too little
is free on the GPU, host memory serves. PyTorch would hardly find room there for a pass of its own.
"""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mbc.pytorch.compiled_model import ordered
from mbc.pytorch.leaves import Leaves
from mbc.pytorch.planned_program import PlannedProgram

torch: Any = importlib.import_module("torch")


@dataclass(eq=False)
class Ticket:
    """A forward pass; its backward pass holds the ticket, so that its memory is freed with PyTorch's graph.

    Attributes:
        program: The program that runs both passes.
        number: Number of the mini-batch.
        copies: What the backward pass reads, if it was put away.
        used: True after the backward pass.
        versions: Those of the tensors that both passes read, at the forward pass.
        constant: The numbers of the outputs that need no gradient.
        leaves: The trained parameters in PyTorch's graph; None for a pass without gradients.
    """

    program: PlannedProgram
    number: int = 0
    copies: list[Any] | None = None
    used: bool = False
    versions: Sequence[int] = ()
    constant: Sequence[int] = ()
    leaves: Leaves | None = None


class PendingPasses:
    """The forward passes of one model that await their backward pass; the arena has the values of at most one."""

    def __init__(self) -> None:
        """Begin without any."""
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._present: weakref.ref[Ticket] | None = None  # the pass that ran last in the arena
        self._has_warned = False
        self._places: dict[int, list[Any]] = {}  # tensors over the kept bytes of a program, by the program's identity

    @property
    def is_empty(self) -> bool:
        """True if no forward pass awaits its backward pass."""
        return all(ticket.used for ticket in self._tickets)

    def begin(self, program: PlannedProgram, inputs: Sequence[Any]) -> Ticket:
        """Run a forward pass, after `put_away`."""
        ticket = Ticket(program)
        ticket.number = program.begin(inputs)
        self._tickets.add(ticket)
        self._present = weakref.ref(ticket)
        return ticket

    def put_away(self) -> str:
        """Free the arena for another pass; return why that is impossible, or an empty text."""
        ticket = None if self._present is None else self._present()
        if ticket is not None and not ticket.used:
            with self._memory(ticket.program) as places:
                ticket.copies = self._copies(places)
            if ticket.copies is None:
                return "too little memory is free to keep the values of an earlier call for its backward pass"
        self._present = None
        return ""

    def take_back(self, ticket: Ticket, again: bool) -> None:
        """Put what the backward pass of a ticket reads into the arena, if it is not there.

        Args:
            ticket: The ticket of the forward pass.
            again: Whether another backward pass may follow (`retain_graph=True`), for which a copy is kept.

        Raises:
            RuntimeError: No memory is left for what the arena has now, or for the copy.
        """
        if (again or ticket.copies is not None) and (reason := self.put_away()):
            raise RuntimeError(f"mbc cannot compute a backward pass: {reason}")
        if ticket.copies is not None:
            with self._memory(ticket.program) as places:
                for tensor, copy in zip(places, ticket.copies, strict=True):
                    tensor.copy_(copy)
        if not again:
            ticket.copies, self._present = None, weakref.ref(ticket)

    def _copies(self, places: Sequence[Any]) -> list[Any] | None:
        """Return copies where the tensors are, else in host memory; None if there is no room in either."""
        for to_host in (False, True):
            try:
                copies = [_copied(tensor, to_host) for tensor in places]
            except RuntimeError:  # the kind of PyTorch's errors of too little memory
                continue
            if to_host and not self._has_warned:
                self._has_warned = True
                message = "the values of an earlier call wait in host memory, which is slow: too little other is free"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            return copies
        return None

    @contextmanager
    def _memory(self, program: PlannedProgram) -> Generator[list[Any]]:
        """Yield tensors over what a program keeps between its halves, within the plan's order of work."""
        halves = program.halves
        with halves.lent(), ordered(halves.device), torch.inference_mode(False), torch.no_grad():
            if id(program) not in self._places:
                self._places[id(program)] = [torch.from_dlpack(halves.shared(place)) for place in halves.kept]
            yield self._places[id(program)]


def _copied(tensor: Any, to_host: bool) -> Any:
    return tensor.to("cpu" if to_host else tensor.device, copy=True)
