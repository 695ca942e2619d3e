"""The corpus on losses whose mistakes are known: each is found, and nothing else is."""

import math

import pytest

import trustrl
from support import losses_under_test as losses
from trustrl.tools.conformance import bounds
from trustrl.tools.conformance.adapters import ADAPTERS, adapted, detected, find
from trustrl.tools.conformance.corpus import EXPECTATIONS, run, text


def verdicts(loss, kind="any", adapter=None, **settings):
    return {result.case: result for result in run(adapted(loss, adapter, settings), kind)}


def names(found, verdict):
    return [case for case, result in found.items() if result.verdict == verdict]


ON_SAMPLED_TOKENS = [
    name for name in trustrl.presets() if not (trustrl.preset(name).needs().topk or trustrl.preset(name).needs().full)
]
KIND = {"ppo": "ppo", "pg-is": "pg", "dppo-binary-tv": "dppo", "dppo-binary-kl": "dppo"}


@pytest.mark.parametrize("name", ON_SAMPLED_TOKENS)
def test_our_own_losses_pass_everything(name):
    found = verdicts(trustrl.policy_loss, KIND.get(name, "any"), region=name)
    assert names(found, "fails") == []
    assert names(found, "differs") == []
    assert len(names(found, "passes")) >= 25


def test_a_loss_written_out_by_hand_passes_everything():
    found = verdicts(losses.dppo, "dppo")
    assert names(found, "fails") == []
    assert names(found, "differs") == []


def test_a_ratio_formed_before_the_mask_poisons_the_gradient():
    """exp first, mask later: the textbook's clip as most people write it."""
    found = verdicts(losses.ppo_terms, "ppo")
    failed = names(found, "fails")
    assert "log π outside the loss may be NaN, inf or -inf" in failed
    assert "a ratio of e²⁰⁰ outside the loss" in failed
    assert "a token with ratio e¹⁰⁰" in failed
    assert not any("μ 0." in case for case in failed)  # its truth table is PPO's
    assert found["log μ is a constant"].verdict == "differs"


def test_the_wrong_sign_is_found_on_policy_and_in_every_kept_cell():
    failed = names(verdicts(losses.wrong_sign, "dppo"), "fails")
    assert "on-policy, π = μ" in failed
    assert "a batch in two micro-batches" not in failed


def test_a_symmetric_mask_is_not_dppos():
    failed = names(verdicts(losses.stops_what_comes_back, "dppo"), "fails")
    assert sorted(case.split(":")[0] for case in failed) == [
        "outside, fallen, pulled back",
        "outside, risen, pulled back",
    ]
    assert names(verdicts(losses.stops_what_comes_back, "any"), "fails") == []


def test_ppo_is_not_blamed_for_not_being_dppo_unless_it_says_it_is():
    cells = [case for case in names(verdicts(losses.ppo_terms, "dppo"), "fails") if case.startswith("a rare token")]
    assert len(cells) == 2
    assert not [case for case in names(verdicts(losses.ppo_terms, "ppo"), "fails") if case.startswith("a rare token")]


def test_local_counts_fail_where_global_ones_were_given_and_are_told_where_not():
    wrong = verdicts(losses.counts_kept_tokens, "dppo")["a batch in two micro-batches"]
    assert (wrong.verdict, wrong.got) == ("fails", "only when each part is weighted by its tokens")
    local = verdicts(losses.local_mean, "pg")["a batch in two micro-batches"]
    assert (local.verdict, local.got) == ("tells", "only when each part is weighted by its tokens")


def test_a_value_that_is_not_read_is_not_used():
    """The plain policy gradient knows no μ; the clip does."""
    case = "log μ = NaN at a token in the loss"
    assert verdicts(losses.local_mean, "pg")[case].verdict == "passes"
    assert verdicts(losses.ppo_terms, "ppo")[case].verdict == "differs"


def test_a_bad_advantage_may_be_announced_but_not_hidden():
    case = "advantage NaN at a token in the loss"
    assert verdicts(losses.announces, "dppo")[case].verdict == "passes"
    hidden = verdicts(losses.hides, "pg")[case]
    assert hidden.verdict == "fails"
    assert "is finite, but gradient not finite at 1 of 24 tokens" in hidden.got


def test_an_impossible_value_that_is_used_is_seen():
    found = verdicts(losses.ppo_terms, "ppo")["log π = +0.5 at a token in the loss"]
    assert found.verdict == "differs"
    assert found.got.startswith("used silently")


