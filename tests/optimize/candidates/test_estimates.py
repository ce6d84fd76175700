"""Estimates: a similar GPU's times take precedence over the model's, and only admitted kernels are estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from mbc.compiler import compile_plan
from mbc.hardware.spec import DeviceSpec, find_spec
from mbc.ir.types import DType, Precision, TensorType
from mbc.kernels.base import Candidate, Request
from mbc.kernels.cuda import Own
from mbc.kernels.providers import PROVIDERS
from mbc.ops.convolution import Convolution
from mbc.ops.fused import Fused
from mbc.optimize import effort
from mbc.optimize.candidates.estimates import Estimates, RematKernels
from mbc.optimize.candidates.scaled_times import OtherSizes
from mbc.optimize.candidates.user_rules import Rules
from mbc.options import Measure, Options
from mbc.profile.model import LEFT_TO_ESTIMATE, Extent, Profile, scaled_to, unmeasured
from mbc.profile.paths import bundled_path
from mbc.profile.read_profile import read_profile
from mbc.profile.signature import read_signature, signature
from mbc.source import Source
from tests.examples.test_plan_digests import EXAMPLES
from tests.profile.profiles import measurement, profile, request

H100, H200 = find_spec("h100"), find_spec("h200")
ASKED = request(8)
NONE = RematKernels()
MEASURED_US = 1.0  # far less than any estimate


@cache
def similar() -> Profile:
    """Return the profile of an H200 that measured one kernel of ASKED, scaled to an H100."""
    return scaled_to(profile({ASKED: [measurement(1, MEASURED_US)]}), H200, H100)


def estimates(own_profile: Profile | None, rules: Rules | None = None, optimism: float = 0.0) -> Estimates:
    sizes = (
        OtherSizes(own_profile, PROVIDERS, H100, 8, ASKED.precision, rules or Rules())
        if own_profile is not None
        else None
    )
    return Estimates(PROVIDERS, H100, own_profile, sizes, rules or Rules(), ASKED.precision, optimism)


def test_times_of_a_similar_gpu_come_before_the_models() -> None:
    estimated = estimates(unmeasured(similar()))
    (scaled,) = estimated.of_similar_gpu(ASKED, NONE)
    assert not scaled.measured and scaled in estimated.of(ASKED, NONE)
    slower = [c for c in estimated.of(ASKED, NONE) if c is not scaled]
    assert all(c.time_us >= scaled.time_us and c.workspace_bytes < scaled.workspace_bytes for c in slower)
    assert estimated.modelled(ASKED, NONE) == estimates(None).of(ASKED, NONE)
    other = request(16)
    assert estimated.of(other, NONE) == estimated.modelled(other, NONE) != ()


def test_optimism_takes_less_of_the_models_than_of_a_similar_gpus() -> None:
    plain, optimistic = (estimates(unmeasured(similar()), optimism=part) for part in (0.0, effort.OPTIMISM))
    assert effort.OPTIMISM < effort.SCALED_OPTIMISM < 1
    for part, name in ((effort.SCALED_OPTIMISM, "of_similar_gpu"), (effort.OPTIMISM, "modelled")):
        before, after = (getattr(source, name)(ASKED, NONE) for source in (plain, optimistic))
        assert [c.time_us for c in after] == pytest.approx([part * c.time_us for c in before])
        assert all(c.measured for c in after)


def test_kernels_that_failed_do_not_return_from_a_similar_gpu() -> None:
    own = replace(unmeasured(similar()), extents={signature(ASKED): Extent(0, "could not be measured: it failed")})
    assert not estimates(own).of_similar_gpu(ASKED, NONE)
    key = signature(ASKED)
    left = replace(own, extents={key: Extent(0, LEFT_TO_ESTIMATE)}, left_to_estimate=frozenset({key}))
    assert estimates(left).of_similar_gpu(ASKED, NONE)


@pytest.mark.parametrize("rules", [Rules(deterministic=True), Rules(emulated_fp32=False), Rules()])
def test_excluding_kernels_leaves_the_admitted_ones(rules: Rules) -> None:
    """A request with an admitted kernel has an estimate, whatever the rules exclude.

    Many requests in fp32 are checked.
    """
    theirs = scaled_to(read_profile(bundled_path(H200.name)), H200, H100)
    estimated = estimates(unmeasured(theirs), rules)
    asked = [r for r in _fp32(theirs) if not isinstance(r.attributes, Fused)]
    assert len(asked) > 500
    for one in asked:
        assert bool(estimated.modelled(one, NONE)) <= bool(estimated.of(one, NONE)), one


def _fp32(theirs: Profile) -> list[Request]:
    requests = [read_signature(key) for key in theirs.measurements if '"precision":"fp32"' in key]
    return requests[::7]


def test_kernels_by_measurement_have_no_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    every = Own.candidates

    def candidates(self: Own, request: Request, device: DeviceSpec) -> Iterator[Candidate]:
        return (replace(c, by_measurement=c.name == "plane_sweep_conv") for c in every(self, request, device))

    monkeypatch.setattr(Own, "candidates", candidates)
    a = Convolution((16, 16, 16), (3, 3, 3), pad=(1,) * 6)
    image, weight = TensorType((2, 32, 16, 16, 16), DType.BF16), TensorType((32, 32, 3, 3, 3), DType.BF16)
    asked = Request("convolution", a, (image, weight), (image,), Precision.BF16)
    offered = [c for p in PROVIDERS for c in p.candidates(asked, H100)]
    new = next(c for c in offered if c.by_measurement)
    modelled = estimates(None).modelled(asked, NONE)
    assert {c.variant for c in modelled} == {c.variant for c in offered if not c.by_measurement} != set()
    own = profile(
        {
            asked: [
                replace(
                    measurement(1, MEASURED_US), provider=new.provider, name=new.name, settings=(), layouts=new.layouts
                )
            ]
        }
    )
    assert [(c.variant, c.time_us) for c in own.candidates(asked) or ()] == [(new.variant, MEASURED_US)]


def test_deterministic_steps_are_planned_beside_a_similar_gpus_times() -> None:
    settings = (("depth", "18"), ("batch", "32"), ("train.precision", "fp32"), ("train.deterministic", "true"))
    source = Source("resnet.mbc", (EXAMPLES / "resnet.mbc").read_text(encoding="utf-8"))
    plan = compile_plan(source, Options(gpu="h100", settings=settings, measure=Measure.NEVER))
    assert plan.predictions.train_us > 0
