"""Every source of kernels for a GPU, in the order that settles ties of time."""

from __future__ import annotations

from mbc.kernels.base import Provider
from mbc.kernels.cublaslt import CUBLASLT
from mbc.kernels.cudnn import CUDNN
from mbc.kernels.cudnn_legacy import CUDNN_LEGACY
from mbc.kernels.own import OWN

PROVIDERS: tuple[Provider, ...] = (CUDNN, CUDNN_LEGACY, CUBLASLT, OWN)

# Whose kernels cuDNN itself lists, where the GPU is: what these providers offer elsewhere stands for them.
LISTED_BY_CUDNN = frozenset({CUDNN.name, CUDNN_LEGACY.name})
