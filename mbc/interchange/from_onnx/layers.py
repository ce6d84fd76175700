"""Convolutions, matrix products, normalisation, pooling and dropout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mbc.interchange.aten.base import Refused
from mbc.interchange.from_onnx.expressions import Expression
from mbc.interchange.from_onnx.operator import Operator, Rule
from mbc.interchange.from_onnx.patterns import bias_behind, is_part_of_group_norm
from mbc.interchange.program import TensorName

Pads = tuple[int, int, int, int]  # top, bottom, left, right


def _per_axis(op: Operator, name: str, rank: int, default: int) -> tuple[int, ...]:
    found = op.ints(name)
    if found is not None and len(found) != rank:
        raise Refused(f"its '{name}' has {len(found)} numbers for {rank} dimensions", "export the model again")
    return found if found is not None else (default,) * rank


def _pads(op: Operator, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """Zeros before and behind each axis, as ONNX orders them: all befores first."""
    rank = len(kernel)
    auto = op.text("auto_pad", "NOTSET")
    if auto == "NOTSET":
        return _per_axis(op, "pads", 2 * rank, 0)
    if auto == "VALID":
        return (0,) * (2 * rank)
    before: list[int] = []
    after: list[int] = []
    for size, k, s, d in zip(op.sizes(0)[2:], kernel, stride, dilation, strict=True):
        around = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
        less, more = around // 2, around - around // 2
        before.append(less if auto == "SAME_UPPER" else more)
        after.append(more if auto == "SAME_UPPER" else less)
    return (*before, *after)


def _kernel(op: Operator) -> tuple[int, ...]:
    """The size of filters, which an attribute may say again."""
    kernel = op.sizes(1)[2:]
    if (op.ints("kernel_shape") or kernel) != kernel:
        raise Refused(
            f"its filters are {list(kernel)}, and its 'kernel_shape' says otherwise", "export the model again"
        )
    return kernel


def _conv(op: Operator) -> None:
    x, kernel = op.tensor(0), _kernel(op)
    rank = len(kernel)
    if rank not in (1, 2):
        raise Refused(f"it has {rank} dimensions", "images have two dimensions here: [N, C, H, W]")
    stride, dilation = _per_axis(op, "strides", rank, 1), _per_axis(op, "dilations", rank, 1)
    pads = _pads(op, kernel, stride, dilation)
    before, after = pads[:rank], pads[rank:]
    if before != after:
        if rank == 1:
            raise Refused("its zeros before and behind are not equally many", "pad both sides alike")
        x, before = _padded(op, x, pads), (0, 0)
    op.emit(
        f"aten.conv{rank}d.default",
        input=x, weight=op.held(1, "weight"), bias=op.bias(), stride=stride, padding=before,
        dilation=dilation, groups=op.integer("group", 1),
    )  # fmt: skip


def _padded(op: Operator, x: TensorName, pads: tuple[int, ...]) -> TensorName:
    """Images with zeros around them, which the convolution takes into its own."""
    top, left, bottom, right = pads
    rows, channels, height, width = op.sizes(0)
    shape = (rows, channels, height + top + bottom, width + left + right)
    return op.step("aten.constant_pad_nd.default", shape, self=x, pad=(left, right, top, bottom))


def _conv_transpose(op: Operator) -> None:
    kernel = _kernel(op)
    if len(kernel) != 2 or op.has("output_shape"):
        raise Refused("it is not of two dimensions, or is given its result's shape", "use nn.ConvTranspose2d")
    stride, dilation = _per_axis(op, "strides", 2, 1), _per_axis(op, "dilations", 2, 1)
    pads = _per_axis(op, "pads", 4, 0)
    if pads[:2] != pads[2:] or op.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise Refused("its zeros before and behind are not equally many", "pad both sides alike")
    op.emit(
        "aten.conv_transpose2d.input",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.bias(), stride=stride, padding=pads[:2],
        output_padding=_per_axis(op, "output_padding", 2, 0), groups=op.integer("group", 1), dilation=dilation,
    )  # fmt: skip


def _gemm(op: Operator) -> None:
    """alpha * A B + beta * C: beta * (alpha / beta * A B + C) where C is a bias."""
    alpha, beta = op.real("alpha", 1.0), op.real("beta", 1.0)
    if op.integer("transA", 0):
        raise Refused("it transposes its first operand, the samples with it", "give it [N, features]")
    weight = op.held(1, "weight", () if op.integer("transB", 0) else (1, 0))
    x, c = Expression.of(op), op.input(2) if beta else ""
    op.ignore(2)  # where beta is 0
    bias = _bias_of_gemm(op) if c else None
    made = x * (alpha / beta if bias is not None else alpha)
    made = Expression(
        op, op.step("aten.linear.default", op.result, input=made.name, weight=weight, bias=bias), op.result
    )  # fmt: skip
    if bias is not None:
        made = made * beta
    elif c:
        number = op.number(2)
        made = made + (Expression.of(op, 2) * beta if number is None else number * beta)
    made.give()


def _bias_of_gemm(op: Operator) -> TensorName | None:
    """C as a number for each feature; None where it is one number, zeros of an exporter, or a tensor of the network."""
    array, features = op.graph.array(op.input(2)), op.result[1]
    if array is None or array.size == 1:
        return None
    if array.size != features or array.shape[-1] != features:
        raise Refused(
            f"its C {list(array.shape)} differs between the samples", "give it one number, or one for each feature"
        )
    bias = op.bias()
    return bias if bias is None or array.ndim == 1 else op.step("aten.view.default", (features,), self=bias)


def _matmul(op: Operator) -> None:
    if op.graph.array(op.input(1)) is None:
        op.emit("aten.matmul.default", self=op.tensor(0), other=op.tensor(1))
        return
    if len(op.sizes(1)) != 2:
        raise Refused(f"it multiplies by held numbers of {len(op.sizes(1))} dimensions", "multiply by nn.Linear")
    if bias_behind(op) is not None:
        op.part()
    else:
        op.emit("aten.linear.default", input=op.tensor(0), weight=op.held(1, "weight", (1, 0)), bias=None)


def _batch_norm(op: Operator) -> None:
    """In training mode, whatever the file says: the statistics go on from those of the file. ONNX's momentum is the
    share that is kept."""
    op.ignore("training_mode", "spatial")
    op.emit(
        "aten.batch_norm.default",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.held(2, "bias"),
        running_mean=op.held(3, "running_mean"), running_var=op.held(4, "running_var"), training=True,
        momentum=round(1.0 - op.real("momentum", 0.9), 7), eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _layer_norm(op: Operator) -> None:
    shape = op.sizes(0)
    axis = op.integer("axis", -1) % len(shape)
    op.emit(
        "aten.layer_norm.default",
        input=op.tensor(0), normalized_shape=shape[axis:], weight=op.held(1, "weight"), bias=op.held(2, "bias"),
        eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _group_norm(op: Operator) -> None:
    if op.graph.opset < 21:
        raise Refused("it scales groups, not channels", "export it with opset_version=21 or newer")
    op.emit(
        "aten.group_norm.default",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.held(2, "bias"),
        num_groups=op.integer("num_groups", 1), eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _instance_norm(op: Operator) -> None:
    if is_part_of_group_norm(op):
        op.part()
        return
    op.emit(
        "aten.instance_norm.default",
        input=op.tensor(0), weight=op.held(1, "weight"), bias=op.held(2, "bias"), eps=op.real("epsilon", 1e-5),
    )  # fmt: skip


def _lrn(op: Operator) -> None:
    size = op.integer("size", 5)
    if size % 2 == 0:
        raise Refused("its window has an even size", "use an odd one")
    op.emit(
        "onnx.LRN",
        self=op.tensor(0), size=size, alpha=op.real("alpha", 1e-4), beta=op.real("beta", 0.75),
        k=op.real("bias", 1.0),
    )  # fmt: skip


def _pool(kind: str, op: Operator) -> None:
    kernel = op.ints("kernel_shape")
    if kernel is None or len(kernel) != 2:
        raise Refused("it is not of two dimensions", "pool images, [N, C, H, W]")
    stride, dilation = _per_axis(op, "strides", 2, 1), _per_axis(op, "dilations", 2, 1)
    if dilation != (1, 1):
        raise Refused("its windows are dilated", "use dilation=1")
    op.ignore("storage_order")  # of the positions of maxima, which nobody may use
    top, left, bottom, right = _pads(op, kernel, stride, dilation)
    common = {
        "self": op.tensor(0), "kernel_size": kernel, "stride": stride, "padding": (top, bottom, left, right),
        "ceil_mode": bool(op.integer("ceil_mode", 0)),
    }  # fmt: skip
    if kind == "max":
        op.emit("aten.max_pool2d.default", **common)
    else:
        op.emit("aten.avg_pool2d.default", **common, count_include_pad=bool(op.integer("count_include_pad", 0)))


def _global_average(op: Operator) -> None:
    op.emit("aten.adaptive_avg_pool2d.default", self=op.tensor(0), output_size=(1, 1))


def _global_max(op: Operator) -> None:
    op.emit("aten.adaptive_max_pool2d.default", self=op.tensor(0), output_size=(1, 1))


def _dropout(op: Operator) -> None:
    """In training mode, whatever the file says."""
    op.ignore(2, "seed")
    ratio = op.real("ratio", 0.5)
    if op.input(1):
        found = op.number(1)
        if found is None:
            raise Refused("its ratio is computed while it runs", "export it with a fixed ratio")
        ratio = found
    op.emit("aten.dropout.default", input=op.tensor(0), p=ratio, train=True)


RULES: Mapping[str, Rule] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _lrn,
    "MaxPool": partial(_pool, "max"),
    "AveragePool": partial(_pool, "average"),
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "Dropout": _dropout,
}
NOT_TAKEN: Mapping[str, str] = {
    "Attention": "mbc compiles convolutional networks, without attention",
    "QLinearConv": "import the model before it is quantised",
    "ConvInteger": "import the model before it is quantised",
    "DequantizeLinear": "import the model before it is quantised",
    "QuantizeLinear": "import the model before it is quantised",
    "LpPool": "use nn.AvgPool2d",
    "GlobalLpPool": "use nn.AdaptiveAvgPool2d",
    "RMSNormalization": "use nn.LayerNorm",
    "LSTM": "mbc compiles convolutional networks",
    "GRU": "mbc compiles convolutional networks",
    "RNN": "mbc compiles convolutional networks",
}
