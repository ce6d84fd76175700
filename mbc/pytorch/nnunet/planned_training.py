"""The parts of an nnU-Net trainer that run mbc's programs.

nnU-Net's network, optimizer, schedule, checkpoints and logs stay its own. A step is one program where the loss is
nnU-Net's own on one GPU. Otherwise forward and backward pass are a program, and PyTorch computes the loss and the
update.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mbc.errors import BudgetError, MbcError
from mbc.pytorch.make_module import plan_module
from mbc.pytorch.make_trainer import make_trainer
from mbc.pytorch.model_tensors import entries_of
from mbc.pytorch.nnunet.check_inputs import check_checkpoint, check_labels, check_plans
from mbc.pytorch.nnunet.loss_terms import LossTerms, terms_of
from mbc.pytorch.nnunet.training_memory import TrainingMemory
from mbc.pytorch.torch_optimizer import updates_of
from mbc.pytorch.trainer import Trainer

torch: Any = importlib.import_module("torch")
_GPU = torch.device("cuda")
_CLIP_NORM = 12.0  # a constant of nnU-Net's train_step
_Trainer: Any = object  # stands for the nnU-Net trainer that a subclass names behind this class


class PlannedTraining(_Trainer):
    """Runs the steps of an nnU-Net trainer, which is the next base class, by mbc."""

    network: Any
    planned: Trainer | None = None  # the whole step; None before training, and if PyTorch computes the loss
    _terms: LossTerms | None = None

    def __init__(
        self, plans: dict[str, Any], configuration: str, fold: int, dataset_json: dict[str, Any], device: Any = _GPU
    ) -> None:
        """Check the plans; nnU-Net documents the arguments.

        Raises:
            MbcError: MBC396 for plans that do not fit.
        """
        check_plans(plans, configuration)
        self._above.__init__(plans, configuration, fold, dataset_json, device)

    @property
    def _above(self) -> Any:
        """The methods of nnU-Net's trainer."""
        return super()

    def _do_i_compile(self) -> bool:
        """Return False: mbc takes the place of torch.compile."""
        return False

    def on_train_start(self) -> None:
        """Check the data set, plan the step, and begin the training.

        Raises:
            MbcError: MBC398 for a data set without labels, MBC399 for a limit of memory that is too low, and the errors
                of `mbc.from_torch` and `mbc.module`.
        """
        if not self.was_initialized:
            self.initialize()
        check_labels(Path(self.preprocessed_dataset_folder), self.dataset_class, self.label_manager)
        self._plan()
        self._above.on_train_start()

    def _plan(self) -> None:
        network, wrap = self.network, None
        if self.is_ddp:  # DDP's buckets have the strides of gradients, which the plan chooses
            wrap = partial(network.__class__, device_ids=network.device_ids)
            self.network = network = network.module
        network.train()
        if hasattr(network, "decoder"):
            network.decoder.deep_supervision = self.enable_deep_supervision
        terms = terms_of(self.loss) if self._has_own_step() else None
        precision = "fp16" if self.device.type == "cuda" else "fp32"
        memory = TrainingMemory(self, precision, terms is not None)
        shape = self.batch_size, self.num_input_channels, *self.configuration_manager.patch_size
        arguments: dict[str, Any] = {
            "precision": precision, "device": self.device.type, "seed": 0, "check": None, "progress": True,
            "measure_for": os.environ.get("MBC_MEASURE_FOR"),
        }  # fmt: skip
        try:
            if terms is None:
                example = torch.zeros(shape, device=self.device)
                plan_module(network, example, fallback="error", **memory.for_module(), **arguments)
            else:
                self.planned = make_trainer(
                    network, torch.zeros(shape), loss=terms.losses, optimizer=self.optimizer, targets=None,
                    clip_norm=_CLIP_NORM, accumulate=1, ema=0.0, **memory.for_step(network), **arguments,
                )  # fmt: skip
        except BudgetError as error:
            raise memory.too_small(error) from error
        self._terms = terms
        module = network.forward.planned.halves if self.planned is None else self.planned.module
        network.forward = _Forward(network, self.planned)
        memory.hold(module.plan.predictions.overhead_bytes)
        self._load_scale()
        if wrap is not None:
            self.network = wrap(network)
        what = "forward and backward pass" if terms is None else "whole step"
        self.print_to_log_file(f"mbc runs the {what}:\n{module!r}")

    def _has_own_step(self) -> bool:
        """Return whether the update is nnU-Net's own, on one GPU, by an optimizer that mbc has."""
        default: Any = importlib.import_module("nnunetv2.training.nnUNetTrainer.nnUNetTrainer").nnUNetTrainer
        try:
            updates_of(self.optimizer)
        except MbcError:
            return False
        return self._stock().train_step is default.train_step and not self.is_ddp

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the loss of one update."""
        if self.planned is None or self._terms is None:
            return self._above.train_step(batch)
        data, targets = self._moved(batch)
        loss = self.planned.step(data, *self._terms.targets(targets))
        return {"loss": torch.tensor(float(loss) + self._terms.offset).numpy()}

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the loss of a mini-batch, and its counts of voxels."""
        if self.planned is None or self._terms is None:
            return self._above.validation_step(batch)
        data, targets = self._moved(batch)
        return self._terms.validate(entries_of(self.planned.evaluate(data, copy=False)), targets)

    def _moved(self, batch: dict[str, Any]) -> tuple[Any, list[Any]]:
        """Return images and targets of a mini-batch on the device."""
        targets = entries_of(batch["target"])
        data, *moved = (t.to(self.device, non_blocking=True) for t in (batch["data"], *targets))
        return data, moved

    def save_checkpoint(self, filename: str) -> None:
        """Write a checkpoint that nnU-Net loads without mbc; the file appears whole or not at all."""
        if self.planned is not None and self.grad_scaler is not None:
            control, state = self.planned.module.control, self.grad_scaler.state_dict()
            scale = {"scale": control["loss_scale"], "_growth_tracker": int(control["since_growth"])}
            self.grad_scaler.load_state_dict({**state, **scale})
        kind, partial = type(self), f"{filename}.partial"
        own = kind.__name__
        kind.__name__ = self._name_for_prediction()  # nnU-Net writes the name of the class
        try:
            self._above.save_checkpoint(partial)
        finally:
            kind.__name__ = own
        if Path(partial).exists():
            Path(partial).replace(filename)

    def load_checkpoint(self, filename_or_checkpoint: str) -> None:
        """Continue from a checkpoint, of this trainer or of nnU-Net's own.

        Raises:
            MbcError: MBC397 for a file that is no checkpoint of this network.
        """
        if not self.was_initialized:
            self.initialize()
        check_checkpoint(filename_or_checkpoint, self.network.module if self.is_ddp else self.network)
        self._above.load_checkpoint(filename_or_checkpoint)
        self._load_scale()

    def _load_scale(self) -> None:
        """Continue with the loss scale of PyTorch's scaler."""
        if self.planned is not None and self.grad_scaler is not None:
            state = self.grad_scaler.state_dict()
            self.planned.module.set_control(loss_scale=state["scale"], since_growth=state["_growth_tracker"])

    @classmethod
    def _stock(cls) -> Any:
        """Return the first base class that knows nothing of mbc."""
        return next(kind for kind in cls.__mro__ if not issubclass(kind, PlannedTraining))

    @classmethod
    def _name_for_prediction(cls) -> str:
        """Return the name of a trainer that builds the same network and does not need mbc, if there is one."""
        stock: Any = cls._stock()
        built: Any = cls
        return stock.__name__ if built.build_network_architecture is stock.build_network_architecture else cls.__name__


