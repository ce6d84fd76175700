"""Names of PyTorch are answered with their counterparts in mbc, all of which exist."""

from __future__ import annotations

import re

import pytest

from mbc.cli.arguments import parser
from mbc.errors import MbcError
from mbc.frontend.lower import lower
from mbc.frontend.near import nearest, suggest
from mbc.frontend.parse import parse, parse_setting
from mbc.frontend.pytorch import ROWS, Answer, Place, answer
from mbc.frontend.sections import OPTIMIZERS
from mbc.ir.types import Precision
from mbc.ops import LAYERS
from mbc.source import Source

NAMES = [(place, name, equivalent) for place, names, equivalent in ROWS for name in names]
SETTINGS = {p.name for layer in LAYERS.values() for p in layer.parameters} | {
    p.name for parameters in OPTIMIZERS.values() for p in parameters
}
WORDS = {word for layer in LAYERS.values() for p in layer.parameters for word in p.words} | {"true", "false"}


def compiled(stage: str = "relu", target: str = "class", loss: str = "softmax_cross_entropy", train: str = "") -> None:
    last = " |> log_softmax" if loss == "nll" or "logits=false" in loss else ""
    shape = "batch" if target == "class" else "batch, 3"
    text = f"""network n(batch = 4) {{
      input image[batch, 10, 8, 8] : float
      input other[batch, 10, 8, 8] : float
      input t[{shape}] : {target}
      a = (image, other) |> add
      y = {"(image, other)" if stage == "concat" else "a"} |> {stage} |> flatten |> linear(3){last}
      z = a |> flatten |> linear(3)
      output z
      loss (y, t) |> {loss}
    }}
    train {{ {train} }}"""
    lower(parse(Source("n.mbc", text)))


def refusal(**parts: str) -> MbcError:
    with pytest.raises(MbcError) as caught:
        compiled(**parts)
    return caught.value


@pytest.mark.parametrize(
    ("place", "name", "equivalent"), NAMES, ids=[f"{place.value} {name}" for place, name, _ in NAMES]
)
def test_each_name_is_answered_where_it_is_written(place: Place, name: str, equivalent: Answer):
    match place:
        case Place.OPERATION:
            error = refusal(stage=f"{name}(3)")
            assert error.message == f"there is no operation or block `{name}`"
            assert refusal(stage=f"nn.{name}").remedy == refusal(stage=f"nn.{name}(3)").remedy == equivalent.remedy
        case Place.LOSS:
            error = refusal(loss=name)
            assert error.message == f"there is no loss `{name}`"
            assert refusal(stage=name).remedy == equivalent.remedy
        case Place.SETTING:
            owners = [x for x in LAYERS.values() if equivalent.equivalent in {p.name for p in x.parameters}]
            operation = owners[0].name if owners else "conv"
            if equivalent.equivalent and not owners:
                error = refusal(train=f"optimizer = adamw({name}=1)")
            else:
                error = refusal(stage=f"{operation}({name}=nothing)")
            assert error.code == "MBC007" and f"has no setting `{name}`" in error.message
        case Place.OPTIMIZER:
            error = refusal(train=f"optimizer = {name}(lr=1)")
            assert error.message == f"there is no optimizer `{name}`"
        case Place.PRECISION:
            error = refusal(train=f"precision = {name}")
            assert error.message == f"`{name}` is not a precision"
        case Place.ENTRY:
            error = refusal(train=f"{name} = 1")
            assert error.message == f"section `train` has no `{name}`"
        case Place.VALUE:
            error = refusal(stage=f"conv(3, 3, init={name})")
            assert error.message == f"`init` cannot be `{name}`"
    assert error.remedy == equivalent.remedy


