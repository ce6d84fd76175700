"""The job of a contender, and its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from mbc.equivalence.run_step import random_inputs
from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.ir.graph import TrainingGraph
from mbc.ir.kept_gradients import check_updates
from mbc.ir.types import Precision
from mbc.options import MODES
from mbc.passes.training_step import differentiate
from mbc.record.step import RecordedStep
from mbc.source import Source

MBC = "mbc"
# Initial loss scale of fp16 for all contenders. It is low enough that no first step overflows in one contender only,
# as kernels round and sum in different orders.
LOSS_SCALE = 256.0
BLOCK_STEPS = 5  # steps of a block on several ranks, which must run the same number
BUCKETS_MB = (25, 100, 10)  # sizes of DDP's buckets; the first is PyTorch's default
PACKAGES = {
    "torch": "torch",
    "torch.compile": "torch",
    "jax": "jax",
}  # package that each peer needs, by its import name


@dataclass(frozen=True, slots=True)
class Contender:
    """A peer with one of its settings.

    On several GPUs PyTorch runs DDP. It uses its defaults or, with `bucket_mb`, a static graph, gradients as views of
    buckets, and no broadcast of statistics.

    Attributes:
        peer: Name of the peer.
        variant: Name of the setting.
        channels_last: Whether channels are the last dimension.
        mode: Mode of torch.compile.
        graph: Whether the whole step is captured into a CUDA graph.
        environment: Environment variables of its process.
        bucket_mb: Size of DDP's buckets in MiB; 0 for its defaults.
        inner: Whether DDP wraps the compiled network, instead of the other way round.
    """

    peer: str
    variant: str = ""
    channels_last: bool = False
    mode: str = ""
    graph: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    bucket_mb: int = 0
    inner: bool = False

    @property
    def name(self) -> str:
        """Peer and variant."""
        return f"{self.peer} ({self.variant})" if self.variant else self.peer

    @property
    def alone(self) -> Contender:
        """The contender on one GPU, where the size of buckets does not matter."""
        return replace(self, variant="", bucket_mb=0)


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of the global mini-batch that a process computes.

    Attributes:
        rank: Rank of the process.
        ranks: Number of ranks, which have equal numbers of rows unless `sizes` gives them.
        alone: Whether no other process runs; the rows are then a mini-batch of their own.
        meeting: File by which PyTorch's processes meet.
        sizes: Rows of each rank; empty for equal parts.
    """

    rank: int = 0
    ranks: int = 1
    alone: bool = True
    meeting: str = ""
    sizes: tuple[int, ...] = ()

    def rows(self, batch: int) -> slice:
        """Return the rows of this process in a mini-batch of `batch` rows."""
        if self.sizes:
            first = sum(self.sizes[: self.rank])
            return slice(first, first + self.sizes[self.rank])
        each = batch // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True, slots=True)
class Job:
    """A network and the way to run it.

    The first `losses` steps run on as many mini-batches, and their losses are reported. Then follow `blocks` blocks of
    steps on the first mini-batch, each for at least `block_s`.

    On several GPUs, the batch of the source is the global one, and each process computes its `share`. All ranks then
    run the same number of steps, `BLOCK_STEPS` a block, each of which is timed; `block_s` is not used.

    Attributes:
        source: Network.
        settings: Values of --set.
        network: Name of the network in the source; None for its only one.
        package: Package of mbc, or for the CPU its plan file.
        device: cuda or cpu.
        made_s: Time to plan and build the package.
        seed: Seed of weights, inputs and dropout.
        learning_rate: Learning rate.
        losses: Number of mini-batches with reported losses.
        blocks: Number of timed blocks.
        block_s: Least duration of a block.
        share: Rows of this process.
        alone_package: Package of mbc for these rows on one GPU.
        record: Whether rank 0 of mbc only times the nodes of its graph over a few steps.
    """

    source: Source
    settings: tuple[tuple[str, str], ...]
    network: str | None
    package: str
    device: str  # cuda | cpu
    made_s: float = 0.0  # time to plan and build the package
    seed: int = 0
    learning_rate: float = 1e-3
    losses: int = 4
    blocks: int = 20
    block_s: float = 0.2
    share: Share = Share()
    alone_package: str = ""
    record: bool = False

    def lowered(self) -> Lowered:
        """Lower the source with the settings."""
        lowered = lower(parse(self.source), self.settings, self.network)
        check_updates(lowered.optimizer, "mbc bench")
        return lowered

    def graph(self) -> TrainingGraph:
        """Return the graph of the training step."""
        lowered = self.lowered()
        return differentiate(lowered.network, lowered.optimizer, lowered.precision)

    def inputs(self, number: int) -> Mapping[str, Any]:
        """Return this process's rows of mini-batch `number`, as NumPy arrays by name."""
        graph = self.graph()
        rows = self.share.rows(graph.batch)
        return {name: array[rows] for name, array in random_inputs(graph, self.seed, number).items()}

    @property
    def timed_steps(self) -> int:
        """Number of steps that a rank times."""
        return self.blocks * BLOCK_STEPS


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a contender.

    On several GPUs `step_ms` is that of the slowest GPU, and bytes are those of the GPU that uses most.

    Attributes:
        losses: Losses of the first steps.
        step_ms: Median over blocks of the time of a step.
        spread_ms: Distance of the quartiles.
        steps: Number of timed steps.
        first_step_s: Time from the start of building to the end of the first step.
        peak_bytes: Device memory for tensors: mbc's arena and prefetch buffers, or the peak of the peer's allocator.
        device_bytes: All device memory in use by the contender; 0 if unknown.
        versions: Versions of the software.
        unchecked: Part of the timed step that the compared losses do not check.
        problem: Reason why the contender did not run; all other attributes are then empty.
        stage: Variant that ran, of a contender with several, and why those before it failed.
        each_ms: Median step of each GPU.
        recorded: Recorded step of a job with `record`.
    """

    losses: tuple[float, ...] = ()
    step_ms: float = 0.0
    spread_ms: float = 0.0
    steps: int = 0
    first_step_s: float = 0.0
    peak_bytes: int = 0
    device_bytes: int = 0
    versions: str = ""
    unchecked: str = ""
    problem: str = ""
    stage: str = ""
    each_ms: tuple[float, ...] = ()
    recorded: RecordedStep | None = None


def missing(peers: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that `peers` need and Python does not find, sorted."""
    return tuple(sorted({PACKAGES[peer] for peer in peers if find_spec(PACKAGES[peer]) is None}))


