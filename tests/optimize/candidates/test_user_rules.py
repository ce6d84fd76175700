"""The kernels that a plan may use: emulated fp32 only if it is allowed, and providers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from mbc.compiler import compile_plan
from mbc.errors import MbcError
from mbc.ir.types import Precision
from mbc.kernels.base import Candidate
from mbc.kernels.cuda import KERNELS, emulates_fp32
from mbc.optimize.candidates.user_rules import Rules, provider_options
from mbc.options import OWN_FIRST, UNLIMITED_BYTES, Options, Policy
from mbc.plan.file import dump_plan
from mbc.plan.model import Kernel, Plan
from mbc.plan.summary import emulated_share, summarise
from mbc.report.show import plan_text
from mbc.source import Source

NETWORK = Source(
    "n.mbc",
    """
    network n(batch = 64) {
      input x[batch, 64, 28, 28] : float
      input t[batch] : class
      y = x |> conv(128, 3, pad=1) |> relu |> conv(128, 1) |> relu |> maxpool(2) |> flatten |> linear(512) |> linear(10)
      output y
      loss (y, t) |> softmax_cross_entropy
    }
    """,
)


@cache
def planned(*settings: tuple[str, str], providers: tuple[str, ...] = (), limit_bytes: int = UNLIMITED_BYTES) -> Plan:
    named = tuple((f"train.{name}", value) for name, value in settings)
    return compile_plan(NETWORK, Options("h200", named, providers=providers, workspace_limit_bytes=limit_bytes))


def emulated(plan: Plan) -> set[str]:
    works = [launch.work for program in (plan.train, plan.infer) for launch in program.launches]
    precision = plan.graph.precision
    return {w.name for w in works if isinstance(w, Kernel) and emulates_fp32(w.provider, w.name, precision)}


def test_kernels_of_emulated_fp32_are_those_of_its_folder_and_of_first_layers():
    named = ("fp32_emulated/", "conv/stem_conv_fp32.cu", "conv/stem_conv_filter_fp32.cu")
    assert {k.name for k in KERNELS.values() if k.emulates_fp32} == {
        k.name for k in KERNELS.values() if k.file.startswith(named)
    }
    assert not emulates_fp32("cudnn", "fp32_emulated_conv")


def test_a_first_layer_is_emulated_in_fp32_and_not_in_tf32():
    name = "stem_conv_fp32"
    assert emulates_fp32("mbc", name) and not emulates_fp32("mbc", name, Precision.TF32)
    candidate = Candidate("mbc", name, (), (), 0, 1.0, False)
    strict = Rules(emulated_fp32=False)
    assert strict.admit(candidate, Precision.TF32) and not strict.admit(candidate, Precision.FP32)
    assert Rules().admit(candidate, Precision.FP32)


def _text(plan: Plan) -> str:
    """Return the plan's text without its settings."""
    return dump_plan(replace(plan, settings=()))


def test_emulated_fp32_is_used_unless_it_is_not_allowed():
    allowed = planned()
    assert len(emulated(allowed)) > 1
    assert _text(planned(("allow_emulated_fp32", "true"))) == _text(allowed)
    strict = planned(("allow_emulated_fp32", "false"))
    assert emulated(strict) == set()
    assert strict.predictions.train_us > allowed.predictions.train_us


def test_mbc_alone_has_kernels_that_do_not_emulate():
    settings = ("allow_emulated_fp32", "false")
    assert emulated(planned(providers=("mbc",))) and not emulated(planned(settings, providers=("mbc",)))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_other_precisions_emulate_nothing_and_take_the_entry(precision: str):
    setting = ("precision", precision)
    plan = planned(setting)
    assert emulated(plan) == set()
    assert _text(planned(setting, ("allow_emulated_fp32", "false"))) == _text(plan)


def test_show_says_which_operations_are_emulated():
    plan = planned()
    count, products = emulated_share(plan, plan.train)
    named = [s for s in summarise(plan, plan.train) if s.emulated_fp32]
    assert 0 < count == len(named) <= products == 11  # the gradient of the first image is not computed
    text = plan_text(plan, width=200)
    assert re.search(rf"^emulated fp32 +{count} of 11  convolutions and linear layers of the step", text, re.MULTILINE)
    assert len(re.findall(r"  mbc/\S+ \*  ", text)) == count
    strict = plan_text(planned(("allow_emulated_fp32", "false")), width=200)
    assert "\nemulated fp32" not in strict


def test_the_limit_that_excluded_kernels_is_named():
    with pytest.raises(MbcError, match="MBC201") as refused:
        planned(("allow_emulated_fp32", "false"), providers=("cudnn", "mbc"), limit_bytes=1)
    wanted = "policy power_of_two, allow_emulated_fp32 = false, --provider cudnn --provider mbc"
    assert wanted in refused.value.message


def test_providers_are_said_as_the_command_line_takes_them():
    assert provider_options(("cudnn", "mbc")) == "--provider cudnn --provider mbc"
    assert Rules(Policy.ALL, True).excluding() == ["policy all", "deterministic = true"]


def test_own_kernels_first_where_they_run_on_tensor_cores():
    def candidate(provider: str, name: str) -> Candidate:
        return Candidate(provider, name, (), (), 0, 1.0, True)

    library, posing, direct = (
        candidate("cudnn", "engine"),
        candidate("mbc", "implicit_gemm"),
        candidate("mbc", "convolution"),
    )
    rules = Rules(providers=(OWN_FIRST,))
    assert rules.admitted([library, posing, direct], Precision.BF16) == (posing,)
    assert rules.admitted([library, direct], Precision.BF16) == (library, direct)
    assert Rules().admitted([library, posing], Precision.BF16) == (library, posing)
    only = Rules(providers=("mbc", OWN_FIRST))
    assert only.admitted([library, direct], Precision.BF16) == (direct,)
    assert rules.allow("cudnn") and not only.allow("cudnn") and only.allow("mbc")
