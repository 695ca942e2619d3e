"""Regions in AReaL's own PPO actor: its `ppo_update` with a fake engine, and next to its own `grpo_loss_fn`."""

import functools

import pytest
import torch

import trustrl
from support import parity
from trustrl.engines.common.region_settings import region_given
from trustrl.errors import ConfigError, MissingDataError

actor_module = pytest.importorskip("areal.trainer.ppo.actor")
cli_args = pytest.importorskip("areal.api.cli_args")
from areal.utils import stats_tracker

from trustrl.engines import areal

BOTH = {"use_decoupled_loss": True, "prox_logp_method": "recompute"}
TOKENS = [name for name in parity.PRESETS if name not in parity.PER_SEQUENCE]


@pytest.fixture(autouse=True)
def empty_tracker():
    yield
    stats_tracker.export_all()


def settings(**changes):
    return cli_args.PPOActorConfig(**({"ppo_n_minibatches": 1} | changes))


class FakeEngine:
    """An engine whose model is the batch's log-probs. AReaL's actor calls it; it calls the loss with packed tokens."""

    def __init__(self, config):
        self.config = config
        self.actor = actor_module.PPOActor(config, self)

    def train(self):
        pass

    def get_version(self):
        return 1

    def train_batch(self, input_, loss_fn, loss_weight_fn):
        rows, width = input_["loss_mask"].shape
        packed = {name: x.reshape(-1) if x.shape == (rows, width) else x for name, x in input_.items()}
        packed["cu_seqlens"] = torch.arange(rows + 1, dtype=torch.int32) * width
        logp = self.policy.reshape(-1)[packed["place"]]
        loss = loss_fn(
            logp, torch.zeros_like(logp), packed, vocab_min_logits=logp.detach(), vocab_max_logits=logp.detach()
        )
        (loss * loss_weight_fn(input_) / self.weight).backward()
        return {}


def data_of(batch):
    rows, width = batch.logp.shape
    everywhere = torch.ones(rows, width, dtype=torch.long)
    return {
        "input_ids": everywhere, "attention_mask": everywhere, "loss_mask": batch.in_loss.float(),
        "rewards": torch.ones(rows), "advantages": batch.advantage, "kl_rewards": torch.zeros(rows, width),
        "tot_rewards": torch.zeros(rows, width), "logprobs": batch.behavior_logp, "prox_logp": batch.proximal_logp,
        "place": torch.arange(rows * width).reshape(rows, width),
    }  # fmt: skip


def gradient_by(config, region, change=lambda data: data):
    """AReaL's own `ppo_update` in an actor with the region."""

    class Actor(areal.RegionActor, FakeEngine):
        pass

    Actor.region = region
    engine = Actor(config)

    def gradient(batch):
        engine.policy, engine.weight = batch.logp, batch.in_loss.sum()
        engine.actor._ppo_update(change(data_of(batch)))
        found = stats_tracker.export_all()
        assert any(name.endswith("trustrl/masked_share") for name in found), found
        return batch.logp.grad

    return gradient


@pytest.mark.parametrize(
    ("name", "minibatches"),
    [(name, parts) for name in TOKENS for parts in (1, 3) if parts == 1 or not trustrl.preset(name).needs().whole_call],
)
def test_a_region_in_areals_actor_has_the_oracles_verdicts_and_gradient_with_a_fake_engine(name, minibatches):
    parity.check(name, gradient_by(settings(**BOTH, ppo_n_minibatches=minibatches), name), parity.token_mean)


@pytest.mark.parametrize("name", parity.PER_SEQUENCE)
def test_a_region_defined_per_sequence_is_refused(name):
    with pytest.raises(ConfigError, match=f"must be defined for a mean over tokens, got {name}"):
        areal.RegionLoss(settings(), name)


def test_without_the_decoupled_loss_the_record_is_the_samplers_with_a_fake_engine():
    parity.check("ppo", gradient_by(settings(), "ppo"), parity.token_mean)
    with pytest.raises(ConfigError, match=r"must not read the proximal log-probs in AReaL, got minirl.*passes both"):
        areal.RegionLoss(settings(), "minirl")


def test_with_recomputed_log_probs_alone_the_record_is_the_trainers_with_a_fake_engine():
    def as_areal_does(data):
        return data | {"logprobs": data["logprobs"], "prox_logp": data["logprobs"]}

    region = trustrl.preset("ppo", anchor="proximal")
    parity.check("ppo", gradient_by(settings(recompute_logprob=True), region, as_areal_does), parity.token_mean)
    with pytest.raises(ConfigError, match="must not read the behavior log-probs in AReaL, got dppo"):
        areal.RegionLoss(settings(recompute_logprob=True), "dppo-binary-tv")


