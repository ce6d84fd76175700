"""A compiled network on a real GPU beside the interpreter: states, outputs, inputs of every kind, memory."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.options import Options
from mbc.runtime.module import Module
from mbc.source import Source
from tests.gpu.packages import built, need_gpu
from tests.runtime.test_copies import in_a_fork

SOURCE = """
network small(batch = 16, classes = 10) {
  input image[batch, 3, 16, 16] : float
  input target[batch] : class
  x = image |> conv(16, 3, pad=1) |> bn |> relu |> maxpool(2)
  y = x |> conv(32, 3, stride=2, pad=1) |> bn
  s = x |> conv(32, 1, stride=2) @down |> bn
  logits = y + s |> relu |> avgpool(2) |> flatten |> dropout(0.3) |> linear(classes) @head
  output logits
  loss (logits, target) |> softmax_cross_entropy
}
train { optimizer = sgd(momentum=0.9, weight_decay=1e-4) }
"""

# Relative L2 distance allowed between GPU and interpreter, of every state after one step. The momentum is the gradient
# itself. fp32: the figure that the project promises. fp16 rounds operands to 10 bits of mantissa (5e-4 a
# product), bf16 to 7 (4e-3), and every activation and its gradient is rounded again at each step. tf32 has the bits of
# fp16, but tensor cores cut them off where the interpreter rounds: 2e-2 was seen.
TOLERANCES = {"fp32": 1e-5, "tf32": 3e-2, "bf16": 6e-2, "fp16": 1e-2}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds the network for this machine's GPU, once for each precision and division."""
    need_gpu()
    packages: dict[tuple[str, int], Path] = {}

    def build(precision: str = "fp32", micro_batch: int = 0) -> Path:
        key = precision, micro_batch
        if key not in packages:
            options = Options(settings=(("train.precision", precision),), micro_batch=micro_batch)
            folder = tmp_path_factory.mktemp("packages") / f"{precision}_{micro_batch}"
            packages[key] = built(compile_plan(Source("small.mbc", SOURCE), options), folder)
        return packages[key]

    return build


@pytest.fixture
def pair(package: Callable[..., Path]) -> Iterator[Callable[..., tuple[Module, Module]]]:
    """Return a function that opens a module on the GPU and its twin on the interpreter, which are closed at the end."""
    opened: list[Module] = []

    def make(precision: str = "fp32", micro_batch: int = 0, **settings: Any) -> tuple[Module, Module]:
        folder = package(precision, micro_batch)
        nets = Module(folder, seed=4, device="cuda", **settings), Module(folder, seed=4, device="cpu")
        opened.extend(nets)
        return nets

    yield make
    for net in opened:
        net.close()


