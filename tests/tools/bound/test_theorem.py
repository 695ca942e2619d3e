"""The improvement bound, against an enumeration of every sequence that imports nothing of trustrl."""

import math

import bound_pairs as exact
import numpy as np
import pytest
import torch

from trustrl.core.divergences import tv_limit
from trustrl.tools.bound.theorem import largest_max_tv, largest_sum_tv, max_form, sum_form

PER_KIND = 200


@pytest.fixture(scope="module")
def pairs():
    return list(exact.kinds(PER_KIND, seed=1))


def test_the_bound_holds_for_every_pair_and_is_positive_for_many():
    found = exact.counted(PER_KIND, seed=1)
    assert found["pairs"] >= 10_000
    assert found["positive"] >= 1_000
    broken = {name: num for name, num in found.items() if name.startswith(("violated", "identity"))}
    assert len(broken) == 7
    assert set(broken.values()) == {0}


def test_a_tenth_of_the_penalty_and_exchanged_policies_break_it():
    found = exact.counted(PER_KIND, seed=1)
    assert found["control: penalty x 0.1"] > 100
    assert found["control: exchanged"] > 1_000


def test_a_sampler_that_cuts_words_breaks_the_max_form_alone():
    found = exact.counted(PER_KIND, 1, ("cut",))
    assert found["violated: max form"] > 50
    assert found["violated: sum form"] == 0


def test_a_cut_sampler_by_hand():
    """μ always says 0, and π says 1 once in a hundred; only 0 0 0 is without a penalty."""
    far = 0.01
    one = np.array([[[1.0, 0.0]]]), np.array([[[1 - far, far]]])
    pairs = exact.Pairs(*([np.repeat(p, 2**t, axis=1) for t in range(3)] for p in one))
    reward = -np.ones((1, 8))
    reward[0, 0] = 0.0
    found = exact.measured(pairs, reward)
    assert found.change[0] == pytest.approx((1 - far) ** 3 - 1)
    assert found.surrogate[0] == 0
    assert found.change[0] < -max_form(1.0, 3, found.max_tv[0])
    assert found.change[0] > -sum_form(1.0, found.sum_tv[0])


def test_the_tool_has_the_penalties_of_the_enumeration(pairs):
    for horizon, found, _ in pairs:
        by_max, by_sum = exact.penalties(found, horizon, found.xi)
        tool = [max_form(xi, horizon, tv) for xi, tv in zip(found.xi.tolist(), found.max_tv.tolist(), strict=True)]
        np.testing.assert_allclose(tool, by_max, rtol=1e-14)
        tool = [sum_form(xi, tv) for xi, tv in zip(found.xi.tolist(), found.sum_tv.tolist(), strict=True)]
        np.testing.assert_allclose(tool, by_sum, rtol=1e-14)


def test_below_the_largest_tv_the_bound_is_positive_and_above_it_is_not(pairs):
    inner = 0
    for horizon, found, _ in pairs:
        for surrogate, xi in zip(found.surrogate.tolist(), found.xi.tolist(), strict=True):
            largest = largest_max_tv(surrogate, xi, horizon)
            of_sum = largest_sum_tv(surrogate, xi)
            if surrogate <= 0:
                assert largest is of_sum is None
                continue
            assert surrogate > sum_form(xi, 0.999 * of_sum)
            assert surrogate < sum_form(xi, 1.001 * of_sum)
            assert surrogate > max_form(xi, horizon, 0.999 * largest)
            if largest < 1:
                inner += 1
                assert surrogate < max_form(xi, horizon, 1.001 * largest)
    assert inner > 1_000


def test_one_token_has_no_later_ones_to_err_about():
    assert max_form(1.0, 1, 0.9) == 0
    assert largest_max_tv(0.1, 1.0, 1) == 1.0
    assert largest_max_tv(math.nan, 1.0, 3) is None


def test_the_largest_tv_ends_at_1_and_begins_above_0():
    assert max_form(0.25, 2, 1.0) == 1.0
    assert largest_max_tv(0.81, 0.25, 2) == pytest.approx(0.9)
    assert largest_max_tv(1.01, 0.25, 2) == 1.0
    assert largest_max_tv(0.0, 1.0, 3) is None
    assert largest_sum_tv(0.0, 1.0) is None


def test_a_kl_limits_the_tv_of_every_pair(pairs):
    for _, found, exchanged in pairs:
        for kl in (found.max_kl, exchanged.max_kl):
            assert (found.max_tv <= tv_limit(torch.tensor(kl)).numpy() * (1 + 1e-12)).all()


def test_the_limit_is_pinskers_for_small_kls_and_never_above_1():
    kl = torch.tensor([0.0, 0.05, 1.5, 1.7, 20.0, math.inf], dtype=torch.float64)
    assert tv_limit(kl).tolist() == pytest.approx(
        [0.0, math.sqrt(0.025), math.sqrt(0.75), math.sqrt(1 - math.exp(-1.7)), math.sqrt(1 - math.exp(-20)), 1.0]
    )


def test_the_limit_is_nearly_reached_by_two_words():
    for far in (0.01, 0.1, 0.3):
        kl = 0.5 * math.log(0.5 / (0.5 + far)) + 0.5 * math.log(0.5 / (0.5 - far))
        limit = float(tv_limit(torch.tensor(kl, dtype=torch.float64)))
        assert far <= limit < 1.12 * far
