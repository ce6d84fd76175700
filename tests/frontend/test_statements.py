"""The meaning of sources: names, paths, loops, conditions, sharing, arithmetic, losses, sections, settings."""

from __future__ import annotations

import pytest

from mbc.errors import MbcError
from mbc.frontend.lower import Lowered
from mbc.frontend.sections import optimizer_text
from mbc.ir.graph import Network, Optimizer, Role
from mbc.ir.types import DType, Precision
from mbc.ops.activation import Scale
from mbc.ops.convolution import Convolution
from mbc.ops.normalization import BatchNorm
from tests.frontend.reading import lower_text, wrap


def lower_body(body: str, header: str = "", parameters: str = "", *settings: str) -> Network:
    return lower_text(wrap(body, header, parameters), *settings).network


def trained(network: Network) -> list[str]:
    """Return the paths of the parameters, without those of the head."""
    names = [s.value for s in network.states if network.values[s.value].role is Role.PARAMETER]
    return [n for n in names if not n.startswith("head.")]


def kinds(network: Network) -> list[str]:
    """Return the kinds of the operations before the head."""
    return [op.kind for op in network.operations if not op.name.startswith(("head", "softmax"))]


# ---- paths ----


def test_path_counts_each_kind_from_zero():
    network = lower_body("y = image |> conv(4, 3) |> bn |> conv(4, 3)")
    assert trained(network) == ["conv0.weight", "bn0.weight", "bn0.bias", "conv1.weight"]


def test_path_prefers_label_to_bound_name_to_count():
    network = lower_body("f = conv(4, 3) @first\n g = conv(4, 3)\n y = image |> f |> g |> conv(4, 3)")
    assert trained(network) == ["first.weight", "g.weight", "conv0.weight"]


def test_a_counted_name_without_parameters_yields_to_a_label():
    before = lower_body("y = image |> relu |> conv(4, 3) @relu0 |> relu |> conv(4, 3) @l10")
    assert trained(before) == ["relu0.weight", "l10.weight"]
    network = lower_body("y = image |> conv(4, 3) @conv1 |> conv(4, 3) |> conv(4, 3)")
    assert trained(network) == ["conv1.weight", "conv0.weight", "conv2.weight"]


def test_a_counted_name_with_parameters_does_not_yield():
    with pytest.raises(MbcError, match="`conv0` is taken") as caught:
        lower_body("y = image |> conv(4, 3) |> conv(4, 3) @conv0")
    assert caught.value.code == "MBC013"


def test_a_parameter_has_not_the_path_of_an_input():
    with pytest.raises(MbcError) as caught:
        lower_body("y = image * (parameter(3) @image)")
    assert caught.value.code == "MBC013"


def test_path_of_blocks_and_loops():
    header = "block two(c) on x { return x |> conv(c, 1) |> conv(c, 1) @second }"
    body = """y = image |> two(3)
      for i in range(2) { y = y |> two(4) |> two(4) }
      for i in range(1) @tail { for j in range(2) { y = y |> conv(5, 1) } }"""
    assert trained(lower_body(body, header)) == [
        "two0.conv0.weight", "two0.second.weight", "loop0.0.two0.conv0.weight", "loop0.0.two0.second.weight",
        "loop0.0.two1.conv0.weight", "loop0.0.two1.second.weight", "loop0.1.two0.conv0.weight",
        "loop0.1.two0.second.weight", "loop0.1.two1.conv0.weight", "loop0.1.two1.second.weight",
        "tail.0.loop0.0.conv0.weight", "tail.0.loop0.1.conv0.weight",
    ]  # fmt: skip


def test_a_label_may_be_a_path_with_numbers_and_words_of_the_language():
    header = "block unit on x { return x |> conv(4, 1) @0 |> bn @1 }"
    body = "y = image |> conv(4, 1) @features.0.block |> unit @features.0.if |> unit @features.1"
    assert trained(lower_body(body, header)) == [
        "features.0.block.weight",
        "features.0.if.0.weight",
        "features.0.if.1.weight",
        "features.0.if.1.bias",
        "features.1.0.weight",
        "features.1.1.weight",
        "features.1.1.bias",
    ]


