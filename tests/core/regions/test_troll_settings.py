"""What TROLL's settings on records do: `tail_mass`, `k` and `rest`, as its page describes them."""

import pytest
import torch

import trustrl
from support.worlds import world
from trustrl import regions

K = 4


def judged(region, columns=K):
    """The region on records with so many columns and much mass left out."""
    w = world(9, rows=4, width=5, vocabulary=50, peak=0.7, drift=0.3)
    w.in_loss.fill_(True)
    rollout = w.rollout("behavior", k=columns)
    logp = torch.log_softmax(w.policy, -1)
    mine = logp.topk(columns, -1)
    policy = trustrl.PolicyTokens(
        logp=w.at_token(logp), topk_logp=logp.gather(-1, rollout.topk.ids), topk=trustrl.TopK(mine.indices, mine.values)
    )
    return trustrl.rates(trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum()).sums)


def test_with_k_columns_the_mass_left_out_is_not_checked_and_with_fewer_it_drops_the_token():
    whole = judged(regions.TROLL(k=K, anchor="behavior"))
    assert whole["trustrl/anchor_tail_mean"] > 0.1
    assert whole["trustrl/dropped_share"] == 0
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most of its tokens: fewer than k ids are recorded"):
        narrow = judged(regions.TROLL(k=K + 1, anchor="behavior"))
    assert narrow["trustrl/dropped_share"] == 1
    assert narrow["trustrl/fault_narrow"] == 20
    assert judged(regions.TROLL(k=K + 1, anchor="behavior", tail_mass=0.999))["trustrl/dropped_share"] == 0


def test_a_tail_mass_of_0_refuses_a_record_with_fewer_than_k_columns():
    with pytest.raises(trustrl.errors.RecordError, match="at least k = 5 columns wide, got 4"):
        judged(regions.TROLL(k=K + 1, anchor="behavior", tail_mass=0.0))


def test_the_fill_has_no_cell_for_the_rest_and_the_bucket_has():
    fill = judged(regions.TROLL(k=K, anchor="behavior", rest="fill"))
    assert (fill["trustrl/anchor_tail_mean"], fill["trustrl/policy_tail_mean"]) == (0, 0)
    bucket = judged(regions.TROLL(k=K, anchor="behavior"))
    assert min(bucket["trustrl/anchor_tail_mean"], bucket["trustrl/policy_tail_mean"]) > 0.1
