"""Random numbers of augmentation: distributions, independence of division and of ranks, and the centre in inference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mbc.ir.types import DType, Precision, TensorType
from mbc.ops import KINDS
from mbc.ops.augment import Augment, centre, views
from mbc.ops.base import Array, Call
from mbc.ops.control_record import control_record
from tests.ir.execution import new_control

PLAIN = Augment(
    (40, 36), (32, 28), 0, (), (), True, 0.4, 0.3, 0.2, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), False, "fp32", 7
)  # fmt: skip
ROWS = 20_000


def drawn(a: Augment, step: int = 3, seed: int = (5 << 32) + 11) -> dict[str, Array]:
    drawn = views(a, ROWS, 0, seed, step)
    return {name: np.array([getattr(view, name) for view in drawn]) for name in drawn[0].__slots__}


def test_crops_flips_and_factors_are_uniform() -> None:
    seen = drawn(PLAIN)
    for offsets, choices in ((seen["top"], 9), (seen["left"], 9)):
        counts = np.bincount(offsets, minlength=choices)
        assert len(counts) == choices
        # Chi-squared with 8 degrees of freedom: beyond 26 one in a thousand.
        assert ((counts - ROWS / choices) ** 2 / (ROWS / choices)).sum() < 26
    assert abs(seen["mirrored"].mean() - 0.5) < 4 * 0.5 / np.sqrt(ROWS)
    for name, reach in (("brightness", 0.4), ("contrast", 0.3), ("saturation", 0.2)):
        factor = seen[name]
        assert 1 - reach <= factor.min() < 1 - 0.99 * reach and 1 + 0.99 * reach < factor.max() < 1 + reach
        assert abs(factor.mean() - 1) < 4 * reach / np.sqrt(3 * ROWS)
        assert abs(factor.std() / (reach / np.sqrt(3)) - 1) < 0.02
    # None says anything of another.
    table = np.stack([seen[name].astype(float) for name in seen if name not in ("height", "width")])
    assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < 4 / np.sqrt(ROWS)


def test_padding_lets_crops_reach_beyond_the_image() -> None:
    seen = drawn(replace(PLAIN, pad=4, crop=PLAIN.size))
    assert set(seen["top"]) == set(seen["left"]) == set(range(-4, 5))


def test_scaled_boxes_have_the_areas_and_ratios_asked_for() -> None:
    a = replace(PLAIN, size=(400, 300), scale=(0.08, 0.5), ratio=(3 / 4, 4 / 3))
    seen = drawn(a)
    area, ratio = seen["height"] * seen["width"] / 120_000, seen["width"] / seen["height"]
    assert 0.075 < area.min() < 0.09 and 0.49 < area.max() < 0.51
    assert abs(area.mean() - 0.29) < 4 * 0.42 / np.sqrt(12 * ROWS)
    assert 0.73 < ratio.min() < 0.76 and 1.31 < ratio.max() < 1.37
    assert abs(np.log(ratio).mean()) < 4 * np.log(16 / 9) / np.sqrt(12 * ROWS)
    assert (seen["top"] >= 0).all() and (seen["top"] + seen["height"] <= 400).all()
    assert (seen["left"] >= 0).all() and (seen["left"] + seen["width"] <= 300).all()
    # Where the whole image is asked for in a ratio that it has not, the box is what there is of it.
    whole = drawn(replace(a, scale=(1.0, 1.0), ratio=(2.0, 2.0)))
    assert set(whole["width"]) == {300} and set(whole["height"]) == {245}


def test_draws_depend_on_seed_step_row_and_operation_alone() -> None:
    a = replace(PLAIN, scale=(0.1, 1.0), ratio=(0.75, 1.5))
    whole = views(a, 32, 0, 5, 9)
    assert whole == views(a, 32, 0, 5, 9)
    assert whole[13:20] == views(a, 7, 13, 5, 9)
    for other in (views(a, 32, 0, 6, 9), views(a, 32, 0, 5, 10), views(replace(a, key=8), 32, 0, 5, 9)):
        assert not set(map(repr, other)) & set(map(repr, whole))
    assert len(set(map(repr, whole))) == 32


def evaluated(kind: str, a: Augment, image: Array, first_row: int = 0, rank_row: int = 0) -> Array:
    block = new_control(step=3, seed=11)
    control_record(block)["first_row"] = rank_row
    evaluate = KINDS[kind].evaluate
    assert evaluate is not None
    outputs = (TensorType((len(image), 3, *a.crop), DType.FP32),)
    call = Call(outputs, first_row, 16, Precision.FP32)
    return evaluate(a, (image, block) if kind == "augment" else (image,), call)[0]


def test_slices_and_ranks_give_the_result_of_the_whole_mini_batch() -> None:
    image = np.random.default_rng(0).integers(0, 256, (16, 3, 40, 36), np.uint8)
    whole = evaluated("augment", PLAIN, image)
    np.testing.assert_array_equal(whole[4:9], evaluated("augment", PLAIN, image[4:9], first_row=4))
    np.testing.assert_array_equal(whole[8:], evaluated("augment", PLAIN, image[8:], rank_row=8))
    np.testing.assert_array_equal(whole[10:], evaluated("augment", PLAIN, image[10:], first_row=2, rank_row=8))
    assert whole.dtype == np.float32 and len({row.tobytes() for row in whole}) == 16


def test_both_orders_of_bytes_are_one_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 3, 40, 36), np.uint8)
    last = np.ascontiguousarray(np.moveaxis(image, 1, -1))
    for kind in ("augment", "centre_crop"):
        there = evaluated(kind, replace(PLAIN, channels_last=True), last)
        np.testing.assert_array_equal(there, evaluated(kind, PLAIN, image))


def test_inference_shows_the_centre_as_it_is() -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, 3, 40, 36), np.uint8)
    seen = evaluated("centre_crop", PLAIN, image)
    mean, std = (np.array(x)[:, None, None] for x in (PLAIN.mean, PLAIN.std))
    np.testing.assert_allclose(seen, (image[:, :, 4:36, 4:32] / 255 - mean) / std, rtol=0, atol=1e-6)
    odd = centre(replace(PLAIN, size=(9, 8), crop=(4, 5)))
    assert (odd.top, odd.left, odd.mirrored) == (2, 1, False)


def test_a_view_shows_its_part_of_the_image() -> None:
    a = replace(PLAIN, pad=5, crop=(44, 40), brightness=0.0, contrast=0.0, saturation=0.0)
    a = replace(a, mean=(0.0,) * 3, std=(1.0,) * 3)
    image = np.random.default_rng(0).integers(1, 256, (6, 3, 40, 36), np.uint8)
    augmented = evaluated("augment", a, image)
    for row, view, seen in zip(image, views(a, 6, 0, 11, 3), augmented, strict=True):
        expected = np.zeros((3, 44, 40), np.float32)
        for y in range(44):
            for x in range(40):
                at, across = view.top + y, view.left + (39 - x if view.mirrored else x)
                if 0 <= at < 40 and 0 <= across < 36:
                    expected[:, y, x] = row[:, at, across].astype(np.float32) * np.float32(1 / 255)
        np.testing.assert_array_equal(seen, expected)
