"""Convolutions, matrix products and dropout."""

from __future__ import annotations

from collections.abc import Mapping

from mbc.interchange.aten.operands import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.from_onnx.patterns import bias_behind
from mbc.interchange.from_onnx.windows import pads_of, per_axis
from mbc.interchange.program import TensorName
from mbc.ops.window import MOST_AXES


def _kernel(op: Operator) -> tuple[int, ...]:
    """Return the size of filters, which the attribute `kernel_shape` may repeat.

    Raises:
        Refused: The attribute differs from the filters.
    """
    kernel = op.sizes(1)[2:]
    if (op.ints("kernel_shape") or kernel) != kernel:
        raise Refused(f"its filters are {list(kernel)}, and its 'kernel_shape' differs", "export the model again")
    return kernel


def _conv(op: Operator) -> None:
    x, kernel = Expression.of(op), _kernel(op)
    rank = len(kernel)
    if not 1 <= rank <= MOST_AXES:
        raise Refused(f"it has {rank} dimensions", "use one to three, such as [N, C, H, W]")
    stride, dilation = per_axis(op, "strides", rank, 1), per_axis(op, "dilations", rank, 1)
    pads = pads_of(op, kernel, stride, dilation)
    before, after = pads[:rank], pads[rank:]
    if before != after:
        x, before = x.padded(before, after), (0,) * rank
    op.emit(
        f"aten.conv{rank}d.default",
        input=x.name, weight=op.held(1, "weight"), bias=op.bias(), stride=stride, padding=before,
        dilation=dilation, groups=op.integer("group", 1),
    )  # fmt: skip


def _conv_transpose(op: Operator) -> None:
    """Emit a transposed convolution.

    If the padding before and after an axis differs, the whole result is computed and then sliced.

    Raises:
        Refused: The images do not have one to three dimensions, or the padding is negative.
    """
    kernel = _kernel(op)
    rank = len(kernel)
    if not 1 <= rank <= MOST_AXES:
        raise Refused(f"it has {rank} dimensions", "use one to three, such as [N, C, H, W]")
    stride, dilation = per_axis(op, "strides", rank, 1), per_axis(op, "dilations", rank, 1)
    more, sizes = per_axis(op, "output_padding", rank, 0), op.sizes()[2:]
    axes = list(zip(sizes, kernel, stride, dilation, more, strict=True))
    full = tuple((n - 1) * s + (k - 1) * d + 1 + m for n, k, s, d, m in axes)
    pads = _pads_of_transposed(op, full, tuple(n * s for n, s in zip(sizes, stride, strict=True)))
    before, after = pads[:rank], pads[rank:]
    if min(pads) < 0:
        raise Refused("its padding is negative", "use output_padding")
    cut = before != after
    padding = (0,) * rank if cut else before
    shape = tuple(n - 2 * p for n, p in zip(full, padding, strict=True))
    shape = (*op.result[:2], *shape)
    whole = op.step(
        f"aten.conv_transpose{rank}d.{'default' if rank == 1 else 'input'}", shape,
        input=op.tensor(), weight=op.held(1, "weight"), bias=op.bias(), stride=stride, padding=padding,
        output_padding=more, groups=op.integer("group", 1), dilation=dilation,
    )  # fmt: skip
    result = Expression(op, whole, shape)
    for axis, (first, size) in enumerate(zip(before, op.result[2:], strict=True), 2):
        result = result.slice(axis, first, first + size) if cut else result
    result.give()