@pytest.mark.parametrize("first, second", [("a.b", "a"), ("a", "a.b"), ("a.b.c", "a.b"), ("a.b", "a.b")])
def test_a_label_inside_of_another_is_refused(first: str, second: str):
    with pytest.raises(MbcError, match=r"MBC013: the name `a\S* is taken"):
        lower_body(f"y = image |> conv(4, 1) @{first} |> conv(4, 1) @{second}")


def test_path_of_labelled_block():
    header = "block one on x { return x |> conv(4, 1) }"
    assert trained(lower_body("y = image |> one @left", header)) == ["left.conv0.weight"]


def test_path_is_free_of_branches():
    body = "y = image\n if batch > 2 { y = y |> conv(4, 3) }\n y = y |> conv(5, 3)"
    assert trained(lower_body(body)) == ["conv0.weight", "conv1.weight"]


def test_path_does_not_depend_on_precision():
    source = wrap("y = image |> conv(4, 3) |> bn")
    paths = [[s.value for s in lower_text(source, f"train.precision={p}").network.states] for p in ("fp32", "bf16")]
    assert paths[0] == paths[1]


# ---- sharing ----


def test_shared_layer():
    network = lower_body("f = conv(3, 3, pad=1)\n y = image |> f |> f")
    assert trained(network) == ["f.weight"]
    assert [op.inputs[1] for op in network.operations if op.kind == "convolution"] == ["f.weight"] * 2


def test_shared_block_shares_everything_in_it():
    header = "block two on x { return x |> conv(3, 1) |> bn |> conv(3, 1) }"
    network = lower_body("b = two\n y = image |> b |> b", header)
    assert trained(network) == ["b.conv0.weight", "b.bn0.weight", "b.bn0.bias", "b.conv1.weight"]
    assert kinds(network).count("convolution") == 4


def test_layer_written_in_a_loop_is_new_in_every_turn_and_one_from_outside_is_shared():
    network = lower_body("f = conv(3, 1)\n y = image\n for i in range(2) { y = y |> f |> conv(3, 1) }")
    assert trained(network) == ["f.weight", "loop0.0.conv0.weight", "loop0.1.conv0.weight"]


def test_layer_as_argument():
    header = "block apply(act, times = 1) on x { for i in range(times) { x = x |> act }\n return x }"
    assert kinds(lower_body("y = image |> apply(silu, times=2) |> apply(leaky_relu(0.2))", header)) == [
        "silu",
        "silu",
        "leaky_relu",
    ]


# ---- names, loops, conditions ----


def test_names_bound_before_a_loop_are_carried_and_others_are_local():
    body = """n = 0
      for i in range(3) { n = n + i
        last = i }
      last = 7
      y = image |> conv(n, 1) |> conv(last, 1)"""
    network = lower_body(body)
    assert network.values["conv0.weight"].type.shape == (3, 3, 1, 1)
    assert network.values["conv1.weight"].type.shape == (7, 3, 1, 1)


def test_a_loop_variable_does_not_touch_a_name_outside():
    network = lower_body("i = 5\n for i in range(3) { j = i }\n y = image |> conv(i, 1)")
    assert network.values["conv0"].type.shape[1] == 5


def test_destructuring():
    body = "a, b = (4, 5)\n y = image\n for c, k in ((a, 1), (b, 3)) { y = y |> conv(c, k) }"
    network = lower_body(body)
    assert network.values["loop0.0.conv0.weight"].type.shape == (4, 3, 1, 1)
    assert network.values["loop0.1.conv0.weight"].type.shape == (5, 4, 3, 3)


def test_a_branch_not_taken_creates_nothing():
    body = """y = image if batch > 2 else image |> conv(9, 9) |> bn
      if batch > 100 { y = y |> unheard_of } else if batch == 4 { y = y |> conv(4, 1) } else { y = nothing }"""
    assert trained(lower_body(body)) == ["conv0.weight"]


