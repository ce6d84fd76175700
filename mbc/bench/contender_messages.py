"""What a contender is told, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from mbc.equivalence.run_step import random_inputs
from mbc.frontend.lower import Lowered, lower
from mbc.frontend.parse import parse
from mbc.ir.graph import TrainingGraph
from mbc.ir.types import Precision
from mbc.options import MODES
from mbc.passes.training_step import differentiate
from mbc.record.step import RecordedStep
from mbc.source import Source

MBC = "mbc"
# With which fp16 starts everywhere: low enough that no first step overflows in one and not in another, since their
# kernels round and sum in different orders.
LOSS_SCALE = 256.0
BLOCK_STEPS = 5  # of a block, where several ranks have to agree how many steps they make
BUCKETS_MB = (25, 100, 10)  # of DDP's gradients; the first is PyTorch's default
PACKAGES = {"torch": "torch", "torch.compile": "torch", "jax": "jax"}  # what a peer needs, as Python imports it


@dataclass(frozen=True, slots=True)
class Contender:
    """One peer with one of its settings. `mode`: of torch.compile; `graph`: the whole step is captured into a CUDA
    graph; `environment`: variables that its process gets.

    On several GPUs PyTorch runs DDP: with its defaults, or, where there is a `bucket_mb`, with a static graph,
    gradients as views of buckets of so many MiB, and no broadcast of statistics. `inner`: DDP is around the compiled
    network instead of the other way round.
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
        return f"{self.peer} ({self.variant})" if self.variant else self.peer

    @property
    def alone(self) -> Contender:
        """On one GPU, where the size of buckets is none of its settings."""
        return replace(self, variant="", bucket_mb=0)


@dataclass(frozen=True, slots=True)
class Share:
    """Which rows of the global mini-batch a process computes: the part of `rank` of `ranks`, which are equal, or have
    `sizes` rows. `alone`: no other process runs, the part is a mini-batch of its own. `meeting`: a file by which
    PyTorch's processes meet."""

    rank: int = 0
    ranks: int = 1
    alone: bool = True
    meeting: str = ""
    sizes: tuple[int, ...] = ()

    def rows(self, batch: int) -> slice:
        if self.sizes:
            first = sum(self.sizes[: self.rank])
            return slice(first, first + self.sizes[self.rank])
        each = batch // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True, slots=True)
class Job:
    """A network and how it is to be run. `package`: mbc's, a folder or, for the CPU, a plan file.

    The first `losses` steps are made on as many mini-batches and their losses told; then come `blocks` blocks of
    steps, each as long as `block_s` at least, on the first of them.

    On several GPUs the batch of the source is the global one, `share` the part of it that a process computes, and
    `alone_package` mbc's for that part on one GPU. `block_s` does not count there: all ranks make the same number of
    steps, `BLOCK_STEPS` a block, each of which is timed.

    Where it is to `record`, rank 0 of mbc's times the nodes of its graph over a few steps, and nothing else is timed.
    """

    source: Source
    settings: tuple[tuple[str, str], ...]
    network: str | None
    package: str
    device: str  # cuda | cpu
    made_s: float = 0.0  # what planning and building the package took
    seed: int = 0
    learning_rate: float = 1e-3
    losses: int = 4
    blocks: int = 20
    block_s: float = 0.2
    share: Share = Share()
    alone_package: str = ""
    record: bool = False

    def lowered(self) -> Lowered:
        return lower(parse(self.source), self.settings, self.network)

    def graph(self) -> TrainingGraph:
        lowered = self.lowered()
        return differentiate(lowered.network, lowered.optimizer, lowered.precision)

    def inputs(self, number: int) -> Mapping[str, Any]:
        """This process's rows of the mini-batch of a number, as NumPy arrays by name."""
        graph = self.graph()
        rows = self.share.rows(graph.batch)
        return {name: array[rows] for name, array in random_inputs(graph, self.seed, number).items()}

    @property
    def timed_steps(self) -> int:
        """Of a rank."""
        return self.blocks * BLOCK_STEPS


