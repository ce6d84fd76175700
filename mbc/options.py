"""All options of a compilation."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Policy(StrEnum):
    """Micro-batches into which an operation may be divided (micro-cuDNN's batch-size policies)."""

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "power_of_two"
    ALL = "all"


class Measure(StrEnum):
    """Requests that a compilation measures, if this machine has the GPU of the plan."""

    MISSING = "missing"  # what the profile lacks
    NEVER = "never"
    ALWAYS = "always"  # everything again


UNLIMITED_BYTES = 1 << 60  # this many bytes, or more, stand for no limit
# Techniques that save memory and can be left out; the order is that of the ablation, the slowest first.
ABLATION_ORDER = ("offload", "recompute", "micro_batches", "workspace")
TECHNIQUES = (*ABLATION_ORDER, "concurrent_stream")
PEERS = ("torch", "torch.compile", "jax")  # of mbc.bench, here so that help is instant
SEVERAL_GPUS = ("torch", "torch.compile")  # of them
WEIGHTINGS, AVERAGES = ("gaussian", "constant"), ("probabilities", "logits")  # of mbc predict, likewise
MODES = ("default", "max-autotune")  # of torch.compile, likewise
PROVIDER_NAMES = ("cudnn", "cudnn_legacy", "cublaslt", "mbc")  # of mbc.kernels, here so that help is instant
OWN_FIRST = "mbc-first"  # in place of providers: mbc's own kernels for all operations that they run on tensor cores


@dataclass(frozen=True, slots=True)
class RankGpu:
    """The GPU of one rank.

    `gpu` is its short name, as in `Options`. `memory_bytes` is the memory that the plan may use, None for the source's
    value.
    """

    gpu: str
    memory_bytes: int | None = None


BATCH, DEVICE_MEMORY = "batch", "memory.device"  # the settings that `Overrides` replaces
Settings = tuple[tuple[str, str], ...]  # pairs (name, value) as of `--set`, in order


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that replace those of the source and of `--set`; None replaces nothing.

    `batch` is the number of rows of a mini-batch. `device_bytes` is the limit of device memory.
    """

    batch: int | None = None
    device_bytes: int | None = None

    @property
    def settings(self) -> Settings:
        """The values as `--set` would give them, for a plan to record and for messages."""
        memory = () if self.device_bytes is None else ((DEVICE_MEMORY, f"{self.device_bytes} B"),)
        return memory if self.batch is None else (*memory, (BATCH, str(self.batch)))


@dataclass(frozen=True, slots=True)
class Options:
    """All options of a compilation.

    `gpus` is the number of GPUs that share the mini-batch of the source, each with a part of its rows. `rank_gpus`
    names them if they differ in kind or memory (empty: all are `gpu`). `gpus_per_node` is the number of them in one
    machine, which share its memory and the links to it (0: all). `node_link_gbit` is the rate of the network that
    connects one machine with the others, in Gb/s and in each direction (0: unknown). `settings` are
    `--set NAME=VALUE` in order; they override the network's parameters and its sections. `overrides` are values that a
    search chooses; they override the settings.

    The workspace of one operation is limited by `workspace_limit_bytes` and by the bytes of the budget that are free
    when it runs. With `workspace_total_bytes`, that number of bytes is divided among all operations of the step
    instead. `providers` names the sources of kernels that may be used (none: all), or is OWN_FIRST. `micro_batch`
    divides every convolution into calls of that number of rows (0: the search chooses). `without` names techniques (of
    TECHNIQUES) that the plan must not use: offload, recompute, micro_batches (no operation is divided), workspace (each
    operation uses as little as it can) and concurrent_stream (kernels run serially).
    """

    gpu: str = "auto"  # short name of a device spec; auto: the GPU of this machine, else h200
    settings: Settings = ()
    gpus: int = 1
    rank_gpus: tuple[RankGpu, ...] = ()  # as many as `gpus`, or empty
    gpus_per_node: int = 0
    node_link_gbit: float = 0.0
    network: str | None = None  # which network of a source that has several
    policy: Policy = Policy.POWER_OF_TWO
    workspace_limit_bytes: int = UNLIMITED_BYTES
    workspace_total_bytes: int = UNLIMITED_BYTES
    providers: tuple[str, ...] = ()
    micro_batch: int = 0
    without: frozenset[str] = frozenset()
    measure: Measure = Measure.NEVER
    measure_for_s: float = math.inf  # then the rest is estimated; the most important requests come first
    dump_stages: str | None = None
    profile: str | None = None  # path of a SQLite profile, which is used unchanged
    stale_profile: bool = False  # use its times as estimates if it is of another GPU or cuDNN
    # Layouts of states by name, where they are decided before planning; states that are not named are channels first.
    # Empty: the planner chooses all layouts.
    state_layouts: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    # A note says where a plan runs if `gpu` does not. It is for commands that plan without running anything.
    explains_gpu: bool = field(default=False, compare=False, repr=False)
    is_probe: bool = field(default=False, repr=False)  # one of many plans, made with less effort (`compiler.try_plan`)
    slowest_us: float = field(default=math.inf, repr=False)  # the search abandons training steps that take longer
    overrides: Overrides = Overrides()

    @property
    def all_settings(self) -> Settings:
        """The settings and the overrides, as text."""
        replaced = dict(self.overrides.settings)
        return (*(setting for setting in self.settings if setting[0] not in replaced), *replaced.items())

    @property
    def digest(self) -> str:
        """A digest that identifies the options in every process."""
        text = repr((replace(self, without=frozenset()), sorted(self.without)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