def _pads_of_transposed(op: Operator, full: tuple[int, ...], same: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many elements the result lacks before and after each axis: all before, then all after.

    Args:
        op: The transposed convolution.
        full: The size of the result without padding.
        same: The size of the result for `auto_pad` SAME.
    """
    rank, auto, wanted = len(full), op.text("auto_pad", "NOTSET"), op.ints("output_shape")
    if wanted is None and not auto.startswith("SAME"):
        return per_axis(op, "pads", 2 * rank, 0) if auto == "NOTSET" else (0,) * (2 * rank)
    op.ignore("pads")  # they follow from the size
    totals = [n - size for n, size in zip(full, (same if wanted is None else wanted)[-rank:], strict=True)]
    small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (*small, *large) if auto == "SAME_UPPER" else (*large, *small)


def _gemm(op: Operator) -> None:
    """Emit alpha * A B + beta * C; if C is a bias, as beta * (alpha / beta * A B + C).

    Raises:
        Refused: A is transposed.
    """
    alpha, beta = op.real("alpha", 1.0), op.real("beta", 1.0)
    if op.integer("transA", 0):
        raise Refused("it transposes its first operand, the samples with it", "give it [N, features]")
    weight = op.held(1, "weight", () if op.integer("transB", 0) else (1, 0))
    x, c = Expression.of(op), op.input(2) if beta else ""
    op.ignore(2)  # C is not used if beta is 0
    bias = _bias_of_gemm(op) if c else None
    result = x * (alpha / beta if bias is not None else alpha)
    result = Expression(
        op, op.step("aten.linear.default", op.result, input=result.name, weight=weight, bias=bias), op.result
    )  # fmt: skip
    if bias is not None:
        result = result * beta
    elif c:
        number = op.number(2)
        result = result + (Expression.of(op, 2) * beta if number is None else number * beta)
    result.give()


def _bias_of_gemm(op: Operator) -> TensorName | None:
    """Return C as one number for each feature; None for a single number, an exporter's zeros, or a computed tensor.

    Raises:
        Refused: C differs between samples.
    """
    array, features = op.graph.array(op.input(2)), op.result[1]
    if array is None or (array.size == 1 and (features != 1 or array.ndim != 1)):
        return None
    if array.size != features or array.shape[-1] != features:
        raise Refused(
            f"its C {list(array.shape)} differs between the samples", "give it one number, or one for each feature"
        )
    bias = op.bias()
    return bias if bias is None or array.ndim == 1 else op.step("aten.view.default", (features,), self=bias)


def _matmul(op: Operator) -> None:
    """Emit a product of tensors of the network, or of a tensor and a held matrix or vector on either side.

    Raises:
        Refused: The held numbers have more than two dimensions.
    """
    left, right = op.sizes(0), op.sizes(1)
    if op.graph.array(op.input(1)) is None:
        if op.graph.array(op.input(0)) is None or len(left) != 2 or len(right) < 3:
            op.emit("aten.matmul.default", self=op.tensor(0), other=op.tensor(1))
        else:
            weight = op.step("aten.view.default", (*left, 1, 1), self=op.held(0, "weight"))
            Expression.of(op, 1).convolved(len(right) - 2, weight, left[0]).give()
        return
    if len(right) not in (1, 2):
        raise Refused(f"it multiplies by held numbers of {len(right)} dimensions", "multiply by nn.Linear")
    if len(right) == 1:
        weight = op.step("aten.view.default", (1, *right), self=op.held(1, "weight"))
        result = op.step("aten.linear.default", (*left[:-1], 1), input=op.tensor(0), weight=weight, bias=None)
        Expression(op, result, (*left[:-1], 1)).reshape(op.result).give()
    elif bias_behind(op) is not None:
        op.part()
    else:
        op.emit("aten.linear.default", input=op.tensor(0), weight=op.held(1, "weight", (1, 0)), bias=None)


def _dropout(op: Operator) -> None:
    """Emit dropout in training mode, whatever mode the file states.

    Raises:
        Refused: The ratio depends on data.
    """
    op.ignore(2, "seed")
    ratio = op.real("ratio", 0.5)
    if op.input(1):
        number = op.number(1)
        if number is None:
            raise Refused("its ratio is computed in each step", "export it with a fixed ratio")
        ratio = number
    op.emit("aten.dropout.default", input=op.tensor(0), p=ratio, train=True)


RULES: Mapping[str, Rule] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Dropout": _dropout,
}
NOT_TAKEN: Mapping[str, str] = {
    "QLinearConv": "import the model before it is quantised",
    "ConvInteger": "import the model before it is quantised",
    "DequantizeLinear": "import the model before it is quantised",
    "QuantizeLinear": "import the model before it is quantised",
    "LSTM": "use convolutions or attention: the language has no recurrent layers",
    "GRU": "use convolutions or attention: the language has no recurrent layers",
    "RNN": "use convolutions or attention: the language has no recurrent layers",
}