@pytest.mark.parametrize(
    ("region", "up", "down"),
    [
        ("dppo-binary-tv", bounds.Bound("TV", 0.15), bounds.Bound("TV", 0.15)),
        ("dppo-binary-kl", bounds.Bound("nats", 0.05), bounds.Bound("nats", 0.05)),
        ("ppo", bounds.Bound("ratio", 0.28), bounds.Bound("ratio", 0.2)),
    ],
)
def test_bounds_are_measured_with_their_unit(region, up, down):
    loss = adapted(trustrl.policy_loss, None, {"region": region})
    for advantage, wanted in ((1.0, up), (-1.0, down)):
        found = bounds.bound(loss, advantage)
        assert isinstance(found, bounds.Bound)
        assert found.unit == wanted.unit
        assert found.value == pytest.approx(wanted.value, rel=1e-4)


def test_a_loss_that_never_stops_says_so():
    assert bounds.bound(adapted(losses.local_mean), 1.0) == "never masked"


def test_binary_kl_is_in_nats():
    assert bounds.binary_kl(0.5, 0.25) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


def test_the_near_certain_token_is_inside_every_published_bound():
    from trustrl.tools.conformance.faults import NEAR_CERTAIN

    behavior, policy = (math.exp(x) for x in NEAR_CERTAIN)
    assert bounds.binary_kl(behavior, policy) == pytest.approx(0.041, abs=5e-4)
    assert policy - behavior == pytest.approx(0.019, abs=5e-4)


def test_a_bound_other_than_the_papers_differs():
    assert verdicts(losses.dppo, "dppo", bound=0.3)["bounds with these settings"].verdict == "differs"


def test_adapters_are_known_by_their_parameters():
    def like_verl(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights): ...
    def like_skyrl(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None): ...

    assert [detected(f) for f in (like_verl, like_skyrl, trustrl.policy_loss, losses.dppo)] == [
        "verl", "skyrl", "trustrl", "plain",
    ]  # fmt: skip
    with pytest.raises(trustrl.errors.ConfigError, match=r"got \(new, mu, adv, where\)"):
        detected(losses.of_four)
    assert verdicts(losses.of_four, "ppo", "plain").keys() == verdicts(losses.ppo_terms, "ppo").keys()
    with pytest.raises(
        trustrl.errors.UnknownNameError, match="Known: logprobs, openrlhf, plain, skyrl, torchtune, trl, trustrl, verl"
    ):
        adapted(losses.dppo, "nemo")


@pytest.mark.parametrize(
    ("loss", "settings", "message"),
    [
        pytest.param(losses.needs_a_setting, {}, "must accept a valid batch.*missing 1 required", id="a setting is missing"),
        pytest.param(losses.no_loss, {}, r"must return a scalar tensor.*shape \(4,\)", id="a vector"),
        pytest.param(trustrl.policy_loss, {"region": "troll"}, "sampled tokens only", id="a region that needs a top-K"),
        pytest.param(trustrl.policy_loss, {"regoin": "ppo"}, "must be `region`", id="an unknown setting"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused_in_a_sentence(loss, settings, message):
    with pytest.raises((trustrl.errors.EngineError, trustrl.errors.ConfigError), match=message):
        verdicts(loss, **settings)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("support.losses_under_test", "package.module:function", id="no colon"),
        pytest.param("os:system('true')", "package.module:function", id="a call"),
        pytest.param("nowhere_at_all:f", "importable", id="no module"),
        pytest.param("support.losses_under_test:nothing", "has no 'nothing'", id="no such name"),
        pytest.param("support.losses_under_test:NOT_A_FUNCTION", "must be a function, got int", id="not a function"),
    ],
)
def test_a_name_is_imported_and_never_evaluated(name, message):
    with pytest.raises(trustrl.errors.ConfigError, match=message):
        find(name)


def test_every_expectation_has_a_reason_and_a_name_of_its_own():
    for kind in ("any", "ppo", "dppo", "pg"):
        shown = [e.name for e in EXPECTATIONS if kind in e.kinds]
        assert len(set(shown)) == len(shown)
    assert all(e.because for e in EXPECTATIONS)


def test_the_command_knows_every_adapter_and_kind():
    """Repeated there so that --help loads no torch."""
    from trustrl.cli import conformance
    from trustrl.tools.conformance.expectations import KINDS

    assert sorted(conformance.ADAPTERS) == sorted(ADAPTERS)
    assert conformance.KINDS == KINDS


def test_the_table_shows_what_does_not_pass_and_the_rest_when_asked():
    results = run(adapted(losses.ppo_terms), "ppo")
    short, whole = text(results), text(results, everything=True)
    assert "passes   rows in another order" not in short
    assert "passes   rows in another order" in whole
    assert short.splitlines()[-1] == whole.splitlines()[-1]
