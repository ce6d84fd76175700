"""PyTorch as a contender: eager, captured into a CUDA graph, or compiled. Imported only where it is installed.

The mathematics are those of mbc's precisions: fp32 without TF32, TF32 where the plan has it, bf16 and fp16 by autocast
over fp32 weights, fp16 with a gradient scaler. Optimizers are PyTorch's fused ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mbc.bench.contender_messages import LOSS_SCALE, Contender, Job, Result
from mbc.bench.recipe import dropout_masks
from mbc.bench.timing import Timing, host_between_ms, host_mark, time_each_step, time_steps
from mbc.bench.torch_network import TorchNetwork
from mbc.bench.torch_ranks import mean_of_ranks, parallel, process_group, ranks_agree
from mbc.equivalence.torch_functions import torch
from mbc.ir.types import Precision
from mbc.runtime.initial_states import initial
from mbc.runtime.membership import seed_of

_HALF = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}
# On another stream before a capture, as PyTorch's manual has it: DDP takes times of its own in the first ten steps.
_CAPTURE_WARM_STEPS, _DDP_WARM_STEPS = 3, 11


def run(job: Job, contender: Contender) -> Result:
    """Train and time the network of a job in PyTorch."""
    on_gpu = job.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        return Result(problem="this PyTorch has no CUDA")
    with process_group(job.share, on_gpu), _stream(contender):
        return _raced(job, contender, on_gpu)


def _raced(job: Job, contender: Contender, on_gpu: bool) -> Result:
    batches = [job.inputs(number) for number in range(job.losses)]
    began = time.perf_counter()
    trainer = Trainer(job, contender)
    placed = [trainer.module.place([batch[name] for name in trainer.network.inputs]) for batch in batches]
    masks = [trainer.masks(number + 1) for number in range(len(batches))]
    # With masks that come from outside a compiled step would be compiled for them only.
    drawn = any(masks)
    forward = trainer.plain if drawn else trainer.forward
    losses: list[float] = []
    first_step_s = 0.0
    for batch, mask in zip(placed, masks, strict=True):
        losses.append(mean_of_ranks(trainer.step(batch, mask or None, forward), job.share))
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
    timing = _timed(job, step, on_gpu)
    if not ranks_agree(trainer.module, job.share):
        return Result(problem="the parameters of the ranks came apart: gradients were not summed over them")
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


def _stream(contender: Contender) -> AbstractContextManager[Any]:
    """Return the stream on which a captured step is created, warmed up, captured and replayed.

    DDP accumulates gradients on the stream on which it was created, and the default stream cannot be captured.
    """
    return torch.cuda.stream(torch.cuda.Stream()) if contender.graph else nullcontext()


def _timed(job: Job, step: Callable[[], Any], on_gpu: bool) -> Timing:
    if job.share.ranks == 1:
        return time_steps(step, torch.cuda.synchronize if on_gpu else _nothing, job.blocks, job.block_s)
    if on_gpu:
        return time_each_step(step, _event, _between_ms, job.timed_steps)
    return time_each_step(step, host_mark, host_between_ms, job.timed_steps)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_ms(before: Any, after: Any) -> float:
    after.synchronize()
    return before.elapsed_time(after)


def _nothing() -> None:
    return


def _unchecked(contender: Contender, drawn: bool) -> str:
    if contender.graph:
        return "compared before the capture"
    return "compared uncompiled, with mbc's dropout" if drawn and contender.mode else ""


class Trainer:
    """A network, its optimizer, and the way in which a step is computed."""

    def __init__(self, job: Job, contender: Contender) -> None:
        """Build the network and its optimizer."""
        lowered = job.lowered()
        self.network, self._seed, self._device = lowered.network, job.seed, job.device
        self._share = job.share
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
        self._rule = lowered.optimizer
        self._optimizer = self.module.optimizer(lowered.optimizer, job.learning_rate, **settings)
        half = _HALF.get(lowered.precision)
        self._cast = getattr(torch, half) if half else None
        scaled = lowered.precision is Precision.FP16
        self._scaler = torch.amp.GradScaler(job.device, LOSS_SCALE, enabled=scaled)
        self.plain, self.forward = parallel(self.module, contender, job.share, on_gpu)

    def masks(self, step: int) -> Mapping[str, Any]:
        """Return the dropout masks of a step."""
        share = self._share  # each rank of mbc draws for its own rows, counted from 0, by a seed of its own
        masks = dropout_masks(self.network, self._seed if share.alone else seed_of(self._seed, share.rank), step)
        rows = {name: mask[: len(mask) // share.ranks] for name, mask in masks.items()}
        return {name: torch.tensor(mask, device=self._device) for name, mask in rows.items()}

    def step(self, inputs: Sequence[Any], masks: Mapping[str, Any] | None, forward: Any) -> Any:
        """Run forward pass, backward pass and update. Return the loss without waiting for it."""
        self._optimizer.zero_grad(set_to_none=True)
        with self._casting():
            loss, _ = forward(inputs, masks)
        self._scaler.scale(loss).backward()
        if self._rule.clip_norm or self._rule.clip_value:
            self._scaler.unscale_(self._optimizer)
            self.module.clip(self._rule)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._rule.ema:
            self.module.average(self._rule)
        return loss.detach()

    def captured(self, inputs: Sequence[Any]) -> Callable[[], Any]:
        """Capture the whole step as one CUDA graph, with DDP's all-reduces; return a function that replays it."""
        for _ in range(_CAPTURE_WARM_STEPS if self._share.alone else _DDP_WARM_STEPS):
            self.step(inputs, None, self.forward)
        graph = torch.cuda.CUDAGraph()
        self._optimizer.zero_grad(set_to_none=True)  # so that gradients come to lie in the graph's own memory
        # NCCL's watchdog may ask for events in its own thread meanwhile.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.step(inputs, None, self.forward)
        return graph.replay

    def _casting(self) -> AbstractContextManager[Any]:
        # The cache of casts cannot be used in a capture, and otherwise saves nothing: each weight is used once.
        if self._cast is None:
            return nullcontext()
        return torch.autocast(self._device, self._cast, cache_enabled=False)