def test_and_or_stop_early():
    assert kinds(lower_body("y = image |> relu if true or unknown else 3\n z = 1 if false and unknown else 2")) == [
        "relu"
    ]


def test_an_expression_goes_on_in_parentheses():
    assert kinds(lower_body("y = (image |> relu\n if batch > 2\n else image)")) == ["relu"]


def test_recursion_that_ends():
    header = """block down(n) on x {
      if n == 0 { return x }
      return x |> conv(n, 1) |> down(n - 1)
    }"""
    network = lower_body("y = image |> down(3)", header)
    assert trained(network) == ["down0.conv0.weight", "down0.down0.conv0.weight", "down0.down0.down0.conv0.weight"]


def test_block_with_several_tensors_and_results():
    header = "block both(c) on (a, b) { return (a + b, a * b |> conv(c, 1)) }"
    network = lower_body("p, q = (image, image |> relu) |> both(3)\n y = (p, q) |> concat", header)
    assert kinds(network) == ["relu", "add", "mul", "convolution", "concat"]


def test_defaults_may_use_earlier_parameters():
    header = "block wide(c, twice = 2 * c) on x { return x |> conv(twice, 1) }"
    assert lower_body("y = image |> wide(4)", header).values["wide0.conv0"].type.shape[1] == 8


# ---- expressions ----


@pytest.mark.parametrize(
    ("text", "channels"),
    [
        ("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("7 // 2", 3), ("8 / 2", 4), ("7 % 4", 3), ("2 ** 3 ** 2 // 64", 8),
        ("-2 + 5", 3), ("10 - 3 - 2", 5), ("int(3.9)", 3), ("max(2, 9, 4)", 9), ("min((5, 3))", 3),
        ("len((1, 2, 3))", 3), ("range(3, 9, 2)[-1]", 7), ("image.shape[1] * 2", 6),
        ("5 if image.shape == (4, 3, 8, 8) else 6", 5), ("5 if not (1 < 2 and 2 >= 3) else 6", 5),
        ("5 if (1, 2) != (1, 2) else 6", 6), ("1e1", 10),
    ],
)  # fmt: skip
def test_arithmetic(text: str, channels: int):
    assert lower_body(f"y = image |> conv({text}, 1)").values["conv0"].type.shape[1] == channels


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("image + image", ["add"]),
        ("image - image", ["broadcast"]),
        ("image / image", ["broadcast"]),
        ("image * image", ["mul"]),
        ("image + image |> relu", ["add", "relu"]),
        ("0.5 * image", ["scale"]),
        ("-image", ["scale"]),
        ("image + image + image", ["add", "add"]),
    ],
)
def test_arithmetic_of_tensors(text: str, expected: list[str]):
    assert kinds(lower_body(f"y = {text}")) == expected


@pytest.mark.parametrize(
    ("text", "factor", "offset"),
    [
        ("3 * image", 3, 0), ("image * 3", 3, 0), ("image / 4", 0.25, 0), ("image + 2", 1, 2), ("2 + image", 1, 2),
        ("image - 2", 1, -2), ("2 - image", -1, 2), ("-image", -1, 0),
    ],
)  # fmt: skip
def test_scale_and_offset(text: str, factor: float, offset: float):
    network = lower_body(f"y = {text}")
    assert network.operations[0].attributes == Scale(factor, offset)


def test_settings_in_every_form():
    network = lower_body("y = image |> conv(8, (3, 1), stride=(2, 1), pad=(1, 0, 2, 3), bias=true, init=xavier)")
    a = network.operations[0].attributes
    assert isinstance(a, Convolution)
    assert (a.kernel, a.stride, a.pad) == ((3, 1), (2, 1), (1, 0, 2, 3))
    assert network.states[0].initializer.kind == "xavier"


# ---- inputs, outputs, losses ----


