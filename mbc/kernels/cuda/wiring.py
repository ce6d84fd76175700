"""How a kernel recognizes its fusion group: by the wiring, which says whose results each member reads.

`mbc.optimize.fusion.catalogue` says where groups come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mbc.kernels.base import Request
from mbc.kernels.cuda.base import OwnKernel, Slice
from mbc.ops import KINDS
from mbc.ops.batch_normalize import BatchNormalize, BatchNormalizeBackward
from mbc.ops.fused import Fused, Member, leading_products
from mbc.ops.shape import ChannelSlice

AFFINE = (5, 3)  # numbers of operands of batch_normalize, with scale and shift and without

# Names of operands: those that a normalization may have or not, all of a normalization, and those of a second one.
SCALE_SHIFT = "gamma?affine beta?affine"
NORMALIZED = f"x mean variance {SCALE_SHIFT}"
SECOND = "mean2 variance2 gamma2?affine2 beta2?affine2"

NORM_RELUS = ("batch", "relu"), ("instance", "relu"), ("instance", "leaky_relu")  # norms with activations behind them

Numbers = tuple[int, ...]
Wiring = tuple[tuple[Numbers, ...], Numbers]  # inputs of each member, and outputs of the group


def for_norm_relus(kernel: OwnKernel) -> tuple[OwnKernel, ...]:
    """Return a kernel for each norm and activation, with their names for `{norm}` and `{relu}` in its kind and name."""
    names = [{"norm": norm, "relu": relu} for norm, relu in NORM_RELUS]
    return tuple(replace(kernel, kind=kernel.kind.format(**n), named=kernel.named.format(**n)) for n in names)


def members(request: Request) -> Fused:
    """Return the attributes of a fusion group."""
    assert isinstance(request.attributes, Fused)
    return request.attributes


def members_of(request: Request) -> tuple[Member, ...]:
    """Return the operations of a request: a single one, or the members of a group."""
    if isinstance(request.attributes, Fused):
        return request.attributes.members
    inputs, all_values = len(request.inputs), len(request.inputs) + len(request.outputs)
    return (Member(request.kind, request.attributes, tuple(range(inputs)), tuple(range(inputs, all_values))),)


def gemms_of(request: Request) -> tuple[Request, ...]:
    """Return the GEMMs with which a group begins, each of the next two operands; a single operation is itself."""
    if not isinstance(request.attributes, Fused):
        return (request,)
    gemms: list[Request] = []
    for member in request.attributes.members[: leading_products(request.attributes)]:
        inputs = request.inputs[2 * len(gemms) : 2 * len(gemms) + 2]
        outputs = KINDS[member.kind].shape(member.attributes, inputs)
        gemms.append(Request(member.kind, member.attributes, inputs, outputs, request.precision))
    return tuple(gemms)


def product_of(request: Request) -> Request:
    """Return the first convolution or GEMM of a group, with its own operands; a single operation is itself."""
    types = list(request.inputs)
    for member in members_of(request):
        kind, taken = KINDS[member.kind], tuple(types[number] for number in member.inputs)
        results = kind.shape(member.attributes, taken)
        if kind.flops is not None:
            return Request(member.kind, member.attributes, taken, results, request.precision)
        types += results
    raise ValueError(f"no convolution or GEMM in {request.kind}")


def taking(*wirings: Wiring) -> Callable[[Request], bool]:
    """Return a `takes` callback for groups that have one of these wirings."""

    def takes(request: Request) -> bool:
        a = members(request)
        return (tuple(member.inputs for member in a.members), a.given) in wirings

    return takes


def run(first: int, count: int) -> Numbers:
    """Return `count` consecutive numbers from `first` on."""
    return tuple(range(first, first + count))


def adds(outside: int, first: tuple[Numbers, ...]) -> tuple[Wiring, ...]:
    """Return the wirings of groups that start with `first` and then add one more operand at a time.

    `first` takes its operands in order. Each further operand is the first or the second summand, until all `outside`
    operands are used.
    """
    taken = 1 + max(max(numbers) for numbers in first)
    wirings = [first]
    for more in range(taken, outside):
        value = outside + len(wirings[0]) - 1
        wirings = [(*so_far, pair) for so_far in wirings for pair in ((value, more), (more, value))]
    return tuple((wiring, (outside + len(wiring) - 1,)) for wiring in wirings)


def affines(request: Request) -> tuple[int, ...]:
    """Return for each batch normalization of the group whether it has scale and shift."""
    return tuple(int(len(m.inputs) == 5) for m in members(request).members if m.kind == "batch_normalize")


def eps(at: Slice) -> tuple[float, ...]:
    """Return eps of every member that has this setting, in order."""
    attributes = (member.attributes for member in members(at.request).members)
    return tuple(a.eps for a in attributes if isinstance(a, BatchNormalize | BatchNormalizeBackward))


def slice_of(at: Slice) -> tuple[int, ...]:
    """Return the first channel of the slice that is read in place, and the channels of the whole tensor."""
    for member in members(at.request).members:
        if isinstance(member.attributes, ChannelSlice):
            return member.attributes.start, at.request.inputs[member.inputs[0]].shape[1]
    raise ValueError(f"no slice in {at.request.kind}")
