"""Small random networks in the language, with random layers, branches, heads, losses and `train` sections."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from operations import ACTIVATIONS

DRAWN = (*("relu",) * 3, *ACTIVATIONS, "prelu")
OPTIMIZERS = (
    "sgd(momentum=0.9)",
    "sgd(momentum=0.9, nesterov=true, weight_decay=1e-3)",
    "sgd(momentum=0.8, weight_decay=1e-2)",
    "adamw()",
    "adamw(beta1=0.8, weight_decay=0.1)",
    "lars(weight_decay=1e-3)",
    "lamb(weight_decay=0.05)",
)
FROZEN = ('"stem.*"', '"*.weight"', '("stem.*", "head.weight")')
GPUS = ("h200", "h200", "h100", "a100-40", "l4", "t4", "rtx-3090", "v100")
PRECISIONS = ("fp32",) * 6 + ("tf32", "bf16", "bf16", "fp16")


@dataclass(frozen=True)
class Drawn:
    """A network, and the GPU and precision that it is planned for."""

    source: str
    gpu: str
    precision: str


@dataclass
class _Writer:
    """A writer of statements that keeps the channels and the size along every axis of the current value."""

    rng: random.Random
    channels: int
    size: int
    axes: int = 2
    lines: list[str] = field(default_factory=list[str])
    number: int = 0

    def name(self) -> str:
        self.number += 1
        return f"v{self.number}"

    def put(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def same_shape(self, x: str, channels: int) -> str:
        """Write a few layers that change no shape, and return the name of the result."""
        steps: list[str] = []
        for _ in range(self.rng.randint(1, 3)):
            steps.append(self.rng.choice((f"conv({channels}, 3, pad=1)", f"conv({channels}, 1, bias=true)", "bn")))
            if self.rng.random() < 0.6:
                steps.append(self.rng.choice(DRAWN))
        return self.put(" |> ".join([x, *steps]))

    def layer(self, x: str) -> str:
        """Write one more layer or branch, and return the name of the result."""
        rng, c = self.rng, self.channels
        ways = [self._conv, self._conv, self._conv, self._norm, self._activation, self._activation, self._residual]
        ways += [self._residual, self._concat, self._gate, self._odd, self._split]
        if self.size >= 4 and self.size % 2 == 0:
            ways += [self._smaller, self._smaller]
        if self.size <= 5:
            ways.append(self._larger)
        return rng.choice(ways)(x, c)

    def _conv(self, x: str, c: int) -> str:
        rng = self.rng
        k: int | tuple[int, ...] = rng.choice((1, 3, 3, 5))
        pad: int | tuple[int, ...] = k // 2
        if self.axes != 2:
            k = tuple(rng.choice((1, 3)) for _ in range(self.axes))
            pad = tuple(size // 2 for size in k)
        groups = c if rng.random() < 0.15 else 1
        self.channels = c if groups > 1 else rng.choice((2, 4, 8, 8, 12))
        more = f", groups={groups}" * (groups > 1) + ", bias=true" * (rng.random() < 0.4)
        behind = " |> bn |> relu" if rng.random() < 0.5 else ""
        return self.put(f"{x} |> conv({self.channels}, {k}, pad={pad}{more}){behind}")

    def _norm(self, x: str, c: int) -> str:
        even = 2 if c % 2 == 0 else 1
        return self.put(f"{x} |> {self.rng.choice(('bn', 'bn', f'group_norm({even})', 'instance_norm', 'lrn'))}")

    def _activation(self, x: str, c: int) -> str:
        return self.put(f"{x} |> {self.rng.choice(DRAWN)}")

    def _residual(self, x: str, c: int) -> str:
        return self.put(f"{x} + {self.same_shape(x, c)}" + " |> relu" * (self.rng.random() < 0.6))

    def _concat(self, x: str, c: int) -> str:
        more = self.rng.choice((2, 4, 8))
        branch = self.put(f"{x} |> conv({more}, 3, pad=1) |> {self.rng.choice(DRAWN)}")
        self.channels = c + more
        return self.put(f"({x}, {branch}) |> concat")

    def _gate(self, x: str, c: int) -> str:
        gate = self.put(f"{x} |> global_avgpool |> conv({c}, 1, bias=true) |> sigmoid")
        return self.put(f"{x} * {gate}")

    def _odd(self, x: str, c: int) -> str:
        ways = ["dropout(0.2)", "drop_path(0.3)", "maxpool(3, stride=1, pad=1)", "avgpool(3, stride=1, pad=1)"]
        ways += [f"channel_shuffle({c // 2})"] * (c % 2 == 0 and c > 2)
        return self.put(f"{x} |> {self.rng.choice(ways)}")

    def _split(self, x: str, c: int) -> str:
        if c % 2:
            return self._activation(x, c)
        a, b = self.name(), self.name()
        self.lines.append(f"  {a}, {b} = {x} |> chunk(2)")
        other = self.put(f"{b} |> conv({c // 2}, 3, pad=1) |> relu")
        return self.put(f"({a}, {other}) |> concat")

    def _smaller(self, x: str, c: int) -> str:
        self.size //= 2
        way = self.rng.choice(("maxpool(2)", "avgpool(2)", f"conv({c}, 3, stride=2, pad=1) |> bn", "maxpool(2)"))
        return self.put(f"{x} |> {way}")

    def _larger(self, x: str, c: int) -> str:
        self.size *= 2
        return self.put(f"{x} |> {self.rng.choice(('upsample(2)', f'conv_transpose({c}, 2, stride=2, bias=true)'))}")


def drawn_network(rng: random.Random, most_layers: int = 5, axes: int = 2) -> Drawn:
    """Draw a network of at most `most_layers` layers or branches between stem and head, along `axes` spatial axes."""
    batch, size = rng.choice((2, 3, 4, 4, 6, 8)), rng.choice((4, 6, 8, 8, 12))
    size = min(size, 6) if axes == 3 else size
    writer = _Writer(rng, rng.choice((1, 2, 3, 4)), size, axes)
    head = [f"  input x[batch, {writer.channels}{axes * f', {size}'}] : float"]
    x = writer.put(
        f"x |> conv({rng.choice((4, 8, 8, 16))}, 3, pad=1) @stem |> {rng.choice(('relu', 'bn', 'bn |> relu'))}"
    )
    writer.channels = int(writer.lines[-1].partition("conv(")[2].partition(",")[0])
    aux = ""
    for number in range(rng.randint(1, most_layers)):
        x = writer.layer(x)
        if number == 1 and rng.random() < 0.25:
            aux = x
    tail, inputs = _head(rng, writer, x)
    if aux:
        inputs.append("  input other[batch] : class")
        writer.lines.append(f"  side = {aux} |> global_avgpool |> linear(3) @side")
        tail.append(f"  loss {rng.choice(('', '0.3 * '))}((side, other) |> softmax_cross_entropy)")
    body = "\n".join([*head, *inputs, *writer.lines, *tail])
    source = f"network drawn(batch = {batch}) {{\n{body}\n}}\ntrain {{\n{_train(rng)}}}\n"
    return Drawn(source, rng.choice(GPUS), rng.choice(PRECISIONS))


def _head(rng: random.Random, writer: _Writer, x: str) -> tuple[list[str], list[str]]:
    """Return the statements of the output and its loss, and the inputs that they need."""
    sizes, way = writer.axes * f", {writer.size}", rng.randrange(4)
    if way == 0:
        loss = rng.choice(("mse", "l1", "smooth_l1", "binary_cross_entropy"))
        tail = [f"  y = {x} |> conv(2, 1, bias=true) @head", "  output y", f"  loss (y, target) |> {loss}"]
        return tail, [f"  input target[batch, 2{sizes}] : float"]
    if way == 1:
        tail = [f"  y = {x} |> conv(3, 1) @head", "  output y", "  loss (y, target) |> softmax_cross_entropy"]
        return tail, [f"  input target[batch{sizes}] : class"]
    smoothing = rng.choice(("", "(smoothing=0.1)"))
    pooled = rng.choice(("global_avgpool", "flatten", "global_maxpool"))
    hidden = rng.choice(("", "linear(6) |> relu |> ", "dropout(0.3) |> "))
    tail = [f"  y = {x} |> {pooled} |> {hidden}linear(5) @head", "  output y"]
    tail.append(f"  loss (y, target) |> softmax_cross_entropy{smoothing}")
    if rng.random() < 0.3:
        tail.append("  metric top2 = (y, target) |> top_k(2)")
    return tail, ["  input target[batch] : class"]


def _train(rng: random.Random) -> str:
    lines = [f"optimizer = {rng.choice(OPTIMIZERS)}"]
    ways = (
        (0.45, f"accumulate = {rng.choice((2, 2, 3, 4))}"),
        (0.35, f"clip_norm = {rng.choice((0.01, 0.5, 10))}"),
        (0.2, f"clip_value = {rng.choice((0.001, 0.1))}"),
        (0.35, f"ema = {rng.choice((0.5, 0.99))}"),
        (0.3, "frozen = " + rng.choice(FROZEN)),
        (0.2, 'groups = (group("head.*", rate=2), group("*.weight", weight_decay=0.01))'),
        (0.2, "no_decay = norm_and_bias"),
        (0.15, "deterministic = true"),
        (0.1, "allow_emulated_fp32 = false"),
    )
    lines += [line for share, line in ways if rng.random() < share]
    return "".join(f"  {line}\n" for line in lines)