def contenders(peer: str, precision: Precision, on_gpu: bool, modes: Sequence[str] = MODES) -> tuple[Contender, ...]:
    """Return the promising settings of a peer, with the given modes of torch.compile.

    Tensor cores use channels-last layouts; for tf32 both layouts are tried. Strict fp32 may be faster with cuDNN's
    legacy API, which PyTorch selects by an environment variable.
    """
    if peer == "jax":
        return (Contender(peer, "jit"),)
    lasts = _layouts(precision, on_gpu)
    settings: list[Contender] = []
    for last in lasts:
        layout = "channels_last" if last else "channels first"
        if peer == "torch.compile":
            settings += _compiled(layout, last, modes if on_gpu else MODES[:1], on_gpu)
            continue
        settings.append(Contender(peer, f"eager, {layout}", last))
        if on_gpu:
            settings.append(Contender(peer, f"CUDA graph, {layout}", last, graph=True))
    if peer == "torch" and on_gpu and precision is Precision.FP32:
        legacy = (("TORCH_CUDNN_V8_API_DISABLED", "1"),)
        settings.append(Contender(peer, "eager, cuDNN's legacy API", environment=legacy))
        settings.append(Contender(peer, "CUDA graph, cuDNN's legacy API", graph=True, environment=legacy))
    return tuple(settings)


def _layouts(precision: Precision, on_gpu: bool) -> tuple[bool, ...]:
    """Return the layouts to try, the usual one first: True for channels last."""
    lasts = {Precision.BF16: (True,), Precision.FP16: (True,), Precision.TF32: (True, False)}.get(precision, (False,))
    return lasts if on_gpu else (False,)


def ddp_contenders(
    peer: str, precision: Precision, on_gpu: bool, modes: Sequence[str] = MODES, buckets_mb: Sequence[int] = BUCKETS_MB
) -> tuple[Contender, ...]:
    """Return the settings of a peer on several GPUs.

    These are PyTorch's DDP as documented, and its fastest form for each size of buckets: the whole step in one CUDA
    graph.
    """
    last = _layouts(precision, on_gpu)[0]
    layout = "channels_last" if last else "channels first"
    compiles = peer == "torch.compile"
    settings = [
        Contender(peer, f"{mode or 'eager'}, DDP, {layout}", last, mode)
        for mode in ((modes if on_gpu else MODES[:1]) if compiles else ("",))
    ]
    whole = "whole-graph" if on_gpu else "static-graph"
    for size in buckets_mb:
        name = f"{whole} DDP, {size} MiB buckets, {layout}"
        settings.append(Contender(peer, name, last, MODES[0] if compiles else "", on_gpu, bucket_mb=size))
    return tuple(settings)


def _compiled(layout: str, last: bool, modes: Sequence[str], on_gpu: bool) -> Iterator[Contender]:
    """Yield the settings of torch.compile.

    max-autotune captures forward and backward itself. With the default mode the whole step is also captured, after its
    kernels have been compiled.
    """
    for mode in modes:
        yield Contender("torch.compile", f"{mode}, {layout}", last, mode)
        if mode == "default" and on_gpu:
            yield Contender("torch.compile", f"{mode}, CUDA graph, {layout}", last, mode, graph=True)
