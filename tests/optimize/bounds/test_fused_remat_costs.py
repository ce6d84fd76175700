"""The lower bound on the time of fused rematerialization does not exceed the best choice for invented times."""

from __future__ import annotations

from mbc.optimize.bounds.fused_remat_costs import FusedRematCosts, JointRemat

APART_US = 40.0


def test_one_value_that_shares_a_launch_with_either_of_two():
    """`wide` shares a launch with one ReLU for 8, and the other ReLU takes 5.

    With the other ReLU `wide` would take 20.
    """
    costs = FusedRematCosts(
        {"wide": {"sums1": 20.0, "sums2": 8.0}, "relu1": {"sums1": 5.0}, "relu2": {"sums2": 5.0}},
        (JointRemat("wide", "relu1", "sums1", 20.0), JointRemat("wide", "relu2", "sums2", 8.0)),
    )
    assert not costs.pairs
    all_us = sum(costs.recompute_us((value,), APART_US) for value in ("wide", "relu1", "relu2"))
    assert all_us == 8 + 5  # the second relu along with the convolution


def test_two_values_that_share_one_launch():
    joint = JointRemat("wide", "relu", "sums", 20.0)
    costs = FusedRematCosts({"wide": {"sums": 12.0}, "relu": {"sums": 5.0}}, (joint,))
    assert costs.pairs == (joint,)
    assert costs.pair_us(joint, APART_US, APART_US) == (12, 5, 20)
    assert costs.pair_us(joint, 14.0, APART_US) == (12, 5, 14 + 5)
    assert costs.pair_us(joint, APART_US, 6.0) == (12, 5, 12 + 6)


def test_the_first_value_in_the_reductions_of_others():
    joint = JointRemat("wide", "relu", "sums", 20.0)
    costs = FusedRematCosts({"wide": {"sums": 12.0, "others": 13.0}, "relu": {"sums": 5.0}}, (joint,))
    assert costs.pair_us(joint, APART_US, APART_US) == (12, 5, 13 + 5)
