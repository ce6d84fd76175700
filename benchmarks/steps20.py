"""Training steps of ResNet-18, each started from PyTorch's state, so that rounding does not add up over steps.

PyTorch trains in fp32. Before every step, mbc and a float64 twin get its parameters, statistics and momenta. The
momenta after the step (gradient, weight decay and momentum together) and the statistics are compared. If one ReLU or
one window of a pool chooses otherwise, the error of the step is 0.005, whichever framework computes it; in other steps
it is 0.00001. So the limit is for all steps together: the median error over parameters, averaged over the steps, is at
most twice that of PyTorch in fp32.

    python benchmarks/steps20.py [--steps 20] [--batch 16] [--size 64] [--device cuda|cpu]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from modules import build, errors, example, median, open_module
from record import attempt, show, write
from torch_twin import Mode, Twin

from mbc.ir.graph import Role
from mbc.runtime.initial_states import initial

TIMES_TORCH = 2.0
LEARNING_RATE = 0.01


def start(job: Any) -> dict[str, np.ndarray]:
    """Return the initial states."""
    network = job.lowered().network
    return {
        s.value: initial(s.value, network.values[s.value].type, s.initializer, 0).astype(np.float64)
        for s in network.states
    }


class Trainer:
    """A twin that computes SGD steps by its formula, in its own precision, from any state."""

    def __init__(self, job: Any, mode: Mode) -> None:
        """Take the job's network, computed in this mode."""
        self.lowered = job.lowered()
        self.mode = mode

    def step(self, states: dict[str, np.ndarray], momenta: dict[str, np.ndarray], inputs: Any) -> Any:
        """Return the states, the momenta and the loss after a step."""
        rule = self.lowered.optimizer
        if rule.kind != "sgd" or rule.nesterov:
            raise SystemExit("this benchmark is written for SGD with momentum")
        twin = Twin(self.lowered.network, states, self.mode)
        optimizer = twin.optimizer(rule, LEARNING_RATE)
        for name, parameter in twin.parameters.items():
            momentum = torch.tensor(momenta[name], dtype=self.mode.dtype, device=self.mode.device)
            optimizer.state[parameter]["momentum_buffer"] = momentum
        loss, _ = twin.forward(twin.place(inputs))
        loss.backward()
        optimizer.step()
        after = {n: optimizer.state[p]["momentum_buffer"].double().cpu().numpy() for n, p in twin.parameters.items()}
        return float(loss.detach()), twin.states(), after


def together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean and the worst of the steps. If a step failed, the row does not pass."""
    earlier = [row for row in rows if "failed" not in row]
    means = {name: float(np.mean([row[name] for row in earlier] or [np.nan])) for name in ("median", "torch_median")}
    worst = {
        name: max((row[name] for row in earlier), default=np.nan) for name in ("worst", "torch_worst", "statistics")
    }
    kept = means["median"] <= TIMES_TORCH * means["torch_median"] and len(earlier) == len(rows)
    return {"name": f"mean of {len(rows)} steps", **means, **worst, "passed": bool(kept)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    job = example(
        "resnet",
        ("depth", "18"),
        ("batch", str(arguments.batch)),
        ("classes", "100"),
        ("size", str(arguments.size)),
        ("train.precision", "fp32"),
    )
    network = job.lowered().network
    exact, theirs = Trainer(job, Mode(arguments.device)), Trainer(job, Mode(arguments.device, torch.float32))
    states = start(job)
    momenta = {n: np.zeros_like(v) for n, v in states.items() if network.values[n].role is Role.PARAMETER}
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        where: Any = job.plan()
        if arguments.device == "cuda":
            built = build(job, Path(folder) / "package")
            if built.failed:
                raise SystemExit(built.failed)
            where = built.folder
        module = open_module(where, arguments.device)
        for number in range(arguments.steps):
            shape = network.values[network.inputs[0]].type.shape
            inputs = (
                random.standard_normal(shape).astype(np.float32),
                random.integers(0, 100, shape[:1]).astype(np.int32),
            )

            def one(
                states: dict[str, np.ndarray] = states, momenta: dict[str, np.ndarray] = momenta, inputs: Any = inputs
            ) -> Any:
                for name, value in states.items():
                    module.set_state(name, value)
                for name, value in momenta.items():
                    module.set_state(f"{name}.momentum", value)
                loss = float(module.step(*inputs, lr=LEARNING_RATE))
                ours = {n: np.asarray(module.state(f"{n}.momentum"), np.float64) for n in momenta}
                statistics = {n: np.asarray(module.state(n), np.float64) for n in states if n not in momenta}
                true_loss, true_states, true_momenta = exact.step(states, momenta, inputs)
                _, next_states, next_momenta = theirs.step(states, momenta, inputs)
                result, peer = errors(ours, true_momenta), errors(next_momenta, true_momenta)
                moved = errors(statistics, {n: true_states[n] for n in statistics})
                return {
                    "loss": true_loss,
                    "loss_error": abs(loss - true_loss) / abs(true_loss),
                    "median": median(result.values()),
                    "torch_median": median(peer.values()),
                    "worst": max(result.values()),
                    "torch_worst": max(peer.values()),
                    "statistics": max(moved.values()),
                    "next": (next_states, next_momenta),
                }

            row = attempt(one, f"step {number + 1}")
            states, momenta = row.pop("next", (states, momenta))
            rows.append(row)
        module.close()
    rows.append(together(rows))
    path = write("steps20", rows, device=arguments.device, batch=arguments.batch, size=arguments.size)
    show(rows, ["name", "loss", "loss_error", "median", "torch_median", "worst", "torch_worst", "statistics", "passed"])
    print(f"the steps {'keep' if rows[-1]['passed'] else 'break'} the rule; {path.name}")


if __name__ == "__main__":
    main()
