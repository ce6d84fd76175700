"""Everything a compilation can be told, beside its source."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from enum import StrEnum


class Policy(StrEnum):
    """Into which micro-batches an operation may be divided (micro-cuDNN's batch-size policies)."""

    UNDIVIDED = "undivided"
    POWER_OF_TWO = "power_of_two"
    ALL = "all"


class Measure(StrEnum):
    """What a compilation measures, where this machine has the GPU that it plans for."""

    MISSING = "missing"  # what the profile lacks
    NEVER = "never"
    ALWAYS = "always"  # everything again


UNLIMITED_BYTES = 1 << 60  # a memory budget of so much asks for a plan without one
# Techniques that save memory and can be left out; the order is that of the ablation, the slowest first.
ABLATION_ORDER = ("offload", "recompute", "micro_batches", "workspace")
TECHNIQUES = (*ABLATION_ORDER, "concurrent_stream")
PEERS = ("torch", "torch.compile", "jax")  # of mbc.bench, here so that help is instant
SEVERAL_GPUS = ("torch", "torch.compile")  # of them, likewise
MODES = ("default", "max-autotune")  # of torch.compile, likewise
PROVIDER_NAMES = ("cudnn", "cudnn_legacy", "cublaslt", "mbc")  # of mbc.kernels, here so that help is instant


@dataclass(frozen=True, slots=True)
class RankGpu:
    """The GPU of one rank. `gpu`: short name, as in `Options`; `memory_bytes`: of it that the plan may take (None: what
    the source says)."""

    gpu: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """`gpus`: how many share the mini-batch of the source, each with a part of its rows; `rank_gpus`: which, where they
    are unlike or have unlike memory (empty: all are `gpu`); `gpus_per_node`: how many of them are in one machine, and
    share its memory and what leads there (0: all). `settings` are `--set
    NAME=VALUE` in order; they override the network's parameters and its sections.

    The workspace of one operation is bounded by `workspace_limit_bytes` and by the bytes of the budget that are free
    when it runs; with `workspace_total_bytes` so many bytes are divided among all operations of the step instead.
    `providers` names the sources of kernels that may be used (none: all). `micro_batch` divides every convolution into
    calls of so many rows instead of choosing (0: choose). `without` names techniques (of TECHNIQUES) that the plan must
    do without: offload, recompute, micro_batches (no operation is divided), workspace (each takes the least it can) and
    concurrent_stream (none: kernels run serially).
    """

    gpu: str = "auto"  # short name of a device spec; auto: the GPU of this machine, else h200
    settings: tuple[tuple[str, str], ...] = ()
    gpus: int = 1
    rank_gpus: tuple[RankGpu, ...] = ()  # as many as `gpus`, or empty
    gpus_per_node: int = 0
    network: str | None = None  # which network of a source that has several
    policy: Policy = Policy.POWER_OF_TWO
    workspace_limit_bytes: int | None = None
    workspace_total_bytes: int | None = None
    providers: tuple[str, ...] = ()
    micro_batch: int = 0
    without: frozenset[str] = frozenset()
    measure: Measure = Measure.NEVER
    measure_for_s: float = math.inf  # then the rest is estimated; what is worth most comes first
    dump_stages: str | None = None
    profile: str | None = None  # path of a SQLite profile, which is used as it is
    stale_profile: bool = False  # use it as estimates when it is of another GPU or cuDNN

    @property
    def digest(self) -> str:
        """Tells options apart, in whichever process: as text a set has another order in each."""
        told = repr((replace(self, without=frozenset()), sorted(self.without)))
        return hashlib.sha256(told.encode()).hexdigest()[:16]
