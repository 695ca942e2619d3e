"""Our losses inside verl: loaded, found, called by its own `ppo_loss`, and sound on bad tokens."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("verl")

import hydra
import torch
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import verl_world as world, worlds
from trustrl import regions
from trustrl.engines import verl as engine
from trustrl.engines.verl import losses
from trustrl.engines.verl.losses import LossContext, active
from trustrl.errors import ConfigError, DuplicateNameError, EngineError, UnknownNameError

NEEDS = {name: trustrl.preset(name).needs() for name in trustrl.presets()}
NOISE = {"flash-reinforce": 0.05}
"""Where 0.3, the usual noise, would stop every sequence."""

SAMPLED = [name for name, its in NEEDS.items() if not (its.topk or its.full or len(its.anchors) > 1)]

# ── registration ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_preset_is_registered():
    assert set(engine.registered()) == {"trustrl", "trustrl-dppo", *(f"trustrl-{name}" for name in trustrl.presets())}
    assert {name for name in core_algos.POLICY_LOSS_REGISTRY if name.startswith("trustrl")} == set(engine.registered())


def in_a_new_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def test_verl_loads_them_by_its_own_variable():
    """verl's package imports the module while it is itself half imported."""
    code = "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn as f; print(f('trustrl-ppo'))"
    run = in_a_new_process(code, VERL_USE_EXTERNAL_MODULES="trustrl.engines.verl")
    assert run.returncode == 0, run.stderr
    assert "<RegionLoss trustrl-ppo>" in run.stdout


def test_a_name_that_is_taken_stops_verl_from_loading():
    code = (
        "from verl.trainer.ppo import core_algos\n"
        "core_algos.register_policy_loss('trustrl-spo')(print)\n"
        "try:\n    import trustrl.engines.verl\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
        "print(sorted(name for name in core_algos.POLICY_LOSS_REGISTRY if 'trustrl' in name))"
    )
    run = in_a_new_process(code)
    assert "DuplicateNameError verl's policy loss 'trustrl-spo' is already registered" in run.stdout
    assert "['trustrl-spo']" in run.stdout  # none, rather than some


def test_registering_twice_is_refused():
    with pytest.raises(DuplicateNameError, match="twice"):
        engine.register()


def test_a_loss_that_somebody_replaced_is_noticed(monkeypatch):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "trustrl-ppo", print)
    with pytest.raises(EngineError, match=r"'trustrl-ppo' must be trustrl's, got <built-in"):
        engine.registered()
    monkeypatch.delitem(core_algos.POLICY_LOSS_REGISTRY, "trustrl-ppo")
    with pytest.raises(EngineError, match="got None"):
        engine.registered()


def test_a_verl_that_calls_its_losses_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(core_algos, "compute_policy_loss_vanilla", lambda log_prob, advantages: None)
    with pytest.raises(EngineError, match=r"compute_policy_loss_vanilla must take .*got \('log_prob', 'advantages'\)"):
        losses._check_seams()


def test_a_verl_that_averages_otherwise_is_refused(monkeypatch):
    def squares(loss_mat, loss_mask, loss_agg_mode):
        return (loss_mat.square() * loss_mask).sum()

    monkeypatch.setattr(core_algos, "agg_loss", squares)
    with pytest.raises(EngineError, match="weighted sum"):
        losses._check_seams()
    monkeypatch.setattr(core_algos, "agg_loss", lambda losses, mask: losses.sum())
    with pytest.raises(EngineError, match=r"agg_loss must take loss_mat"):
        losses._check_seams()