def test_input_types():
    network = lower_body("y = image |> relu")
    assert network.inputs == ("image", "target")
    assert network.batch == 4
    image, target = (network.values[v] for v in network.inputs)
    assert (image.role, image.type.dtype, image.per_sample) == (Role.INPUT, DType.FP32, True)
    assert (target.type.dtype, target.type.shape) == (DType.INT32, (4,))


def test_several_inputs_outputs_and_losses():
    network = lower_text("""network two(batch = 2) {
      input left[batch, 3, 8, 8] : float
      input right[batch, 5, 8, 8] : float
      input target[batch, 8, 8] : class
      a = (left, right) |> concat |> conv(4, 1)
      b = a |> conv(5, 1)
      output a, b
      loss (a, target) |> softmax_cross_entropy
      loss 0.5 * ((b, right) |> mse) - ((b, right) |> mse) / 4
    }""").network
    assert network.outputs == ("conv0", "conv1")
    assert network.losses == (("softmax_cross_entropy0", 1.0), ("mse0", 0.5), ("mse1", -0.25))


def test_a_loss_counted_twice_is_one_loss():
    network = lower_text("""network twice(batch = 2) {
      input x[batch, 3] : float
      y = x |> linear(3)
      output y
      a = (y, x) |> mse
      loss a + 0.3 * a
    }""").network
    assert network.losses == (("mse0", 1.3),)
    assert network.values["mse0"].type.shape == (1,)


# ---- sections and settings ----


def lower_sections(sections: str, *settings: str) -> Lowered:
    return lower_text(wrap("y = image |> relu", sections), *settings)


def test_defaults_of_sections():
    lowered = lower_sections("")
    assert (lowered.optimizer, lowered.precision, lowered.deterministic) == (Optimizer(), Precision.FP32, False)
    assert lowered.allow_emulated_fp32
    assert (lowered.device_bytes, lowered.host_bytes, lowered.peer_bytes) == (None, None, 0)


def test_sections():
    lowered = lower_sections("""
      train { optimizer = sgd(momentum=0.9, nesterov=true, weight_decay=1e-4) precision = bf16 deterministic = true }
      memory { device = 12 GB  host = 1.5GiB }""")
    assert lowered.optimizer == Optimizer("sgd", momentum=0.9, nesterov=True, weight_decay=1e-4)
    assert (lowered.precision, lowered.deterministic) == (Precision.BF16, True)
    assert (lowered.device_bytes, lowered.host_bytes, lowered.peer_bytes) == (12 * 10**9, 3 << 29, 0)


def test_memory_of_peers():
    assert lower_sections("memory { peers = 40 GB }").peer_bytes == 40 * 10**9
    assert lower_sections("memory { peers = 40 GB }", "memory.peers=0B").peer_bytes == 0


def test_emulated_fp32_can_be_turned_off():
    section = "train { allow_emulated_fp32 = false }"
    assert not lower_sections(section).allow_emulated_fp32
    assert not lower_sections(section, "train.precision=bf16").allow_emulated_fp32  # where it changes nothing
    assert lower_sections(section, "train.allow_emulated_fp32=true").allow_emulated_fp32


def test_synchronised_batch_norm():
    text = "network n() { input x[2, 3, 4, 4] : float  y = x |> bn |> bn(sync=true)  output y  loss (y, x) |> mse }"

    def synchronised(section: str, *settings: str) -> list[bool]:
        operations = lower_text(f"{text} {section}", *settings).network.operations
        return [op.attributes.sync for op in operations if isinstance(op.attributes, BatchNorm)]

    assert synchronised("") == [False, True]
    assert synchronised("train { sync_batch_norm = true }") == [True, True]
    assert synchronised("", "train.sync_batch_norm=true") == [True, True]
    with pytest.raises(MbcError, match="`sync_batch_norm` is true or false"):
        synchronised("train { sync_batch_norm = 2 }")


