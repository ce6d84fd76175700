"""Runs a PyTorch model in float64 with its random layers off, whatever types its code names."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mbc.interchange.check import report_unchecked
from mbc.interchange.program import Array

torch: Any = importlib.import_module("torch")
overrides: Any = importlib.import_module("torch.overrides")
fx: Any = importlib.import_module("torch.fx")
_DROPS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
          "dropout_", "feature_dropout_", "native_dropout")  # fmt: skip
_DRAWS = ("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "multinomial", "normal",
          "normal_", "uniform_", "rrelu", "rrelu_", "bernoulli", "poisson", "random_", "exponential_")  # fmt: skip


def exact(name: str, function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the result of a function of PyTorch in float64 and without random numbers.

    Dropout returns its input; a mask drawn by `bernoulli_` has its mean in every element.

    Args:
        name: The function's name.
        function: The function.
        arguments: Its positional arguments.
        named: Its keyword arguments.

    Raises:
        MbcError: MBC346 for other functions that draw random numbers.
    """
    if name in _DROPS:
        return arguments[0]
    if name == "bernoulli_":
        mean = arguments[1] if len(arguments) > 1 else named.get("p", 0.5)
        return arguments[0].fill_(mean) if isinstance(mean, float | int) else arguments[0].copy_(mean)
    if name in _DRAWS:
        report_unchecked(f"the model draws random numbers by '{name}', which differ between the model and the network")
    if name == "float":
        return arguments[0].double()
    return function(*(_widened(a) for a in arguments), **{key: _widened(value) for key, value in named.items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Exact(overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "hardsigmoid" and args[0].dtype == torch.float64:
            # PyTorch's gradient uses 1 / 6 in float32, with an error of 3e-8.
            return torch.nn.functional.relu6(args[0] + 3) / 6
        return exact(name, func, args, kwargs or {})


@contextmanager
def in_float64() -> Generator[None]:
    """Let models compute in float64 and without random numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Exact():
            yield
    finally:
        torch.set_default_dtype(before)


class Recorder(fx.Interpreter):
    """Runs an exported program in float64 and without random numbers, and keeps a copy of each tensor.

    The copy has the numbers that the tensor had when it was computed.
    """

    def __init__(self, graph_module: Any) -> None:
        """Prepare to run the graph of an exported program."""
        fx.Interpreter.__init__(self, graph_module)
        self.tensors: dict[str, Array] = {}

    def run_node(self, n: Any) -> Any:
        """Return the result of a node, and keep a copy of it."""
        result: Any = fx.Interpreter.run_node(self, n)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.tensors[n.name] = np.array(result.detach().numpy())
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function or of a region without gradients, without random numbers."""
        packet = getattr(target, "overloadpacket", None)
        name = packet.__name__ if packet is not None else getattr(target, "__name__", "")
        if name == "wrap_with_set_grad_enabled":
            enabled, region, *inputs = args
            with torch.set_grad_enabled(enabled):
                return Recorder(region).run(*inputs)
        return exact(name, target, args, kwargs)


def arguments_of(program: Any, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an exported program's graph in float64, and its trained parameters by key.

    Raises:
        MbcError: MBC346 if the program holds something that is no tensor.
    """
    given, copies, parameters = iter(inputs), dict[str, Any](), dict[str, Any]()
    arguments: list[Any] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            arguments.append(next(given))
            continue
        held = program.state_dict.get(spec.target)
        held = program.constants[spec.target] if held is None else held
        if not isinstance(held, torch.Tensor):
            report_unchecked(f"it holds '{spec.target}', which is no tensor")
        key = str(id(held))
        if key not in copies:
            copy = held.detach().clone()
            copy = copy.double() if copy.is_floating_point() else copy
            copies[key] = copy.requires_grad_(held.requires_grad)
        if held.requires_grad:
            parameters[spec.target] = copies[key]
        arguments.append(copies[key])
    return arguments, parameters
