"""The entries of the train section that name parameters."""

from __future__ import annotations

from mbc.ir.graph import Optimizer, ParameterGroup
from tests.frontend.reading import lower_text, wrap


def rule(section: str, *settings: str) -> Optimizer:
    return lower_text(wrap("y = image |> conv(4, 3) @stem |> bn", f"train {{ {section} }}"), *settings).optimizer


def test_groups_and_their_order():
    optimizer = rule('groups = (group("head.*", rate=10), group("*.bias", weight_decay=0))')
    assert optimizer.groups == (ParameterGroup("head.*", 10.0), ParameterGroup("*.bias", None, 0.0))
    assert rule('groups = group("stem.weight", rate=1 / 2)').groups == (ParameterGroup("stem.weight", 0.5),)


def test_the_order_of_entries_does_not_matter():
    entries = ["optimizer = adamw(weight_decay=0.1)", "no_decay = norm_and_bias", 'groups = group("head.*", rate=2)']
    assert rule("\n".join(entries)) == rule("\n".join(reversed(entries)))


def test_the_command_line_replaces_them():
    given = 'no_decay = norm_and_bias groups = group("head.*", rate=2)'
    optimizer = rule(given, "train.no_decay=none", 'train.groups=group("stem.*", rate=3)')
    assert rule(given, "train.groups=none").groups == ()
    assert (optimizer.no_decay, optimizer.groups) == ("", (ParameterGroup("stem.*", 3.0),))
    assert rule(given).no_decay == "norm_and_bias"


def test_frozen_parameters():
    assert rule('frozen = "stem.*"').frozen == ("stem.*",)
    assert rule('frozen = ("stem.weight", "bn*")').frozen == ("stem.weight", "bn*")
    assert rule('frozen = "stem.*"', "train.frozen=none").frozen == ()
    assert rule("", 'train.frozen="head.*"').frozen == ("head.*",)


def test_limits_of_gradients():
    optimizer = rule("clip_norm = 1 clip_value = 1 / 2")
    assert (optimizer.clip_norm, optimizer.clip_value) == (1.0, 0.5)
    assert rule("clip_norm = 1", "train.clip_norm=none").clip_norm == 0
    assert rule("").clip_norm == rule("").clip_value == 0


def test_the_decay_of_moving_averages():
    assert rule("ema = 1 - 1 / 10000").ema == 0.9999
    assert rule("ema = 0.9", "train.ema=none").ema == rule("").ema == 0


def test_how_many_mini_batches_a_step_takes():
    assert rule("accumulate = 2 * 2").accumulate == 4
    assert rule("accumulate = 4", "train.accumulate=1") == rule("")
    assert rule("noise_scale = true").noise_scale and rule("noise_scale = false") == rule("")


def test_text_may_contain_special_characters():
    assert rule('groups = (group("*", rate=2), group("[!{}#]*", rate=2))').groups[1].pattern == "[!{}#]*"
