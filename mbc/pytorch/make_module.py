"""Plans a model for `mbc.module`."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mbc.errors import BudgetError, MbcError
from mbc.hardware.target import current_gpu
from mbc.interchange.importing import check_source
from mbc.interchange.write import Objective, write_source
from mbc.ir.types import Layout
from mbc.ops.inner_product import INNER_PRODUCT
from mbc.options import Options
from mbc.progress import busy
from mbc.pytorch.check_model import Subject, check_model
from mbc.pytorch.compiled_model import TorchMemory, memory_text, open_compiled, precision_name, silent
from mbc.pytorch.copies import copy_model
from mbc.pytorch.exported_model import export_model, network_of, refuse_model
from mbc.pytorch.model_tensors import entries_of, example_tensors
from mbc.pytorch.planned_module import Forward, Planned
from mbc.pytorch.planned_program import PlannedProgram, inner_product, structure_of
from mbc.pytorch.process_memory import Limit, free_unused, limit_of, with_memory
from mbc.runtime.arguments import choice, duration_of
from mbc.runtime.driver import report_no_gpu
from mbc.runtime.halves import Halves
from mbc.runtime.opening import DEVICES, open_plan
from mbc.source import Source
from mbc.stages import Stages

torch: Any = importlib.import_module("torch")
FALLBACKS = ("torch", "error")


def plan_module(
    model: Any,
    example: Any,
    *,
    memory: str | int,
    reserve: str | int | None,
    precision: Any,
    device: str,
    fallback: str,
    seed: int,
    measure_for: str | None,
    check: bool | None,
    contiguous: bool,
    progress: bool,
) -> Any:
    """Return the model with a plan behind its `forward`; `mbc.module` documents the arguments and errors.

    Raises:
        MbcError: The errors of `mbc.module`.
    """
    choice("fallback", fallback, FALLBACKS)
    choice("device", device, DEVICES)
    settings = (("memory.device", memory_text(memory)), ("train.precision", precision_name(precision)))
    # Where the layout of one state is given, states without a given layout are channels first.
    layouts = (("control", Layout.CHANNELS_FIRST.value),) if contiguous else ()
    options = Options(settings=settings, measure_for_s=duration_of("measure_for", measure_for), state_layouts=layouts)
    limit = limit_of(memory, reserve, device, precision_name(precision))
    if device == "cuda" and current_gpu() is None:
        report_no_gpu("none is visible to this process")
    if isinstance(getattr(model, "forward", None), Forward) and model.forward.planned is not None:
        raise MbcError("MBC333", "this model has a plan already", "close it first: model.forward.planned.close()")
    compilation = _Compilation(
        options, limit, device, seed, check, entries=("optimizer = none", *_input_gradients(example))
    )
    try:
        with busy("planning a module") if progress else nullcontext(silent) as say:
            say("import")
            program = compilation.first(model, example, Stages(announce=say))
        Planned(model, program, compilation, fallback == "error")
    except MbcError as error:
        if fallback == "error" or not isinstance(model, torch.nn.Module):
            raise
        message = f"the model runs in PyTorch ({error.code}): {error.message}; {error.remedy}"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return model


@dataclass(frozen=True, slots=True)
class _Compilation:
    """The settings with which all programs of a model are compiled.

    Attributes:
        options: The options of the first program's compilation.
        limit: The memory that the process may take; None on the CPU.
        device: The device that the user named.
        seed: The seed of random layers.
        check: As in `mbc.module`.
        entries: Entries of the source's `train` section.
    """

    options: Options
    limit: Limit | None
    device: str
    seed: int
    check: bool | None
    entries: tuple[str, ...]

    def first(self, model: Any, example: Any, stages: Stages) -> PlannedProgram:
        """Return the program for inputs like the example."""
        refuse_model(model)
        if not isinstance(model.__dict__.get("forward"), Forward | None):
            raise MbcError(
                "MBC330",
                "the model has a forward of its own, as torch.compile makes it, which a plan would replace",
                "call mbc.module first and torch.compile afterwards",
            )
        _check_ranks(model)
        free_unused()
        kind = partial(Halves, allocate=TorchMemory)
        return self._program(model, example_tensors(example), self.check, kind, self.options, self.device, stages)

    def excess_bytes(self, first: PlannedProgram) -> int:
        """Return by how many bytes the process exceeds its limit now."""
        overhead_bytes = first.halves.plan.predictions.overhead_bytes
        return 0 if self.limit is None else self.limit.excess_bytes(overhead_bytes)

    def smaller(self, first: PlannedProgram, less_bytes: int) -> PlannedProgram:
        """Return a program that takes so many bytes less than the first program, which is closed.

        Raises:
            MbcError: The errors of a compilation.
        """
        free_unused()
        predicted = first.halves.plan.predictions
        size_bytes = max(1, predicted.arena_bytes + predicted.overhead_bytes - less_bytes)
        options = with_memory(self.options, size_bytes)
        source = Source(f"{first.exported.network.name}.mbc", first.source)
        kind = partial(Halves, allocate=TorchMemory)
        halves = open_compiled(kind, source, options, Stages(announce=silent), first.halves.device, self.seed)
        halves.follow(first.halves)
        return replace(first, halves=halves)

    def further(self, model: Any, inputs: Sequence[Any], first: PlannedProgram) -> PlannedProgram:
        """Return a program for other inputs, over the memory of the first program.

        Raises:
            MbcError: MBC340 if it does not fit there, and the errors of a compilation.
        """
        halves = first.halves
        predicted = halves.plan.predictions
        options = with_memory(self.options, predicted.arena_bytes + predicted.overhead_bytes)
        options = replace(options, state_layouts=halves.layouts)

        def kind(subject: Any, seed: int, device: str) -> Halves:
            plan = open_plan(subject)[0]
            if not halves.same_states(plan):
                raise MbcError(
                    "MBC340", "the program for these inputs does not fit into the memory of the first one",
                    "make the module with the largest inputs as its example",
                )  # fmt: skip
            return Halves(subject, seed, device, arena_of=halves)

        inputs = example_tensors(tuple(inputs))
        return self._program(model, inputs, False, kind, options, halves.device, Stages(announce=silent))

    def _program(
        self, model: Any, examples: tuple[Any, ...], check: bool | None, kind: Callable[..., Halves],
        options: Options, device: str, stages: Stages,
    ) -> PlannedProgram:  # fmt: skip
        # mbc imports float32; the plan's precision decides in which type the step computes.
        single = copy_model(model, dtype=torch.float32) if _is_double(model) else model
        examples = tuple(x.float() if x.dtype is torch.float64 else x for x in examples)
        trained = {id(parameter) for parameter in single.parameters() if parameter.requires_grad}
        exported = network_of(single, examples, trained)
        network = exported.network
        objectives = [Objective(INNER_PRODUCT)] * len(network.outputs)
        title = "Made from a model of PyTorch, which computes the loss."
        text = write_source(network, objectives, title, training=self.entries)
        check_source(text, network)
        subject = Subject(network, text, objectives, [inner_product] * len(network.outputs), exported.used)
        check_model(single, examples, subject, trained, check, export_model)
        structure, leaves = structure_of(single, examples)
        source = Source(f"{network.name}.mbc", text)
        beside_bytes = 0
        if self.limit is not None and options is self.options:
            beside_bytes = self.limit.beside_bytes(model, network)
            options = with_memory(options, max(1, self.limit.limit_bytes - beside_bytes))
        try:
            halves = open_compiled(kind, source, options, stages, device, self.seed)
        except BudgetError as error:
            if self.limit is None or not beside_bytes:
                raise
            raise self.limit.explained(error, beside_bytes) from error
        return PlannedProgram(exported, text, halves, structure, leaves)


def _check_ranks(model: Any) -> None:
    """Raise MBC333 for a model within DDP, whose buckets have the strides that parameters had before they move.

    DDP would write averaged gradients in another order of elements than it reads.

    Raises:
        MbcError: MBC333.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    own = {id(parameter) for parameter in model.parameters()}
    gc.collect()
    kind = torch.nn.parallel.DistributedDataParallel
    wrappers: list[Any] = [held for held in gc.get_objects() if issubclass(type(held), kind)]
    if any(not own.isdisjoint(map(id, wrapper.parameters())) for wrapper in wrappers):
        raise MbcError(
            "MBC333",
            "this model is within DistributedDataParallel, which keeps gradients in the present order of elements",
            "plan it first, then wrap it: DistributedDataParallel(mbc.module(model, example))",
        )


def _input_gradients(example: Any) -> tuple[str, ...]:
    needed = any(getattr(given, "requires_grad", False) for given in entries_of(example))
    return ("input_gradients = true",) if needed else ()


def _is_double(model: Any) -> bool:
    return any(tensor.dtype is torch.float64 for tensor in model.parameters())
