"""`trustrl conformance` on verl's own losses: it calls them as verl does, and finds what is known of them."""

import pytest

pytest.importorskip("verl")

from trustrl.tools.conformance import bounds
from trustrl.tools.conformance.adapters import adapted, detected, find
from trustrl.tools.conformance.corpus import run

LOSS = "verl.trainer.ppo.core_algos:compute_policy_loss_"


def results(name, kind, **settings):
    return {result.case: result for result in run(adapted(find(LOSS + name), settings=settings), kind)}


def test_verls_losses_are_known_by_their_parameters():
    assert {detected(find(LOSS + name)) for name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "cispo")} == {"verl"}


@pytest.mark.parametrize(
    ("name", "kind"), [("vanilla", "ppo"), ("dppo_tv", "dppo"), ("dppo_kl", "dppo"), ("gpg", "pg")]
)
def test_their_truth_tables_hold(name, kind):
    cells = [result for case, result in results(name, kind).items() if "→ π" in case]
    assert len(cells) == 10
    assert all(result.verdict == "passes" for result in cells)


def test_a_bound_is_measured_in_nats_as_it_was_set():
    found = bounds.bound(adapted(find(LOSS + "dppo_kl"), settings={"clip_ratio_high": 0.05}), 1.0)
    assert found.unit == "nats"
    assert found.value == pytest.approx(0.05, rel=1e-3)


def test_verls_default_cap_and_bound_are_not_dppos():
    found = results("dppo_kl", "dppo")
    assert found["bounds with these settings"].verdict == "differs"
    assert found["cap on weights with these settings"].got == "weight 3"
    chosen = results("dppo_kl", "dppo", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0)
    assert chosen["bounds with these settings"].verdict == "passes"
    assert chosen["cap on weights with these settings"].verdict == "passes"


def test_verls_clip_ratio_alone_changes_nothing():
    """Its two sides have defaults of their own, and they win."""
    found = bounds.bound(adapted(find(LOSS + "dppo_kl"), settings={"clip_ratio": 0.05}), 1.0)
    assert found.value == pytest.approx(0.2, rel=1e-3)


def test_the_mean_of_gmpo_is_the_micro_batchs_own():
    found = results("geo_mean", "any")["a batch in two micro-batches"]
    assert (found.verdict, found.got) == ("fails", "only when each part is weighted by its rows")
    assert results("vanilla", "ppo")["a batch in two micro-batches"].verdict == "passes"