@dataclass(frozen=True, slots=True)
class Result:
    """What a contender took. `problem`: why it did not run, everything else is then empty.

    `step_ms` is the median over blocks of a block's time over its steps, `spread_ms` the distance of the quartiles;
    `first_step_s` is from where building begins to the end of the first step. `peak_bytes`: device memory for tensors
    (of mbc the arena and what it prefetches into, of PyTorch its allocator's peak), `device_bytes`: all that the GPU
    has in use while the contender is alone on it; 0 where neither is known. `unchecked`: what of the timed step the
    compared losses did not go through; `stage`: which variant ran, of a contender that has several, and why none before
    it did.

    On several GPUs `step_ms` is the median of the slowest one's steps, `each_ms` of every one's, and bytes are those of
    the GPU with the most. `recorded`: of a job that was to record.
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
    """The packages that `peers` need and Python does not find, sorted."""
    return tuple(sorted({PACKAGES[peer] for peer in peers if find_spec(PACKAGES[peer]) is None}))


def contenders(peer: str, precision: Precision, on_gpu: bool, modes: Sequence[str] = MODES) -> tuple[Contender, ...]:
    """The settings of a peer that may be its best, of torch.compile in `modes`. With tensor cores channels lie last, or
    in tf32 may; strict fp32 may be faster on cuDNN's legacy API, which PyTorch is told by its environment."""
    if peer == "jax":
        return (Contender(peer, "jit"),)
    lasts = _layouts(precision, on_gpu)
    found: list[Contender] = []
    for last in lasts:
        layout = "channels_last" if last else "channels first"
        if peer == "torch.compile":
            found += _compiled(layout, last, modes if on_gpu else MODES[:1], on_gpu)
            continue
        found.append(Contender(peer, f"eager, {layout}", last))
        if on_gpu:
            found.append(Contender(peer, f"CUDA graph, {layout}", last, graph=True))
    if peer == "torch" and on_gpu and precision is Precision.FP32:
        legacy = (("TORCH_CUDNN_V8_API_DISABLED", "1"),)
        found.append(Contender(peer, "eager, cuDNN's legacy API", environment=legacy))
        found.append(Contender(peer, "CUDA graph, cuDNN's legacy API", graph=True, environment=legacy))
    return tuple(found)


def _layouts(precision: Precision, on_gpu: bool) -> tuple[bool, ...]:
    """Whether channels lie last, the usual choice first."""
    lasts = {Precision.BF16: (True,), Precision.FP16: (True,), Precision.TF32: (True, False)}.get(precision, (False,))
    return lasts if on_gpu else (False,)


def ddp_contenders(
    peer: str, precision: Precision, on_gpu: bool, modes: Sequence[str] = MODES, buckets_mb: Sequence[int] = BUCKETS_MB
) -> tuple[Contender, ...]:
    """On several GPUs: PyTorch's DDP as its documentation has it, and the best that can be made of it, the whole step
    in one CUDA graph, for each size of buckets."""
    last = _layouts(precision, on_gpu)[0]
    layout = "channels_last" if last else "channels first"
    compiles = peer == "torch.compile"
    found = [
        Contender(peer, f"{mode or 'eager'}, DDP, {layout}", last, mode)
        for mode in ((modes if on_gpu else MODES[:1]) if compiles else ("",))
    ]
    whole = "whole-graph" if on_gpu else "static-graph"
    for size in buckets_mb:
        name = f"{whole} DDP, {size} MiB buckets, {layout}"
        found.append(Contender(peer, name, last, MODES[0] if compiles else "", on_gpu, bucket_mb=size))
    return tuple(found)


def _compiled(layout: str, last: bool, modes: Sequence[str], on_gpu: bool) -> Iterator[Contender]:
    """max-autotune brings CUDA graphs of forward and backward itself; of the default the whole step is captured, too,
    which finds its kernels compiled by then."""
    for mode in modes:
        yield Contender("torch.compile", f"{mode}, {layout}", last, mode)
        if mode == "default" and on_gpu:
            yield Contender("torch.compile", f"{mode}, CUDA graph, {layout}", last, mode, graph=True)
