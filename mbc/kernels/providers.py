"""The providers of GPU kernels, in the order that decides between kernels of equal time."""

from __future__ import annotations

from mbc.hardware.spec import DeviceSpec
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate, Provider, Request
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cuda import OWN
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_legacy import CUDNN_LEGACY
from mbc.kernels.nccl import NCCL

PROVIDERS: tuple[Provider, ...] = (CUDNN, CUDNN_LEGACY, CUBLASLT, OWN, NCCL)

# On the GPU, cuDNN itself lists the kernels of these providers; elsewhere, their estimated candidates stand for them.
LISTED_BY_CUDNN = frozenset({CUDNN.name, CUDNN_LEGACY.name})


def widens(provider: str, kind: str, precision: Precision) -> bool:
    """Return whether a provider's kernels compute an fp32 result in 16 bits and widen it afterwards.

    cuDNN has no engine that writes a filter gradient of bf16 or fp16 operands in fp32.
    """
    narrow = precision.working is not precision.master
    return narrow and provider in LISTED_BY_CUDNN and kind == "convolution_backward_filter"


def runs(candidate: Candidate, request: Request, device: DeviceSpec) -> bool:
    """Return whether the provider of a candidate accepts the candidate for a request.

    The verifier asks the same question, by the same declarations.
    """
    provider = next((provider for provider in PROVIDERS if provider.name == candidate.provider), None)
    if provider is None:
        return False
    accepted = provider.accepts(candidate.call(request), device)
    return not (accepted.refusal or accepted.workspace_refusal)
