"""GPUs that pose as another architecture: their limits, their code, their plans, and where their packages run."""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mbc.codegen.build import _copy_sources
from mbc.codegen.objects import code_option
from mbc.codegen.render_sources import every_kernel_file
from mbc.codegen.toolchain import find_toolchain
from mbc.codegen.view import view
from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.hardware.datasheet import CARDS, MULTIPROCESSORS, capability_of, multiprocessor_of
from mbc.hardware.instructions import Instruction
from mbc.hardware.part import GpuName, split_name
from mbc.hardware.spec import device_specs, find_spec, known_spec
from mbc.hardware.target import find_device
from mbc.kernels.cuda import kernel_of
from mbc.options import Options
from mbc.plan.file import dump_plan, load_plan
from mbc.plan.kernel_call import call_of
from mbc.plan.model import Kernel, Plan
from mbc.plan.verify import verify_plan
from mbc.profile.locate import find_profile, user_path
from mbc.report.devices import library_launches, posing_text
from mbc.runtime.driver import check_architecture
from mbc.source import Source

SOURCE = """
network mixed(batch = 32) {
  input image[batch, 3, 56, 56] : float
  input target[batch] : class
  logits = image |> conv(64, 7, stride=2, pad=3) |> bn |> relu |> conv(64, 1) |> bn |> relu |> conv(64, 3, pad=1) |> bn
    |> relu |> maxpool(3, 2, pad=1) |> global_avgpool |> linear(8)
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd()  precision = bf16 }
"""
POSES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120")  # that an H200 can take


def plan_for(gpu: str, precision: str = "bf16", providers: tuple[str, ...] = ()) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = Options(gpu=gpu, providers=providers, settings=(("train.precision", precision),))
        return compile_plan(Source("mixed.mbc", SOURCE), options)


@pytest.mark.parametrize("card", CARDS)
def test_a_pose_has_the_limits_of_both(card: str) -> None:
    """A GPU keeps its size while it poses, and has no instruction and no byte that either of both lacks."""
    whole, posed_as, offered = find_spec(card), [], []
    for capability in MULTIPROCESSORS:
        try:
            pose = find_device(f"{card}@sm_{capability}")
        except MbcError as error:
            assert error.code == "MBC288" and f"cannot pose as sm_{capability}" in error.message
            offered.append(re.findall(r"sm_\d+", error.remedy))
            continue
        posed_as.append(pose.architecture)
        twin = next((s for s in device_specs().values() if s.architecture == pose.architecture), whole)
        for instruction in Instruction:
            assert pose.has(instruction) == (whole.has(instruction) and twin.has(instruction))
        limit_bytes = multiprocessor_of(pose.architecture).shared_kib << 10
        assert pose.shared_bytes_of_block == min(whole.shared_bytes_of_block, limit_bytes)
        assert pose.code_architecture in (pose.architecture, whole.architecture)
        assert capability_of(pose.code_architecture) <= min(capability, capability_of(whole.architecture))
        assert replace(pose, name=whole.name, architecture=whole.architecture, measured=whole.measured,
                       bf16_tflops=whole.bf16_tflops, tf32_tflops=whole.tf32_tflops) == whole  # fmt: skip
    older = [c for c in MULTIPROCESSORS if 75 <= c < capability_of(whole.architecture)]
    assert len(posed_as) >= (len(older) if capability_of(whole.architecture) < 100 else 1) or not older
    assert all(choices == posed_as for choices in offered), "an error names exactly the poses that the GPU can take"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100-40@sm_90", "instructions that it lacks: wgmma, cluster"),
        (
            "t4@sm_80",
            "(sm_75) cannot pose as sm_80, which has instructions that it lacks: mma.sync m16n8k16 in fp16, mma.sync "
            "in bf16 and tf32, cp.async\nhelp: plan for the GPU as it is (--gpu t4)",
        ),
        ("t4@sm_75", "which is its own architecture\nhelp: plan for the GPU as it is (--gpu t4)"),
        ("T4@20@sm_75", "help: plan for the GPU as it is (--gpu T4@20)"),
        ("h200@sm_100", "instructions that it lacks: tcgen05\nhelp: choose another architecture: sm_75, sm_80, "),
        ("h200@sm_90", "(--gpu h200), or choose another architecture: sm_75, sm_80, sm_86"),
        ("h200@sm_130", "which mbc does not know"),
        ("h200@sm_70", "which mbc does not know"),
    ],
)
def test_poses_that_cannot_be(name: str, message: str) -> None:
    with pytest.raises(MbcError) as caught:
        find_device(name)
    assert caught.value.code == "MBC288" and message in str(caught.value)


def test_the_name_says_it_everywhere() -> None:
    pose = find_device("h200@72@sm_86")
    assert split_name(pose.name) == GpuName("NVIDIA H200", 72, "sm_86") and str(split_name(pose.name)) == pose.name
    assert pose == known_spec(pose.name) and pose.multiprocessors == 72 and pose.own_architecture == "sm_90"
    assert len({user_path(name) for name in ("NVIDIA H200", "NVIDIA H200@sm_86", "NVIDIA H200@sm_80", pose.name)}) == 4
    assert find_profile(find_device("h200")) is not None and find_profile(find_device("h200@sm_86")) is None