def test_an_interpolated_proximal_policy_is_not_taken_for_a_recomputed_one():
    with pytest.raises(ConfigError, match=r"prox_logp_method=loglinear"):
        areal.RegionLoss(settings(use_decoupled_loss=True, prox_logp_method="loglinear"), "minirl")
    assert areal.RegionLoss(settings(use_decoupled_loss=True, prox_logp_method="loglinear"), "dppo-binary-tv")


@pytest.mark.parametrize(
    ("theirs", "region"),
    [
        ({"c_clip": 3.0}, {"preset": "ppo", "anchor": "proximal", "dual_clip": 3.0}),
        (
            {
                "c_clip": None,
                "rejection_sampling": {"level": "token", "action": "clamp", "metric": "ratio", "upper": 2.0},
            },
            {"preset": "tis", "action": "clip"},
        ),
        ({"c_clip": None, "use_sapo_loss": True}, {"preset": "sapo"}),
    ],
    ids=["dual clip", "decoupled with truncated weights", "sapo"],
)
def test_a_region_is_areals_own_loss_with_the_same_rule(theirs, region):
    batch = parity.read("tis").batch
    region = region_given(region, "region")
    if theirs.get("rejection_sampling"):
        theirs = theirs | {"rejection_sampling": cli_args.RejectionSamplingConfig(**theirs["rejection_sampling"])}
    config = settings(**BOTH)
    bounds = (
        {"eps_clip": region.ratio.bounds[0], "eps_clip_higher": region.ratio.bounds[1]}
        if hasattr(region, "ratio")
        else {"eps_clip": 0.2, "eps_clip_higher": None}
    )
    data = {name: x.reshape(-1) for name, x in data_of(batch).items() if x.ndim == 2}
    gradients = []
    for loss in (
        functools.partial(actor_module.grpo_loss_fn, **bounds, **theirs),
        areal.RegionLoss(config, region),
    ):
        logp = batch.logp.reshape(-1).clone().requires_grad_(True)
        loss(logp, torch.zeros_like(logp), data).backward()
        gradients.append(logp.grad)
    scale = gradients[0].abs().max()
    assert scale > 0
    assert (gradients[0] - gradients[1]).abs().max() / scale < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejection_sampling": cli_args.RejectionSamplingConfig()}, "actor.rejection_sampling must be None"),
        ({"m2_threshold": 0.04}, "actor.m2_threshold must be None, got 0.04"),
        ({"use_sapo_loss": True, "use_decoupled_loss": False}, "actor.use_sapo_loss must be False, got True"),
        ({"importance_sampling_level": "sequence"}, "actor.importance_sampling_level must be token, got sequence"),
        ({"c_clip": 3.0}, "actor.c_clip must be None, got 3.0"),
        ({"eps_clip_higher": 0.28}, "actor.eps_clip_higher must be None"),
    ],
)
def test_settings_of_areals_own_loss_are_refused_at_the_start(changes, message):
    with pytest.raises(ConfigError, match=message):
        areal.RegionLoss(settings(**(BOTH | changes)), "dppo-binary-tv")


@pytest.mark.parametrize("name", sorted(set(trustrl.presets()) - set(parity.PRESETS)))
def test_a_region_that_reads_the_vocabulary_is_refused(name):
    with pytest.raises(ConfigError, match="must read only sampled tokens in AReaL"):
        areal.RegionLoss(settings(**BOTH), name)


def test_a_missing_anchor_and_a_teacher_are_refused():
    batch = parity.read("minirl").batch
    loss = areal.RegionLoss(settings(**BOTH), "minirl")
    data = {name: x for name, x in data_of(batch).items() if name != "prox_logp"}
    with pytest.raises(MissingDataError, match=r'input_data\["prox_logp"\] must be given with minirl, got None'):
        loss(batch.logp, torch.zeros_like(batch.logp), data)
    with pytest.raises(ConfigError, match="teacher must be unset"):
        loss(batch.logp, torch.zeros_like(batch.logp), data | {"teacher_logp": batch.logp})


def test_another_loss_is_not_replaced():
    class Actor(areal.RegionActor, FakeEngine):
        pass

    with pytest.raises(ConfigError, match="loss_fn must be AReaL's grpo_loss_fn"):
        Actor(settings()).train_batch({}, lambda *given: None, lambda data: 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"top_p": 0.9}, "top_p"), ({"top_k": 20}, "top_k"), ({"temperature": 0.7}, "temperature"), ({"greedy": True}, "greedy")],
)  # fmt: skip
def test_a_sampler_that_truncates_is_refused(changes, message):
    areal.check_sampling(cli_args.GenerationHyperparameters(), settings())
    with pytest.raises(ConfigError, match=rf"gconfig\.{message} must be"):
        areal.check_sampling(cli_args.GenerationHyperparameters(**changes), settings())