def batch(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    target = random.integers(0, 10, 16)
    return (random.standard_normal((16, 3, 16, 16)) + target[:, None, None, None] / 10).astype(np.float32), target


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    scale = max(float(np.linalg.norm(expected)), 1e-4 * expected.size**0.5)
    return float(np.linalg.norm(got.astype(np.float64) - expected)) / scale


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("micro_batch", [0, 4])
def test_states_after_a_step(pair: Callable[..., tuple[Module, Module]], precision: str, micro_batch: int):
    gpu, cpu = pair(precision, micro_batch, canaries=True)
    losses = [float(net.step(*batch(), lr=0.1)) for net in (gpu, cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCES[precision])
    distances = {name: distance(gpu.state(name), cpu.state(name)) for name in cpu.states}
    assert {name: d for name, d in distances.items() if d > TOLERANCES[precision]} == {}
    assert gpu.control == cpu.control
    gpu.check_canaries()


@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_inference(pair: Callable[..., tuple[Module, Module]], precision: str):
    gpu, cpu = pair(precision)
    for net in (gpu, cpu):
        net.step(*batch(), lr=0.01)
    for rows in (16, 5, 1):
        image = batch(1)[0][:rows]
        got, expected = np.asarray(gpu.forward(image)), np.asarray(cpu.forward(image))
        assert got.shape == expected.shape == (rows, 10)
        assert distance(got, expected) <= 2 * TOLERANCES[precision]


def test_training_goes_down(pair: Callable[..., tuple[Module, Module]]):
    gpu, _ = pair()
    losses = [gpu.step(*batch(seed % 4), lr=0.02) for seed in range(80)]
    assert np.mean([float(loss) for loss in losses[-8:]]) < 0.5 * float(losses[0])
    assert gpu.control["updates"] == 80
    assert gpu.correct is not None and gpu.accuracy == gpu.correct / 16


def test_warming_up_leaves_nothing_behind(pair: Callable[..., tuple[Module, Module]]):
    gpu, cpu = pair()
    assert gpu.control == cpu.control
    for name in cpu.states:
        np.testing.assert_array_equal(gpu.state(name), cpu.state(name))


def test_launch_by_launch_is_the_captured_graph(pair: Callable[..., tuple[Module, Module]]):
    (captured, _), (eager, _) = pair(), pair(eager=True)
    for seed in range(3):
        assert float(eager.step(*batch(seed), lr=0.01)) == pytest.approx(
            float(captured.step(*batch(seed), lr=0.01)), rel=1e-4
        )


def test_tensors_of_pytorch(pair: Callable[..., tuple[Module, Module]]):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch finds no GPU")
    gpu, cpu = pair()
    for seed, stream in enumerate((torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream())):
        image, target = batch(seed)
        with torch.cuda.stream(stream):
            tensors = torch.from_numpy(image).cuda() * 2 / 2, torch.from_numpy(target).cuda()
            loss = gpu.step(*tensors, lr=0.01)
        assert float(loss) == pytest.approx(float(cpu.step(image, target, lr=0.01)), rel=1e-4)
    image, target = (torch.from_numpy(array).cuda() for array in batch())
    with pytest.raises(MbcError, match="must be contiguous"):
        gpu.step(image.to(memory_format=torch.channels_last), target, lr=0.01)
    with pytest.raises(MbcError, match="must hold float32 on the GPU"):
        gpu.step(image.half(), target, lr=0.01)


def test_inputs_travel_ahead(pair: Callable[..., tuple[Module, Module]]):
    (ahead, _), (in_order, _) = pair(canaries=True), pair(prefetch=False)
    assert ahead.memory.prefetch_taken > 0 == in_order.memory.prefetch_taken
    # Nobody looks at a loss before all steps are queued, and every step has other inputs.
    losses = [(ahead.step(*batch(seed), lr=0.01), in_order.step(*batch(seed), lr=0.01)) for seed in range(12)]
    for there, here in losses:
        assert float(there) == pytest.approx(float(here), rel=1e-3)
    ahead.check_canaries()


@pytest.mark.parametrize("precision", list(TOLERANCES))
def test_outputs_left_on_the_gpu(pair: Callable[..., tuple[Module, Module]], precision: str):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch finds no GPU")
    gpu, _ = pair(precision)
    image = batch(1)[0][:5]
    expected = gpu.forward(image)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            shown = gpu.forward(image, copy=False)
            tensor = torch.from_dlpack(shown)
            copied = tensor.float().cpu().numpy()
        assert tensor.is_cuda and tensor.shape == (5, 10)
        assert tensor.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        np.testing.assert_array_equal(copied, expected)
        if precision != "bf16":
            assert torch.as_tensor(shown, device="cuda").data_ptr() == tensor.data_ptr()
    gpu.forward(image)
    with pytest.raises(MbcError, match="overwrote it"):
        torch.from_dlpack(shown)


def test_other_processes_and_threads_are_refused(pair: Callable[..., tuple[Module, Module]]):
    gpu, _ = pair()
    loss, shown = gpu.step(*batch(), lr=0.01), gpu.forward(batch(1)[0], copy=False)
    answers: list[str] = []

    def use_all() -> None:
        for call in (lambda: gpu.step(*batch(), lr=0.01), lambda: float(loss), lambda: np.asarray(shown), gpu.close):
            try:
                answers.append(str(call()))
            except MbcError as error:
                answers.append(error.code)

    thread = threading.Thread(target=use_all)
    thread.start()
    thread.join()
    assert answers == ["MBC235"] * 4
    answers.clear()
    assert in_a_fork(lambda: (use_all(), answers)[1]) == "['MBC235', 'MBC235', 'MBC235', 'None']"
    assert np.isfinite(float(loss)) and np.isfinite(np.asarray(shown)).all()
    assert np.isfinite(float(gpu.step(*batch(2), lr=0.01)))
    with pytest.raises(MbcError, match="MBC234"):
        copy.deepcopy(gpu)


def test_checkpoints_cross_devices(pair: Callable[..., tuple[Module, Module]], tmp_path: Path):
    gpu, cpu = pair()
    gpu.step(*batch(), lr=0.1)
    gpu.save(tmp_path / "w")
    cpu.load(tmp_path / "w")
    for name in cpu.states:
        np.testing.assert_array_equal(gpu.state(name), cpu.state(name))
    assert gpu.control == cpu.control
    cpu.step(*batch(1), lr=0.1)
    cpu.save(tmp_path / "w")
    gpu.load(tmp_path / "w")
    for name in cpu.states:
        np.testing.assert_array_equal(gpu.state(name), cpu.state(name))


def test_nothing_is_allocated_by_steps(pair: Callable[..., tuple[Module, Module]]):
    import pycuda.driver as driver  # pyright: ignore[reportMissingImports]

    gpu, _ = pair(canaries=True)
    float(gpu.step(*batch(), lr=0.01))
    gpu.forward(batch()[0])
    free = driver.mem_get_info()[0]
    for seed in range(20):
        float(gpu.step(*batch(seed), lr=0.01))
        gpu.forward(batch()[0][:3])
    assert driver.mem_get_info()[0] == free
    memory = gpu.memory
    assert memory.arena_taken == memory.arena_planned == gpu.plan.predictions.arena_bytes
    assert memory.overhead_taken is None or memory.overhead_taken >= 0
    gpu.check_canaries()
    print(memory)


def test_a_loss_that_is_not_finite_changes_nothing(pair: Callable[..., tuple[Module, Module]]):
    gpu, _ = pair()
    before = {name: gpu.state(name) for name in gpu.states}
    image, target = batch()
    image[3, 0, 0, 0] = np.inf
    assert not np.isfinite(float(gpu.step(image, target, lr=0.1)))
    assert gpu.control["skipped"] == 1
    for name, array in before.items():
        np.testing.assert_array_equal(array, gpu.state(name))
