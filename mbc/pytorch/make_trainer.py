"""Makes a trainer: imports a model and its loss, plans the step, and opens it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

from mbc.hardware.target import current_gpu
from mbc.interchange.importing import check_source
from mbc.interchange.write import Objective, write_source
from mbc.ops.inner_product import INNER_PRODUCT
from mbc.options import Options
from mbc.progress import busy
from mbc.pytorch.check_model import Subject, check_model
from mbc.pytorch.compiled_model import TorchMemory, memory_text, open_compiled, precision_name, silent
from mbc.pytorch.exported_model import Exported, export_model, network_of, refuse_model
from mbc.pytorch.model_tensors import example_tensors
from mbc.pytorch.objective import fitted, is_own, judges_of, loss_modules, losses_of
from mbc.pytorch.own_loss import OwnLoss
from mbc.pytorch.planned_program import PlannedProgram, inner_product, structure_of
from mbc.pytorch.process_memory import free_unused
from mbc.pytorch.targets import Target
from mbc.pytorch.torch_optimizer import check_parameters, entries_of, settings_of_updates, updates_of
from mbc.pytorch.trainer import Took, Trainer, check_alone
from mbc.runtime.arguments import duration_of
from mbc.runtime.driver import report_no_gpu
from mbc.runtime.halves import Halves
from mbc.runtime.module import Module
from mbc.source import Source
from mbc.stages import Stages


def make_trainer(
    model: Any,
    example: Any,
    *,
    loss: Any,
    optimizer: Any,
    targets: Any,
    clip_norm: float,
    accumulate: int,
    ema: float,
    memory: str | int,
    precision: Any,
    device: str,
    seed: int,
    measure_for: str | None,
    check: bool | None,
    progress: bool,
) -> Trainer:
    """Return a trainer of a model; `mbc.from_torch` documents the arguments and errors.

    Raises:
        MbcError: The errors of `mbc.from_torch`.
    """
    began_s = time.perf_counter()
    measure_for_s = duration_of("measure_for", measure_for)
    refuse_model(model)
    if device == "cuda" and current_gpu() is None:
        report_no_gpu("none is visible to this process")
    check_alone(model)
    with busy("making a trainer") if progress else nullcontext(silent) as say:
        say("import")
        exported, text, read = import_training(
            model, example, loss=loss, optimizer=optimizer, targets=targets, clip_norm=clip_norm, accumulate=accumulate,
            ema=ema, check=check,
        )  # fmt: skip
        network = exported.network
        structure = structure_of(model, example_tensors(example)) if is_own(loss) else None
        imported_s, stages = time.perf_counter(), Stages(announce=say)
        settings = (("memory.device", memory_text(memory)), ("train.precision", precision_name(precision)))
        options = Options(settings=settings, measure_for_s=measure_for_s)
        free_unused()
        kind = partial(Module if structure is None else Halves, allocate=TorchMemory)
        module = open_compiled(kind, Source(f"{network.name}.mbc", text), options, stages, device, seed)
        module.load_state_dict(network.arrays)
    took = Took(
        time.perf_counter() - began_s,
        imported_s - began_s,
        stages.planning_seconds,
        stages.measuring_seconds,
        stages.building_seconds,
    )
    own_loss, losses = None, loss_modules(loss)
    if structure is not None and isinstance(module, Halves):
        own_loss, losses = OwnLoss(loss, PlannedProgram(exported, text, module, *structure), model), []
    return Trainer(model, optimizer, exported, text, module, updates_of(optimizer), read, losses, took, own_loss)


def import_training(
    model: Any,
    example: Any,
    *,
    loss: Any,
    optimizer: Any,
    targets: Any = None,
    clip_norm: float = 0.0,
    accumulate: int = 1,
    ema: float = 0.0,
    check: bool | None = False,
) -> tuple[Exported, str, list[Target]]:
    """Return the network of a model that `refuse_model` accepts, the source of its training, and its targets.

    The arguments and errors are those of `mbc.from_torch`.
    """
    own = is_own(loss)
    objectives = () if own else losses_of(loss)
    updates = updates_of(optimizer)
    trained = check_parameters(optimizer, model)
    examples = example_tensors(example)
    exported = network_of(model, examples, trained)
    network = exported.network
    states = {key.name: key.state for key in network.keys if key.state}
    names = dict[int, list[str]]()
    for key, tensor in model.named_parameters(remove_duplicate=False):
        if key in states and states[key] not in (*network.frozen, *names.get(id(tensor), ())):
            names.setdefault(id(tensor), []).append(states[key])
    entries = entries_of(updates, optimizer, lambda parameter: names.get(id(parameter), ()))
    entries += settings_of_updates(clip_norm, accumulate, ema)
    read = [] if own else fitted(objectives, loss, network, targets)
    objectives = [None if target is None else target.objective for target in read]
    judges = [] if own else judges_of(loss)
    if own:  # the gradients of the outputs are given
        objectives = [Objective(INNER_PRODUCT)] * len(network.outputs)
        judges = [inner_product] * len(network.outputs)
    text = write_source(network, objectives, "Made from a model of PyTorch.", training=entries)
    check_source(text, network)
    subject = Subject(network, text, objectives, judges, exported.used)
    check_model(model, examples, subject, trained, check, export_model)
    return exported, text, [target for target in read if target is not None]