class _Forward:
    """The `forward` of a network whose deep supervision may be switched off.

    Programs compute all outputs. The attribute of the network that switches deep supervision keeps its planned value
    while a program runs.

    Attributes:
        planned: The plan of `mbc.module`; None if mbc runs the whole step.
    """

    def __init__(self, network: Any, trainer: Trainer | None) -> None:
        """Put the switch around the present `forward`."""
        self._network, self._trainer = network, trainer
        self._inner: Callable[[Any], Any] = network.forward
        self.planned: Any = getattr(network.forward, "planned", None)
        self._decoder: Any = getattr(network, "decoder", None)
        self._supervised: bool | None = getattr(self._decoder, "deep_supervision", None)

    def __call__(self, images: Any) -> Any:
        """Return the outputs of all resolutions, or only that of full resolution if deep supervision is off now."""
        supervised = getattr(self._decoder, "deep_supervision", None)
        if supervised == self._supervised:
            return self._outputs(images)
        self._decoder.deep_supervision = self._supervised
        try:
            outputs = self._outputs(images)
        finally:
            self._decoder.deep_supervision = supervised
        return outputs[0] if self._supervised else outputs

    def _outputs(self, images: Any) -> Any:
        trainer = self._trainer
        if trainer is None or not trainer.open or self._network.training or torch.is_grad_enabled():
            return self._inner(images)
        outputs = trainer.evaluate(images)
        return [*entries_of(outputs)] if self._supervised else outputs