def test_an_old_verl_is_refused(monkeypatch):
    monkeypatch.setattr(losses.seam.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(EngineError, match=r"verl must be at least 0\.9, got 0\.8\.0"):
        losses._check_seams()


# ── the region's settings ───────────────────────────────────────────────────────────────────────────────────────────


def region(loss_mode, given=None):
    return engine.region_of(loss_mode, {"loss_mode": loss_mode, "region": given})


def test_a_preset_without_settings_has_its_published_ones():
    assert region("trustrl-dppo-binary-kl") == trustrl.preset("dppo-binary-kl")
    assert region("trustrl-gspo", {}) == trustrl.preset("gspo")


def test_settings_replace_the_presets_one_by_one():
    found = region("trustrl-dppo-binary-tv", {"divergence": {"max_increase": 0.3}, "max_ratio": 5.0})
    assert found == regions.DPPO(regions.BinaryTV(max_increase=0.3), max_ratio=5.0)
    one_sided = region("trustrl-ppo", {"kind": "ppo", "ratio": {"max_increase": "inf"}})
    assert one_sided.ratio.bounds == (0.2, float("inf"))


def test_a_region_can_be_described_in_full():
    given = {"kind": "cppo", "divergence": {"kind": "binary-tv", "max_increase": 0.1}}
    assert region("trustrl", given) == regions.CPPO(regions.BinaryTV(max_increase=0.1))


@pytest.mark.parametrize(
    ("loss_mode", "given", "error", "says"),
    [
        pytest.param("trustrl", None, ConfigError, "RegionLossConfig", id="nothing described"),
        pytest.param("trustrl", {"max_ratio": 5}, ConfigError, "'kind'", id="no kind"),
        pytest.param("trustrl", {"kind": "gsop"}, UnknownNameError, "Did you mean 'gspo'", id="unknown kind"),
        pytest.param("trustrl", {"kind": "binary-tv"}, ConfigError, "must describe a region", id="no region"),
        pytest.param("trustrl-ppo", 0.2, ConfigError, "must be a dictionary", id="a number"),
        pytest.param("trustrl-ppo", {"ratoi": {}}, ConfigError, "Did you mean 'ratio'", id="misspelt"),
        pytest.param("trustrl-ppo", {"kind": "spo"}, ConfigError, "loss_mode='trustrl'", id="another region"),
        pytest.param(
            "trustrl-dppo-binary-tv", {"divergence": {"kind": "binary-kl"}}, ConfigError,
            "policy_loss.region.divergence.kind must be 'binary-tv'", id="another divergence",
        ),
        pytest.param("trustrl-dppo-binary-tv", {"divergence": {"max_increase": 1.2}}, ConfigError, "probability gap", id="a ratio as a gap"),
        pytest.param("trustrl-dpo-binary-tv", None, ConfigError, "Did you mean 'trustrl-dppo-binary-tv'", id="misspelt preset"),
        pytest.param("vanilla", None, ConfigError, "must be a region's name", id="verl's own"),
        pytest.param("ppo", None, ConfigError, "Did you mean 'trustrl-ppo'", id="without our prefix"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_in_a_sentence(loss_mode, given, error, says):
    with pytest.raises(error) as raised:
        region(loss_mode, given)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("loss_mode", "given", "says"),
    [
        ("trustrl-dppo-topk-tv", None, "the 20 most probable ids"),
        ("trustrl-troll", None, "the 64 most probable ids"),
        ("trustrl-dppo-full-kl", None, "the whole vocabulary"),
        ("trustrl-minirl", None, "the log-probs of sampler and trainer"),
        ("trustrl-ppo", {"anchor": "proximal", "correction": {"kind": "tis"}}, "the log-probs of sampler and trainer"),
    ],
)
def test_what_the_registry_alone_cannot_feed_is_refused_in_a_sentence(loss_mode, given, says):
    """verl hands a policy loss one anchor at the sampled token; trustrl's worker knows the rest."""
    config = world.actor(loss_mode, policy_loss={"region": given} if given else {})
    with pytest.raises(ConfigError) as raised:
        world.result(config, world.batch())
    assert says in str(raised.value)
    assert "VERL_USE_EXTERNAL_MODULES=trustrl.engines.verl" in str(raised.value)


def test_settings_arrive_from_verls_command_line():
    """As hydra and verl make the typed configuration: overrides on its YAML, then `_target_`."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose(
            "ppo_trainer",
            [
                "actor_rollout_ref.actor.policy_loss._target_=trustrl.engines.verl.RegionLossConfig",
                "actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-dppo-binary-tv",
                "+actor_rollout_ref.actor.policy_loss.region.divergence.max_increase=0.3",
                "+actor_rollout_ref.actor.policy_loss.on_nonfinite=raise",
            ],
        )
    made = hydra.utils.instantiate(config.actor_rollout_ref.actor.policy_loss, _convert_="partial")
    assert isinstance(made, engine.RegionLossConfig)
    assert made.on_nonfinite == "raise"
    assert engine.region_of(made.loss_mode, made).divergence.max_increase == 0.3


# ── bad tokens ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5])
@pytest.mark.parametrize("field", ["log_prob", "old_log_prob"])
def test_one_bad_token_is_counted_and_the_others_keep_their_gradient(field, value):
    tokens = world.batch()
    bad = getattr(tokens, field).clone()
    bad[5, 1] = value
    assert tokens.response_mask[5, 1]
    found = world.result(world.actor("trustrl-dppo-binary-tv"), tokens._replace(**{field: bad}))
    wanted = world.result(world.actor("trustrl-dppo-binary-tv"), tokens).gradient
    wanted[5, 1] = 0
    assert torch.isfinite(torch.tensor(found.loss))
    torch.testing.assert_close(found.gradient, wanted)
    assert found.metrics["trustrl/dropped_share"] == pytest.approx(1 / tokens.response_mask.sum().item())
    assert found.metrics["trustrl/fault_policy" if field == "log_prob" else "trustrl/fault_behavior"] == 1


@pytest.mark.parametrize("choice", [pytest.param({}, id="by default"), {"metrics": "core"}])
def test_only_core_metrics_are_logged_unless_all_are_asked_for(choice):
    config = world.actor("trustrl-dppo-binary-tv", policy_loss={"metrics": "core"})
    if not choice:
        config = replace(config, policy_loss=engine.RegionLossConfig(loss_mode="trustrl-dppo-binary-tv"))
    found = world.result(config, world.batch()).metrics
    assert {name for name in found if name.startswith("trustrl/")} == {
        "trustrl/masked_share", "trustrl/kl_k3", "trustrl/divergence_mean", "trustrl/dropped_share"
    }  # fmt: skip


def test_another_choice_of_metrics_is_refused():
    with pytest.raises(ConfigError, match=r"policy_loss\.metrics must be one of 'core', 'all', got 'few'"):
        world.result(world.actor("trustrl-dppo-binary-tv", policy_loss={"metrics": "few"}), world.batch())


def test_bad_tokens_may_stop_the_run_instead():
    tokens = world.batch()
    tokens.log_prob[5, 1] = float("nan")
    with pytest.raises(trustrl.errors.NonFiniteError):
        world.result(world.actor("trustrl-ppo", policy_loss={"on_nonfinite": "raise"}), tokens)


@pytest.mark.parametrize("mode", world.MODES)
@pytest.mark.parametrize("info", [world.LOCAL, world.GLOBAL], ids=["one rank", "four ranks"])
def test_a_micro_batch_without_tokens_has_no_gradient_and_the_same_metrics(mode, info):
    """verl adds up metrics name by name and stops where one micro-batch lacks a name."""
    tokens = world.batch()
    usual = world.result(world.actor("trustrl-dppo-binary-tv", info=info), tokens, mode=mode)
    empty = world.result(
        world.actor("trustrl-dppo-binary-tv", info=info),
        tokens._replace(response_mask=torch.zeros_like(tokens.response_mask)), mode=mode,
    )  # fmt: skip
    assert empty.loss == 0
    assert not empty.gradient.any()
    assert set(empty.metrics) == set(usual.metrics)
    assert all(value == 0 for value in empty.metrics.values())


@pytest.mark.parametrize("name", SAMPLED)
def test_every_preset_runs_and_reports_what_may_be_averaged(name):
    mode = "seq-mean-token-mean" if trustrl.preset(name).needs().reduction else "token-mean"
    found = world.result(world.actor(f"trustrl-{name}"), world.batch(noise=NOISE.get(name, 0.3)), mode=mode)
    assert found.gradient.isfinite().all()
    assert found.gradient.any()
    assert all(isinstance(value, float) for value in found.metrics.values())
    assert {"trustrl/masked_share", "trustrl/dropped_share", "actor/pg_clipfrac", "actor/ppo_kl"} <= set(found.metrics)
    assert not [name for name in found.metrics if "max" in name or "min" in name or name[-3:-2] == "p"]


@pytest.mark.parametrize("name", SAMPLED)
def test_a_preset_has_the_cores_verdicts_and_gradient(name):
    """Through verl's registry, in float32, against the core in float64 with the same tensors."""
    region, tokens = trustrl.preset(name), world.batch(noise=NOISE.get(name, 0.3))
    sequences = NEEDS[name].reduction is not None
    found = world.result(
        world.actor(f"trustrl-{name}"), tokens, mode="seq-mean-token-mean" if sequences else "token-mean"
    )
    logp = tokens.log_prob.double().requires_grad_()
    rollout = trustrl.RolloutTokens(
        advantage=tokens.advantages.double(), in_loss=tokens.response_mask,
        **{f"{NEEDS[name].anchor}_logp": tokens.old_log_prob.double()},
    )  # fmt: skip
    reduction = trustrl.TokenMean(num_tokens=int(tokens.response_mask.sum()))
    if sequences:  # without global counts verl counts those that have a token
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=int(tokens.response_mask.any(-1).sum()))
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=reduction)
    out.loss.backward()
    assert world.error(found.gradient.double(), logp.grad) <= 1e-6
    assert torch.equal(found.gradient != 0, logp.grad != 0)
    assert found.metrics["trustrl/masked_share"] == pytest.approx(
        trustrl.rates(out.sums)["trustrl/masked_share"], abs=1e-12
    )


@pytest.mark.parametrize("name", sorted(NEEDS.keys() - set(SAMPLED)))
def test_a_preset_that_reads_more_has_the_cores_verdicts_and_gradient(name):
    """The same with what a worker hands over beside verl's tensors: both anchors, the top K, the whole vocabulary."""
    # TRM stops whole sequences, and more drift would stop them all; a wide bound stops few at less.
    drift = 0.22 if name.startswith("trm") else 1.0 if name.endswith("capped") else 0.5
    region, needs, w = trustrl.preset(name), NEEDS[name], worlds.world(rows=8, vocabulary=96, drift=drift)

    def tokens(dtype):
        rollout = w.rollout(needs.anchor, dtype=dtype, k=needs.topk or worlds.K, with_tails=True)
        return rollout, w.policy_tokens(rollout, dtype=dtype)

    (rollout, policy), taken = tokens(torch.float32), []
    context = LossContext(
        region,
        {"behavior_logp": rollout.behavior_logp, "proximal_logp": rollout.proximal_logp},
        lambda out, *_: taken.append(out),
        {"token_ids": rollout.token_ids, "topk": rollout.topk, "full": rollout.full},
        {"topk_logp": policy.topk_logp, "tail_logp": policy.tail_logp, "full_logp": policy.full_logp},
    )
    with active(context):
        loss, _ = core_algos.get_policy_loss_fn(f"trustrl-{name}")(
            old_log_prob=rollout.proximal_logp, log_prob=policy.logp, advantages=rollout.advantage,
            response_mask=rollout.in_loss, config=world.actor(f"trustrl-{name}"),
            loss_agg_mode="seq-mean-token-mean" if needs.reduction else "token-mean",
        )  # fmt: skip
    loss.backward()
    wanted_rollout, wanted = tokens(torch.float64)
    reduction = trustrl.TokenMean(num_tokens=w.num_tokens)
    if needs.reduction is not None:
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=int(w.in_loss.any(-1).sum()))
    out = trustrl.policy_loss(wanted, wanted_rollout, region, reduction=reduction)
    out.loss.backward()
    gradients = [
        torch.cat([worlds.grad_of(x).double().flatten() for x in (of.logp, of.topk_logp, of.tail_logp, of.full_logp)])
        for of in (policy, wanted)
    ]
    assert world.error(*gradients) <= 1e-6
    (found,) = taken
    assert torch.equal(found.decision.keep, out.decision.keep)
    untouched = torch.isclose(found.decision.logp, policy.logp) if needs.projects else found.decision.keep
    share = untouched[rollout.in_loss].double().mean()
    if name == "score-centering":  # every token's score is centered
        assert share == 0
    else:
        assert 0.02 < share < 0.98  # the region was at work


