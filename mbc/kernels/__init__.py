"""Every source of kernels for a GPU, in the order that settles ties of time.

* `base`: the interface of providers: requests, candidates, acceptance
* `calibration`: estimated times: a roofline fitted to a measured GPU
* `convolution_shapes`: convolutions as libraries see them
* `cudnn`: the provider `cudnn`: the graph API
* `cudnn_convolution`: its convolutions
* `cudnn_estimates`: what these should take where nobody measured them
* `cudnn_statistics`: its convolutions with batch statistics in the epilogue
* `statistics`: launches with batch statistics in the epilogue, of any provider
* `cudnn_legacy`: the provider of cuDNN's legacy API: FFT and Winograd
* `cublaslt`: the provider `cublaslt`: linear layers and pointwise convolutions as GEMMs
* `nccl`: the provider `nccl`: collectives
* `cuda`: the provider `mbc`: the project's own CUDA kernels
* `interpreter`: the provider of plans that only the interpreter runs
"""

from __future__ import annotations

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.kernels.base import Call, Candidate, Provider, Request
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_legacy import CUDNN_LEGACY
from mbc.kernels.nccl import NCCL

PROVIDERS: tuple[Provider, ...] = (CUDNN, CUDNN_LEGACY, CUBLASLT, OWN, NCCL)

# Whose kernels cuDNN itself lists, where the GPU is: what these providers offer elsewhere stands for them.
LISTED_BY_CUDNN = frozenset({CUDNN.name, CUDNN_LEGACY.name})


def widens(provider: str, kind: str, precision: Precision) -> bool:
    """Whether kernels of a provider compute an fp32 result in the 16 bits of their operands and widen it then: cuDNN
    has no engine that writes a filter gradient of bf16 or fp16 operands in fp32."""
    narrow = precision.working is not precision.master
    return narrow and provider in LISTED_BY_CUDNN and kind == "convolution_backward_filter"


def runs(candidate: Candidate, request: Request, device: DeviceSpec) -> bool:
    """Whether the provider of a candidate, as it is today, accepts it for a request: what the verifier asks, too."""
    provider = next((provider for provider in PROVIDERS if provider.name == candidate.provider), None)
    if provider is None:
        return False
    c = candidate
    accepted = provider.accepts(Call(request, c.name, c.settings, c.layouts, False, c.workspace_bytes), device)
    return not (accepted.refusal or accepted.workspace_refusal)
