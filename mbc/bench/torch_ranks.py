"""PyTorch's DDP: one process a GPU with NCCL, or on the CPU with gloo. Imported only where PyTorch is installed."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from mbc.bench.contender_messages import Contender, Share
from mbc.bench.torch_network import TorchNetwork
from mbc.equivalence.torch_functions import torch

_SILENCE = timedelta(minutes=10)  # a rank may compile for so long while the others wait
_LAST_S = 30.0  # between the ends of the first rank and of the last one


@contextmanager
def process_group(share: Share, on_gpu: bool) -> Generator[None]:
    """Select this process's GPU and join the group of all ranks; each rank seeds dropout by its own number."""
    torch.manual_seed(share.rank)
    if on_gpu:
        torch.cuda.set_device(0 if share.alone else share.rank)
    if share.alone:
        yield
        return
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{share.meeting}",
        rank=share.rank,
        world_size=share.ranks,
        timeout=_SILENCE,
    )
    yield
    # The group is not destroyed: that waits for ever where a captured graph or a rank that failed still has a hold of
    # it. But others may still read this process's memory, so that it stays until all are done.
    if on_gpu:
        torch.cuda.synchronize()
    Path(f"{share.meeting}.{share.rank}").touch()
    done = [Path(f"{share.meeting}.{rank}") for rank in range(share.ranks)]
    deadline = time.monotonic() + _LAST_S
    while not all(path.exists() for path in done) and time.monotonic() < deadline:
        time.sleep(0.02)


def parallel(module: TorchNetwork, contender: Contender, share: Share, on_gpu: bool) -> tuple[Any, Any]:
    """Return two forms of the forward pass: as written, and as timed (compiled, where the contender is)."""
    compiled: Any = torch.compile(module, mode=contender.mode) if contender.mode else module
    if share.alone:
        return module, compiled
    settings: dict[str, Any] = {"device_ids": [share.rank]} if on_gpu else {}
    if contender.bucket_mb:
        settings |= {
            "static_graph": True,
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": contender.bucket_mb,
            "broadcast_buffers": False,  # a training step does not read them
        }
    ddp = torch.nn.parallel.DistributedDataParallel(compiled if contender.inner else module, **settings)
    around = contender.mode and not contender.inner
    return ddp, torch.compile(ddp, mode=contender.mode) if around else ddp


def mean_of_ranks(loss: Any, share: Share) -> float:
    """Return the loss of the global mini-batch, the mean of the losses of equal parts."""
    if share.alone:
        return float(loss)
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return float(total) / share.ranks


def ranks_agree(module: TorchNetwork, share: Share) -> bool:
    """Return whether the parameters of all ranks are bit-equal, judged by their sums.

    They differ if the gradients of a step were not summed over the ranks.
    """
    if share.alone:
        return True
    sums = torch.stack([parameter.detach().double().sum() for parameter in module.parameters()])
    least, most = sums.clone(), sums.clone()
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return bool(torch.allclose(least, most, rtol=0, atol=0, equal_nan=True))
