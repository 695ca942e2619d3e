"""Numbers that cancel, at the ends where they do."""

import math

import pytest
import torch

from trustrl.core.numerics import largest_exponent, log1mexp


@pytest.mark.parametrize("x", [1e-15, 1e-12, 1e-6, 0.1, 0.6, 0.7, 1.0, 5.0, 50.0])
def test_log1mexp_keeps_its_digits_at_both_ends(x):
    wanted = math.log(-math.expm1(-x)) if x < math.log(2) else math.log1p(-math.exp(-x))
    assert log1mexp(torch.tensor(-x, dtype=torch.float64)).item() == pytest.approx(wanted, rel=1e-14)


def test_the_largest_exponents_leave_room_for_a_sum_of_a_million_million_squares():
    assert (largest_exponent(torch.float32), largest_exponent(torch.float64)) == (30.0, 300.0)
    assert 2 * 30.0 + math.log(1e12) < math.log(torch.finfo(torch.float32).max)
    assert 2 * 300.0 + math.log(1e12) < math.log(torch.finfo(torch.float64).max)
