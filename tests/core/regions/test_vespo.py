"""VESPO: its weight by hand, and far from the anchor."""

import math

import pytest

import trustrl
from support.one_row import row
from trustrl import regions


@pytest.mark.parametrize(("advantage", "power", "decay"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_vespo_weighs_by_the_product_of_ratios(advantage, power, decay):
    w = (0.5 / 0.4) * (0.2 / 0.3)
    factors, out = row(regions.VESPO(), [0.5, 0.2], [0.4, 0.3], advantage)
    assert factors == pytest.approx([w**power * math.exp(decay * (1 - w))] * 2)
    assert out.decision.keep.all()


def test_vespo_is_1_on_policy_and_0_far_from_it():
    assert row(regions.VESPO(), [0.5, 0.2], [0.5, 0.2], 1.0)[0] == pytest.approx([1.0, 1.0])
    for policy, behavior in (([0.9] * 400, [0.01] * 400), ([0.01] * 400, [0.9] * 400)):  # w = e^±1800
        factors, out = row(regions.VESPO(), policy, behavior, -1.0)
        assert factors == [0.0] * 400
        assert trustrl.rates(out.sums)["trustrl/dropped_share"] == 0.0