@pytest.mark.parametrize(("word", "meant"), [("true", True), ("false", False), ("auto", None)])
def test_a_sharded_optimizer(word: str, meant: bool | None):
    assert lower_sections("train { }").shard_optimizer is None
    assert lower_sections(f"train {{ shard_optimizer = {word} }}").shard_optimizer is meant
    other = "false" if meant else "true"
    assert (
        lower_sections(f"train {{ shard_optimizer = {other} }}", f"train.shard_optimizer={word}").shard_optimizer
        is meant
    )
    for wrong in ("2", "1 GB"):
        with pytest.raises(MbcError, match="MBC025: `shard_optimizer` is true, false or auto") as refused:
            lower_sections(f"train {{ shard_optimizer = {wrong} }}")
        assert refused.value.remedy == "write true, false or auto"


def test_adamw():
    lowered = lower_sections("train { optimizer = adamw(beta1=0.8, weight_decay=0) }")
    assert lowered.optimizer == Optimizer("adamw", beta1=0.8, beta2=0.999, eps=1e-8, weight_decay=0.0)
    assert lower_sections("train { optimizer = adamw }").optimizer.weight_decay == 0.01


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7 B", 7),
        ("2kB", 2000),
        ("3 MB", 3 * 10**6),
        ("1 KiB", 1024),
        ("0.5 GiB", 1 << 29),
        ("1 TB", 10**12),
        ("auto", None),
    ],
)
def test_sizes(text: str, size: int | None):
    assert lower_sections(f"memory {{ device = {text} }}").device_bytes == size


def test_settings_override_parameters_and_sections():
    source = wrap("y = image |> conv(width, 1, init=start)", "memory { device = 12 GB }", ", width = 4, start = he")
    lowered = lower_text(
        source,
        "batch=2",
        "width=8",
        "width=2 * 3",
        "start=xavier",
        "memory.device=8GiB",
        "train.precision=fp16",
        "train.optimizer=adamw(eps=1e-6)",
    )
    assert lowered.network.batch == 2
    assert lowered.network.values["conv0"].type.shape == (2, 6, 8, 8)
    assert lowered.device_bytes == 8 << 30
    assert lowered.precision is Precision.FP16
    assert lowered.optimizer.eps == 1e-6
    assert lowered.settings == (("batch", "2"), ("width", "6"), ("start", "xavier"))


@pytest.mark.parametrize(
    "given", ["sgd", "sgd(momentum=0.9, nesterov=true)", "adamw(eps=1e-6)", "lars", "lamb", "none"]
)
def test_an_optimizer_is_written_as_it_is_read(given: str):
    optimizer = lower_sections(f"train {{ optimizer = {given} }}").optimizer
    assert lower_sections(f"train {{ optimizer = {optimizer_text(optimizer)} }}").optimizer == optimizer


def test_a_network_is_chosen_by_name():
    source = wrap("y = image |> relu") + wrap("y = image |> silu").replace("network test", "network other")
    assert kinds(lower_text(source, network="other").network) == ["silu"]


def test_comments_tabs_and_line_ends():
    source = "\ufeff# first\r\n" + wrap("y = image # why\r\n\t|> relu # not").replace("\n", "\r\n")
    assert kinds(lower_text(source).network) == ["relu"]


def test_long_pipes_are_not_deep():
    assert len(kinds(lower_body("y = image" + " |> relu" * 3000))) == 3000


def test_spans_point_at_the_source():
    network = lower_text(wrap("y = image |> relu\n |> conv(4, 3)")).network
    spans = {op.kind: op.span for op in network.operations}
    relu, conv = spans["relu"], spans["convolution"]
    assert relu is not None and conv is not None
    assert (relu.line, relu.column, relu.length) == (5, 16, 4)
    assert (conv.line, conv.column, conv.length) == (6, 5, 4)
    assert all(op.span is not None for op in network.operations)


def test_many_operations_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mbc.frontend.building.MOST_OPERATIONS", 5)
    with pytest.raises(MbcError, match=r"MBC017.*more than 5 operations"):
        lower_body("y = image |> relu |> relu |> relu |> relu |> relu |> relu")


def test_long_source_is_refused():
    with pytest.raises(MbcError, match=r"MBC003.*at most 1000000 are read"):
        lower_text("#" * 1_000_001)