def test_a_mismatch_is_not_counted_twice():
    tokens = world.batch()
    with pytest.raises(ConfigError, match="rollout_is_weights must be None with ppo anchored on the sampler"):
        world.result(world.actor("trustrl-ppo"), tokens, is_weights=torch.ones_like(tokens.log_prob))


def some_correction(tokens):
    return torch.rand(tokens.log_prob.shape, generator=torch.Generator().manual_seed(1)) * 2


def test_verls_correction_leaves_a_regions_own_penalty_alone():
    """Its weights are for the policy term, which has no part in this gradient: all advantages are 0."""
    tokens = world.batch()
    tokens = tokens._replace(advantages=torch.zeros_like(tokens.advantages))
    config = world.actor("trustrl-ipo", policy_loss={"region": {"anchor": "proximal", "log_ratio_penalty": 0.1}})
    alone = world.result(config, tokens).gradient
    assert alone.norm() > 0
    assert torch.equal(world.result(config, tokens, is_weights=some_correction(tokens)).gradient, alone)


def test_records_have_the_advantage_that_was_decided_on_where_verl_corrects():
    """Asked again, the region then decides the same, also where a weight is 0; `loss_weight` is the average's alone."""
    tokens, taken = world.batch(), []
    weights = some_correction(tokens)
    weights[:, 0] = 0.0
    context = LossContext(
        regions.PPO(anchor="proximal"), {"proximal_logp": tokens.old_log_prob}, lambda *given: taken.append(given)
    )
    with active(context):
        world.result(world.actor("trustrl-ppo"), tokens, is_weights=weights)
    ((out, policy, rollout, coefficients),) = taken
    again = trustrl.policy_loss(policy, rollout, context.region, reduction=trustrl.TokenSum())
    assert torch.equal(again.decision.keep, out.decision.keep)
    assert torch.equal(rollout.advantage, tokens.advantages * weights)
    assert coefficients.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
