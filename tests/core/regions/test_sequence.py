"""Sums, maxima, prefixes and quantiles per sequence, against plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from support.worlds import tokens_of_sequences
from trustrl import RolloutTokens
from trustrl.core.sequences import (
    prefix_sum,
    sequence_length,
    sequence_max,
    sequence_mean,
    sequence_quantile,
    sequences_of,
)
from trustrl.regions.cppo import overspent


@st.composite
def packed(draw):
    """Interleaved sequences with arbitrary ids, some tokens not counted."""
    n = draw(st.integers(1, 40))
    ids = draw(st.lists(st.sampled_from([7, -3, 10**12, 0]), min_size=n, max_size=n))
    x = draw(st.lists(st.floats(0, 3, width=32), min_size=n, max_size=n))
    counted = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return torch.tensor(ids), torch.tensor(x, dtype=torch.float64), torch.tensor(counted)


def group(ids):
    record = RolloutTokens(
        behavior_logp=torch.zeros(len(ids)), advantage=torch.zeros(len(ids)),
        in_loss=torch.ones(len(ids), dtype=torch.bool), sequence_ids=ids,
    )  # fmt: skip
    return sequences_of(record)


@settings(max_examples=300, deadline=None)
@given(packed())
def test_packed_statistics_equal_plain_loops(case):
    ids, x, counted = case
    sequences = group(ids)
    lengths = sequence_length(counted, sequences, x)[sequences.of_token].tolist()
    means, largest = (f(x, counted, sequences).tolist() for f in (sequence_mean, sequence_max))
    sums, quantiles = (
        prefix_sum(x, counted, sequences).tolist(),
        sequence_quantile(x, counted, sequences, share=0.9).tolist(),
    )
    ids, x, counted = ids.tolist(), x.tolist(), counted.tolist()
    for t in range(len(ids)):
        mine = [i for i in range(len(ids)) if ids[i] == ids[t] and counted[i]]
        values = [x[i] for i in mine]
        before = [x[i] for i in mine if i < t]
        assert lengths[t] == len(mine)
        assert means[t] == pytest.approx(np.mean(values) if mine else 0.0)
        assert largest[t] == (max(values) if mine else 0.0)
        assert sums[t] == pytest.approx(sum(before), abs=1e-12)
        want = np.quantile(values, 0.9) if mine else 0.0
        assert quantiles[t] == pytest.approx(want, abs=1e-12)


def test_an_infinite_divergence_stays_in_its_own_sequence():
    """A running sum over the whole batch would hand inf − inf = NaN to every later sequence."""
    d = torch.tensor([0.01, torch.inf, 0.01, 0.01, 0.01], dtype=torch.float64)
    tokens = tokens_of_sequences(0, 0, 0, 1, 1)
    stop = overspent(tokens, d, tokens.usable, bound=0.15, rate=0.02, last_weight=0.8)
    assert stop.tolist() == [False, True, True, False, False]


def test_prefix_sums_stay_exact_over_a_million_tokens():
    """Running sums differ by tiny amounts late in a long batch; float32 would have lost them."""
    n = 1_000_000
    x = torch.full((n,), 1e-3, dtype=torch.float64)
    ids = torch.arange(n) // 100
    found = prefix_sum(x, torch.ones(n, dtype=torch.bool), group(ids))
    torch.testing.assert_close(
        found[-100:], torch.arange(100, dtype=torch.float64) * 1e-3, rtol=0, atol=1e-11
    )  # 100 roundings of a sum near 1,000
