"""M2PO: its mask by hand, the order of removal, and what a split of the call changes."""

import math

import torch

import trustrl
from support.one_row import row
from support.worlds import mapped, run, world
from trustrl import regions
from trustrl.regions.m2po import beyond_moment


def test_m2po_removes_the_largest_outward_log_ratios_until_the_mean_is_at_its_bound():
    behavior = [0.1] * 5
    policy = [0.1 * math.exp(d) for d in (0.1, 0.3, 0.5, -2.0, 0.2)]
    factors, _ = row(regions.M2PO(0.098), policy, behavior, 1.0)  # the mean of (.01, .04, .09, .25) is .0975
    assert [f != 0 for f in factors] == [True, True, True, True, True]
    factors, _ = row(regions.M2PO(0.0467), policy, behavior, 1.0)  # the mean of (.01, .04, .09) is .04667
    assert [f != 0 for f in factors] == [True, True, False, True, True]
    factors, _ = row(regions.M2PO(0.0466), policy, behavior, 1.0)
    assert [f != 0 for f in factors] == [True, False, False, True, True]
    factors, _ = row(regions.M2PO(0.009), policy, behavior, 1.0)  # even the smallest, .01, is too large
    assert [f != 0 for f in factors] == [False, False, False, True, False]  # the fourth is pulled back


def test_a_mean_at_m2pos_bound_is_inside_and_the_first_of_equal_tokens_stays():
    x, among = torch.tensor([0.5, 0.25, 0.5, 9.0], dtype=torch.float64), torch.tensor([True, True, True, False])
    assert beyond_moment(x, among, bound=0.375).tolist() == [False, False, True, False]
    assert beyond_moment(x, among, bound=0.37).tolist() == [True, False, True, False]


def test_m2po_ignores_tokens_outside_the_loss():
    w = world(2, drift=0.4)
    out, _ = run(regions.M2PO(), w)
    changed = w.at_token(w.behavior).clone()
    changed[~w.in_loss] = -30.0
    again, _ = run(regions.M2PO(), w, behavior_logp=changed)
    assert torch.equal(out.decision.keep[w.in_loss], again.decision.keep[w.in_loss])
    assert not out.decision.keep[w.in_loss].all()


def test_a_split_masks_more_and_keeps_the_second_moment_below_its_bound():
    """Each part fulfils the bound, so the whole does; no other mask of the whole fulfils it with fewer tokens."""
    w = world(3, rows=8, width=12, vocabulary=70, drift=0.4)
    rollout, region, reduction = w.rollout("behavior"), regions.M2PO(), trustrl.TokenSum()
    policy = w.policy_tokens(rollout)

    def kept(parts):
        return torch.cat([trustrl.policy_loss(p, r, region, reduction=reduction).decision.keep for p, r in parts])

    def split(size):
        return [[mapped(x, lambda t, a=a: t[a : a + size]) for x in (policy, rollout)] for a in range(0, 8, size)]

    log_ratio = (policy.logp - rollout.behavior_logp).detach().double()
    outward = rollout.in_loss & (rollout.advantage * log_ratio > 0)
    masked = []
    for size in (8, 4, 2, 1):
        keep = kept(split(size))
        assert keep[~outward].all()
        assert log_ratio[outward & keep].square().mean() <= region.max_second_moment
        masked.append(int((~keep).sum()))
    assert 0 < masked[0] < int(outward.sum())
    assert masked == sorted(masked)
    assert masked[0] < masked[-1]
