"""Packages on newer GPUs: which kernels of a plan bind it to its architecture."""

from __future__ import annotations

import re
import warnings
from functools import cache

import pytest

from mbc.codegen.objects import code_option
from mbc.codegen.render_sources import every_kernel_file
from mbc.compiler import compile_plan
from mbc.hardware.datasheet import MULTIPROCESSORS
from mbc.hardware.instructions import Instruction
from mbc.hardware.spec import DeviceSpec
from mbc.kernels.base import Acceptance, Call
from mbc.kernels.cuda import KERNELS, OWN, WGMMA_SOURCES
from mbc.options import Options
from mbc.plan.model import Kernel, Plan
from mbc.plan.newer_gpu import binding_kernels, is_forward_compatible
from mbc.resources import folder
from mbc.source import Source

SOURCE = """
network pointwise(batch = 64) {
  input image[batch, 64, 56, 56] : float
  input target[batch] : class
  logits = image |> conv(64, 1) |> bn |> relu |> conv(64, 1) |> bn |> relu |> global_avgpool |> linear(8)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd()  precision = bf16 }
"""
NEWER = [f"sm_{capability}" for capability in (*MULTIPROCESSORS, 130) if capability > 90]


@cache
def plan_for(gpu: str, *providers: str) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compile_plan(Source("pointwise.mbc", SOURCE), Options(gpu=gpu, providers=providers))


@pytest.mark.parametrize("architecture", ["sm_86", "sm_89", "sm_90", *NEWER])
def test_a_plan_without_special_instructions_runs_on_newer_gpus(architecture: str) -> None:
    assert binding_kernels(plan_for("a100-40"), architecture) == ()


def test_kernels_with_wgmma_bind() -> None:
    plan = plan_for("h200", "mbc", "cublaslt")
    named = {launch.work.name for launch in plan.train.launches if isinstance(launch.work, Kernel)}
    needing = {f"mbc/{name}" for name in named if name in KERNELS and KERNELS[name].needs is Instruction.WGMMA}
    assert needing and binding_kernels(plan, "sm_90") == ()
    for architecture in NEWER:
        binding = binding_kernels(plan, architecture)
        assert {text.partition(" (")[0] for text in binding} == needing
        assert all(f"({architecture} lacks instructions that it needs)" in text for text in binding)


def test_engines_of_libraries_bind() -> None:
    plan = plan_for("h200", "cudnn", "cublaslt", "mbc")
    engines = {name for name in binding_kernels(plan, "sm_100") if "its engine was chosen for the planned GPU" in name}
    assert engines and all(name.startswith("cudnn/") for name in engines)


def test_kernels_that_need_more_shared_memory_bind() -> None:
    """Blocks of sm_86 and sm_120 have 99 KiB, those of sm_80 163 KiB."""
    plan = plan_for("a100-40", "mbc", "cublaslt")

    class Large(type(OWN)):  # a provider whose kernels need what only some GPUs have
        def accepts(self, call: Call, device: DeviceSpec) -> Acceptance:
            return Acceptance("" if device.shared_bytes_of_block >= 128 << 10 else "too little shared memory")

    for architecture, binds in (("sm_86", True), ("sm_87", False), ("sm_90", False), ("sm_120", True)):
        assert bool(binding_kernels(plan, architecture, (Large(),))) == binds


def test_the_code_of_each_source() -> None:
    """Sources with wgmma are those that include its header; all others have PTX for newer GPUs."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (folder("templates") / "kernels").rglob("*.cu*")}

    def includes_wgmma(name: str) -> bool:
        inner = (include.rpartition("/")[2] for include in re.findall(r'#include "([^"]+)"', texts.get(name, "")))
        return name == "wgmma.cuh" or any(map(includes_wgmma, inner))

    sources = [file.rpartition("/")[2] for file in every_kernel_file()]
    assert {name for name in sources if includes_wgmma(name)} == WGMMA_SOURCES < set(sources)
    for source in sources:
        only = source in WGMMA_SOURCES
        assert code_option("sm_90", source).endswith("code=sm_90a" if only else "code=[sm_90,compute_90]")
        assert code_option("sm_120", source) == "-gencode=arch=compute_120,code=[sm_120,compute_120]"
    assert is_forward_compatible("sm_90") and not is_forward_compatible("sm_100a")