@pytest.mark.parametrize(
    ("place", "name", "equivalent"), NAMES, ids=[f"{place.value} {name}" for place, name, _ in NAMES]
)
def test_names_in_answers_exist(place: Place, name: str, equivalent: Answer):
    for code in re.findall("`([^`]+)`", equivalent.note):
        if code in ("|>", "block", "batch", "train { precision = bf16 }"):
            continue  # of the language
        assert parse_setting(Source("note", re.sub(r"^\w+=", "", code))), code
        words = set(re.findall(r"[a-z]\w+", code))
        assert words and words <= {*LAYERS, *SETTINGS, *OPTIMIZERS, *WORDS, *map(str, Precision)}, code
    if not equivalent.equivalent:
        assert equivalent.note, "what would do instead"
        return
    match place:
        case Place.OPERATION:
            compiled(stage=equivalent.equivalent)
        case Place.LOSS:
            compiled(
                loss=equivalent.equivalent,
                target="class" if equivalent.equivalent.startswith(("soft", "nll", "dice", "tv", "foc")) else "float",
            )
        case Place.SETTING:
            assert equivalent.equivalent in SETTINGS
        case Place.OPTIMIZER:
            compiled(train=f"optimizer = {equivalent.equivalent}")
        case Place.PRECISION:
            compiled(train=f"precision = {equivalent.equivalent}")
        case Place.ENTRY:
            if not equivalent.equivalent.startswith("--"):
                compiled(train=equivalent.equivalent)
                return
            option, _, value = equivalent.equivalent.partition(" ")
            value = value or {"--lr": "0.1", "--schedule": "cosine"}.get(option, "3")
            parser().parse_args(["train", "n.mbc", "--data", "d", option, value])
        case Place.VALUE:
            assert equivalent.equivalent in WORDS


def test_classes_that_are_called_like_a_layer_are_answered_without_a_row():
    for name in ("ReLU6", "Hardswish", "Softplus", "GELU", "Dropout", "LogSigmoid", "Mish"):
        layer = name.lower()
        assert refusal(stage=f"nn.{name}").remedy == Answer(layer).remedy and layer in LAYERS, name
    assert answer("Threshold", Place.OPERATION) == Answer("threshold(0.1, 0)")  # whose settings have no defaults


def test_no_name_is_answered_twice_or_hides_one_of_mbc():
    places = [(place, name) for place, name, _ in NAMES]
    assert len(places) == len(set(places))
    assert not {name for place, name in places if place in (Place.OPERATION, Place.LOSS)} & LAYERS.keys()
    for place, name, equivalent in NAMES:
        assert answer(name, place) == equivalent, (place, name)


def test_settings_of_blocks_are_their_own():
    text = "block b(padded = 1) on x { return x |> relu }\nnetwork n { input x[4] : float y = x |> b(padding=3) }"
    with pytest.raises(MbcError) as caught:
        lower(parse(Source("n.mbc", text)))
    assert caught.value.remedy == "did you mean `padded`?"


@pytest.mark.parametrize(
    ("parts", "remedy"),
    [
        ({"stage": "tahn"}, "did you mean `tanh`?"),
        ({"stage": "conv(3, 3, init=xavir)"}, "did you mean `xavier`?"),
        ({"stage": "conv(3, 3, bias=flase)"}, "did you mean `false`?"),
        ({"stage": "conv(btach, 3)"}, "did you mean `batch`?"),
        ({"loss": "meen_square"}, "the losses are: binary_cross_entropy, dice, focal, inner_product, kl_divergence,"),
        ({"loss": "softmax_entropy"}, "did you mean `softmax_cross_entropy`?"),
        ({"train": "optimizer = sdg"}, "did you mean `sgd`?"),
        ({"train": "optimizer = sgd(momentm=1)"}, "did you mean `momentum`?"),
        ({"train": "precision = bf61"}, "did you mean `bf16`?"),
        ({"stage": "image.reluu()"}, "there are no methods: tensors are piped into operations by `|>`, such as"),
    ],
)
def test_suggestions_fit_their_place(parts: dict[str, str], remedy: str):
    assert refusal(**parts).remedy.startswith(remedy)


def test_far_words_have_no_near_one():
    assert nearest("zzz", ["relu"]) is None
    assert suggest("zzz", [], "losses") == "there are no losses here"
