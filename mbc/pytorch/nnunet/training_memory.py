"""The memory that an nnU-Net trainer's process may take, and what of it a plan gets."""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

from mbc.errors import BudgetError, MbcError
from mbc.pytorch.nnunet.loss_terms import CHUNK_ELEMENTS
from mbc.pytorch.process_memory import limit_of
from mbc.units import parse_size, show_enough, show_given, show_size

torch: Any = importlib.import_module("torch")
VARIABLE = "MBC_MEMORY"
_LOSS_TENSORS = 10  # of the size of the first output, which PyTorch keeps for nnU-Net's loss and its gradient
_CHUNK_TENSORS = 12  # of the size of a chunk, while the outputs of a validation are judged
_INPUTS = 3  # mini-batches on the GPU: read by the step that runs, read by the next one, and being copied


class TrainingMemory:
    """How much memory a plan may take, and how much stays for PyTorch in the same process.

    Attributes:
        reserve_bytes: The bytes for what PyTorch will allocate during the training.
    """

    def __init__(self, trainer: Any, precision: str, is_whole: bool) -> None:
        """Read the limit of the environment, and estimate what PyTorch will allocate.

        Args:
            trainer: An nnU-Net trainer that is initialized.
            precision: The precision of the plan.
            is_whole: Whether mbc runs the whole step, so that PyTorch has neither loss nor momentum.

        Raises:
            MbcError: MBC399 for a limit that is not a size.
        """
        self._text = os.environ.get(VARIABLE, "auto")
        try:
            self._limit_bytes = 0 if self._text == "auto" else parse_size(self._text)
        except ValueError as error:
            remedy = "name all memory of the process, such as 11GB"
            raise MbcError("MBC399", f"{VARIABLE} is no size: {error}", remedy) from error
        voxels = trainer.batch_size * math.prod(trainer.configuration_manager.patch_size)
        self.reserve_bytes = _INPUTS * voxels * (4 * trainer.num_input_channels + 8)
        if is_whole:
            self.reserve_bytes += _CHUNK_TENSORS * 4 * CHUNK_ELEMENTS
        else:
            momentum = sum(p.numel() * p.element_size() for p in trainer.network.parameters())
            self.reserve_bytes += momentum + _LOSS_TENSORS * 4 * voxels * trainer.label_manager.num_segmentation_heads
        self._limit = limit_of(self._text, self.reserve_bytes, trainer.device.type, precision)
        self._beside_bytes = 0

    def for_module(self) -> dict[str, Any]:
        """Return the arguments `memory` and `reserve` of `mbc.module`, which limits the process by itself."""
        return {"memory": self._text, "reserve": self.reserve_bytes}

    def for_step(self, network: Any) -> dict[str, Any]:
        """Return the argument `memory` of `from_torch`, which limits the plan.

        Raises:
            MbcError: MBC399 if PyTorch alone takes more than the limit.
        """
        if self._limit is None:
            return {"memory": self._text}
        torch.cuda.empty_cache()
        imported: Any = None  # counts only where the reserve is estimated
        self._beside_bytes = self._limit.beside_bytes(network, imported)
        if self._beside_bytes >= self._limit.limit_bytes:
            raise self._too_small(f"PyTorch alone takes {show_size(self._beside_bytes)}", self._beside_bytes)
        return {"memory": self._limit.limit_bytes - self._beside_bytes}

    def too_small(self, error: BudgetError) -> MbcError:
        """Return error MBC399 for a plan that did not fit."""
        return self._too_small(error.message, error.needed_bytes + self._beside_bytes)

    def hold(self, overhead_bytes: int) -> None:
        """Let PyTorch's allocator refuse more than the limit leaves beside context and libraries.

        nnU-Net then keeps predictions of large images in host memory.
        """
        if self._limit is not None and self._limit_bytes:
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            allowed = max(self._limit_bytes - overhead_bytes, torch.cuda.memory_reserved())
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))

    def _too_small(self, reason: str, needed_bytes: int) -> MbcError:
        limit = show_given(self._limit_bytes) if self._limit_bytes else "the free memory"
        return MbcError(
            "MBC399",
            f"the configuration does not fit into {limit} as it is: {reason}",
            f"set {VARIABLE}={show_enough(needed_bytes)} or more; `mbc nnunet plan` names the largest patch and batch"
            " that fit",
        )
