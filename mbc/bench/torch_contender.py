"""PyTorch as a contender: eager, captured into a CUDA graph, or compiled. Imported only where it is installed.

The mathematics are those of mbc's precisions: fp32 without TF32, TF32 where the plan has it, bf16 and fp16 by autocast
over fp32 weights, fp16 with a gradient scaler. Optimizers are PyTorch's fused ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mbc.bench.job import LOSS_SCALE, Contender, Job, Result
from mbc.bench.recipe import dropout_masks
from mbc.bench.timing import time_steps
from mbc.bench.torch_functions import torch
from mbc.bench.torch_network import TorchNetwork
from mbc.ir.types import Precision
from mbc.runtime.initial import initial

_HALF = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}
_CAPTURE_WARM_STEPS = 3  # on another stream before a capture, as PyTorch's manual has it


def run(job: Job, contender: Contender) -> Result:
    on_gpu = job.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        return Result(problem="this PyTorch has no CUDA")
    batches = [job.inputs(number) for number in range(job.losses)]
    began = time.perf_counter()
    trainer = Trainer(job, contender)
    placed = [trainer.module.place([batch[name] for name in trainer.network.inputs]) for batch in batches]
    masks = [trainer.masks(number + 1) for number in range(len(batches))]
    # With masks that come from outside a compiled step would be compiled for them only.
    drawn = any(masks)
    forward = trainer.module if drawn else trainer.forward
    losses: list[float] = []
    first_step_s = 0.0
    for batch, mask in zip(placed, masks, strict=True):
        losses.append(float(trainer.step(batch, mask or None, forward)))
        first_step_s = first_step_s or time.perf_counter() - began
    if drawn and contender.mode:
        began_compiled = time.perf_counter()
        float(trainer.step(placed[0], None, trainer.forward))
        first_step_s += time.perf_counter() - began_compiled
    del placed[1:], masks
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step: Callable[[], Any] = lambda: trainer.step(placed[0], None, trainer.forward)  # noqa: E731
    if contender.graph:
        step = trainer.captured(placed[0])
    synchronize = torch.cuda.synchronize if on_gpu else _nothing
    timing = time_steps(step, synchronize, job.blocks, job.block_s)
    free_bytes, total_bytes = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    return Result(
        tuple(losses),
        timing.step_ms,
        timing.spread_ms,
        timing.steps,
        first_step_s,
        torch.cuda.max_memory_allocated() if on_gpu else 0,
        total_bytes - free_bytes,
        f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        _unchecked(contender, drawn),
    )


def _nothing() -> None:
    return


def _unchecked(contender: Contender, drawn: bool) -> str:
    if contender.graph:
        return "compared before the capture"
    return "compared uncompiled, with mbc's dropout" if drawn and contender.mode else ""


class Trainer:
    """One network, its optimizer, and how a step is made."""

    def __init__(self, job: Job, contender: Contender) -> None:
        lowered = job.lowered()
        self.network, self._seed, self._device = lowered.network, job.seed, job.device
        on_gpu = job.device == "cuda"
        tf32 = lowered.precision is not Precision.FP32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True
        dtype = torch.float64 if lowered.precision is Precision.FP64 else torch.float32
        states = {
            s.value: initial(s.value, self.network.values[s.value].type, s.initializer, job.seed)
            for s in self.network.states
        }
        self.module = TorchNetwork(self.network, states, dtype, job.device, contender.channels_last)
        settings: dict[str, Any] = {"fused": True} if on_gpu else {}
        if contender.graph and lowered.optimizer.kind != "sgd":
            settings["capturable"] = True
        self._optimizer = self.module.optimizer(lowered.optimizer, job.learning_rate, **settings)
        half = _HALF.get(lowered.precision)
        self._cast = getattr(torch, half) if half else None
        scaled = lowered.precision is Precision.FP16
        self._scaler = torch.amp.GradScaler(job.device, LOSS_SCALE, enabled=scaled)
        self.forward = torch.compile(self.module, mode=contender.mode) if contender.mode else self.module

    def masks(self, step: int) -> Mapping[str, Any]:
        found = dropout_masks(self.network, self._seed, step)
        return {name: torch.tensor(mask, device=self._device) for name, mask in found.items()}

    def step(self, inputs: Sequence[Any], masks: Mapping[str, Any] | None, forward: Any) -> Any:
        """Forward, backward, update; the loss, which nobody has waited for."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._casting():
            loss, _ = forward(inputs, masks)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()

    def captured(self, inputs: Sequence[Any]) -> Callable[[], Any]:
        """The whole step as one CUDA graph, which is replayed."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_CAPTURE_WARM_STEPS):
                self.step(inputs, None, self.forward)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)  # so that gradients come to lie in the graph's own memory
        with torch.cuda.graph(graph):
            self.step(inputs, None, self.forward)
        return graph.replay

    def _casting(self) -> AbstractContextManager[Any]:
        # The cache of casts cannot be used in a capture, and otherwise saves nothing: each weight is used once.
        if self._cast is None:
            return nullcontext()
        return torch.autocast(self._device, self._cast, cache_enabled=False)