@pytest.mark.parametrize("providers", [(), ("mbc",)])
@pytest.mark.parametrize("pose", POSES)
def test_a_plan_has_kernels_of_the_pose_only(pose: str, providers: tuple[str, ...]) -> None:
    plan = plan_for(f"h200@{pose}", "fp16" if pose == "sm_75" else "bf16", providers)
    device = find_device(f"h200@{pose}")
    own = 0
    for program, operations in ((plan.train, plan.graph.train), (plan.infer, plan.graph.infer)):
        by_name = {operation.name: operation for operation in operations}
        for launch in program.launches:
            if isinstance(launch.work, Kernel) and launch.work.provider == "mbc":
                request = call_of(plan, launch, by_name).request
                kernel = kernel_of(launch.work.name, request)
                assert kernel is not None and (kernel.needs is None or device.has(kernel.needs))
                assert kernel.shared(request) <= multiprocessor_of(pose).shared_kib << 10
                own += 1
    assert own and (library_launches(plan) == 0) == bool(providers)
    says = "all kernels of the step are mbc's own" if providers else "do not pose (--provider mbc leaves them out)"
    assert says in posing_text(plan) and f"limits of {pose}" in posing_text(plan)
    assert view(plan).architecture == device.code_architecture == ("sm_90" if pose == "sm_120" else pose)
    again = load_plan(dump_plan(plan), "plan.json")
    verify_plan(again)
    assert again == plan and again.target.device == device


def test_a_gpu_that_does_not_pose_says_nothing() -> None:
    assert posing_text(plan_for("a100-40")) == ""


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), True), ((8, 6), True), ((8, 0), False), ((8, 9), False), ((12, 0), False)]
)
def test_where_a_package_runs(capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the GPU that poses and on one of the posed architecture; elsewhere its kernels decide."""
    monkeypatch.setattr("mbc.runtime.driver.binding_kernels", lambda plan, architecture: ("cudnn/engine (it binds)",))
    gpu = SimpleNamespace(compute_capability=lambda: capability, name=lambda: "Fake")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if runs:
            check_architecture(plan_for("h200@sm_86"), gpu)
            return
        with pytest.raises(MbcError, match=r"MBC154.*the plan is for NVIDIA H200@sm_86"):
            check_architecture(plan_for("h200@sm_86"), gpu)


def test_its_code_is_ptx_of_the_posed_architecture(tmp_path: Path) -> None:
    nvcc = find_toolchain().nvcc
    if nvcc is None:
        pytest.skip("there is no nvcc")
    _copy_sources((), tuple(every_kernel_file()), tmp_path)
    code = code_option(view(plan_for("h200@sm_80")).architecture, "relu_mask.cu")
    options = f"-std=c++17 -DMBC_WORKING=2 -I. -Xcompiler -fPIC {code} --keep -c relu_mask.cu -o a.o"
    done = subprocess.run([str(nvcc), *options.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {".target sm_80"} == {
        line for path in tmp_path.glob("*.ptx") for line in path.read_text().splitlines() if line.startswith(".target")
    }


STRICT = ("train.allow_emulated_fp32", "false")


@pytest.mark.parametrize("gpu", ["t4", "rtx-2060", "v100", "h200@sm_75"])
def test_tf32_is_planned_as_fp32_where_tensor_cores_lack_it(gpu: str) -> None:
    tf32, fp32 = (plan_for(gpu, precision) for precision in ("tf32", "fp32"))
    assert (tf32.train, tf32.infer, tf32.predictions) == (fp32.train, fp32.infer, fp32.predictions)


@pytest.mark.parametrize(("gpu", "precision", "faster", "more"), [
    ("t4", "bf16", "fp16", ()), ("t4", "tf32", "fp16", ()), ("t4", "fp16", "", ()), ("h200@sm_75", "bf16", "fp16", ()),
    ("h200@sm_80", "bf16", "", ()), ("a100-40", "tf32", "", ()), ("t4", "fp32", "fp16", ()),
    ("a10", "fp32", "bf16", ()), ("h200", "fp32", "", ()), ("h200", "fp32", "bf16", (STRICT,)),
    ("h200@sm_75", "fp32", "fp16", ()),
    ("rtx-4090", "fp32", "bf16", ()), ("k80", "fp32", "", ()),  # 2 times as fast, with accumulation in fp32; as fast
])  # fmt: skip
def test_a_precision_that_the_gpu_lacks_is_named_with_its_cost(
    gpu: str, precision: str, faster: str, more: Sequence[tuple[str, str]]
) -> None:
    settings = (("train.precision", precision), *more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_plan(Source("mixed.mbc", SOURCE), Options(gpu=gpu, settings=settings))
    device = find_device(gpu)
    slower = device.fp16_tflops / device.fp32_tflops
    cost = f"{faster} has {slower:.1f} times the peak of matrix products and values of half the bytes"
    cost += f" (--set train.precision={faster})"
    reason = f"{device.name} ({device.architecture}) has no tensor cores for {precision}, so products run in fp32: "
    if precision == "fp32":  # has them, by emulation, unless the user forbids it
        reason = f"fp32 runs mostly without tensor cores on {device.name} ({device.architecture}): "
    if precision == "bf16":  # kernels without tensor cores reach little of their peak: its ratio would understate
        reason = f"{device.name} ({device.architecture}) has no tensor cores for bf16, and cuDNN and cuBLASLt do not "
        reason += "compute in bf16 on it: "
        cost = f"a step may take tens of times as long as in {faster} (--set train.precision={faster})"
    said = [text for one in caught if "tensor cores" in (text := str(one.message)) and reason in text]
    assert len(said) == bool(faster) and all(cost in text for text in said)
