"""The oracle's own anchors: without them a mistake shared by oracle and library would pass every test."""

import numpy as np
import pytest
import scipy
import torch

from support import oracle


def dirichlet(seed, size, concentration=0.5):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(size, concentration)), rng.dirichlet(np.full(size, concentration))


@pytest.mark.parametrize("seed", range(5))
def test_kl_agrees_with_scipy_and_torch(seed):
    b, p = dirichlet(seed, 30)
    assert oracle.kl(b, p) == pytest.approx(scipy.stats.entropy(b, p), rel=1e-10)
    categorical = [torch.distributions.Categorical(probs=torch.tensor(x)) for x in (b, p)]
    assert oracle.kl(b, p) == pytest.approx(torch.distributions.kl_divergence(*categorical).item(), rel=1e-6)


def test_tv_is_the_largest_difference_of_an_events_probability():
    b, p = dirichlet(3, 12)
    events = [[(i >> j) & 1 for j in range(12)] for i in range(2**12)]
    assert oracle.tv(b, p) == pytest.approx(np.abs(np.array(events) @ (b - p)).max(), rel=1e-12)


def test_the_projection_agrees_with_a_constrained_optimiser():
    """scipy's SLSQP knows nothing of exponential families."""
    rng = np.random.default_rng(0)
    b, p = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    found = scipy.optimize.minimize(
        lambda q: float(np.sum(q * np.log(q / p))),
        b,
        bounds=[(1e-9, 1)] * 6,
        constraints=[
            {"type": "eq", "fun": lambda q: q.sum() - 1},
            {"type": "ineq", "fun": lambda q: 0.05 - np.sum(q * np.log(q / b))},
        ],
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    np.testing.assert_allclose(np.exp(oracle.troll_projection(np.log(p), np.log(b), 0.05)), found.x, atol=2e-5)