def test_what_verl_calls_old_goes_by_the_name_of_the_anchor(anchor, monkeypatch):
    """And by no other: nobody told the loss what the other policy said."""
    seen = []

    def watched(policy, rollout, *args, **more):
        seen.append(rollout)
        return trustrl.policy_loss(policy, rollout, *args, **more)

    monkeypatch.setattr(losses, "policy_loss", watched)
    tokens = world.batch()
    world.result(world.actor("trustrl-ppo", policy_loss={"region": {"anchor": anchor}}), tokens)
    (rollout,) = seen
    given = {"behavior": rollout.behavior_logp, "proximal": rollout.proximal_logp}
    assert given.pop(anchor) is tokens.old_log_prob
    assert list(given.values()) == [None]


def test_gspo_takes_no_other_average():
    with pytest.raises(ConfigError, match="reduction must be SequenceMeanTokenMean with gspo, got TokenMean"):
        world.result(world.actor("trustrl-gspo"), world.batch(), mode="token-mean")


def test_a_loss_without_settings_is_refused():
    with pytest.raises(ConfigError, match="config must be verl's ActorConfig"):
        core_algos.get_policy_loss_fn("trustrl-ppo")(*world.batch())


# ── verl's own caller ───────────────────────────────────────────────────────────────────────────────────────────────


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(tokens, prompt=3):
    """What a worker hands to `ppo_loss`: model outputs and data without padding, a prompt before every response."""
    lengths = [max(int(mask.nonzero()[-1]) + 1 if mask.any() else 1, 1) for mask in tokens.response_mask]

    def responses(x):
        return nested([row[:length].clone() for row, length in zip(x, lengths, strict=True)])

    # The output at a position is the next token's log-prob: response tokens start one early, the last output is unused.
    before, after = torch.zeros(prompt - 1), torch.zeros(1)
    logp = [torch.cat([before, row[:length], after]) for row, length in zip(tokens.log_prob, lengths, strict=True)]
    output = nested(logp).requires_grad_()
    data = TensorDict(
        {
            "prompts": nested([torch.zeros(prompt, dtype=torch.long) for _ in lengths]),
            "responses": nested([torch.zeros(length, dtype=torch.long) for length in lengths]),
            "response_mask": responses(tokens.response_mask.long()),
            "old_log_probs": responses(tokens.old_log_prob),
            "advantages": responses(tokens.advantages),
        },
        batch_size=len(lengths),
    )
    mask = tokens.response_mask
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=int(mask.sum()), global_batch_size=int(mask.any(1).sum()))
    return output, data


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_verls_own_caller_gets_the_same_gradient_from_ours(entropy_coeff):
    """With its entropy term too, which it adds to our loss in place."""
    tokens = world.batch()
    bounds = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1e6}
    ours = world.actor(
        "trustrl-dppo-binary-tv", entropy_coeff=entropy_coeff,
        policy_loss={"region": {"divergence": {"max_decrease": 0.05, "max_increase": 0.08}}},
    )  # fmt: skip
    gradients, metrics = [], []
    for config in (ours, world.actor("dppo_tv", entropy_coeff=entropy_coeff, **bounds)):
        output, data = micro_batch(tokens)
        loss, reported = ppo_loss(config, {"log_probs": output, "entropy": output * -1.0}, data)
        gradients.append(torch.autograd.grad(loss, output)[0].values())
        metrics.append({name: value.aggregate() for name, value in reported.items() if isinstance(value, Metric)})
    assert world.error(*gradients) <= 1e-6
    assert metrics[0]["actor/pg_clipfrac"] == pytest.approx(metrics[1]["actor/pg_clipfrac"], abs=1e-6)
    assert metrics[0]["actor/pg_loss"] == pytest.approx(metrics[1]["actor/pg_loss"], rel=1e-5)
    assert 0.05 < metrics[0]["trustrl/masked_share"] < 0.6
