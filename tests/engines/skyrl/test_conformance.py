"""Every region that SkyRL can feed: same tensors in, the oracle's decisions and gradient out, in each of its averages."""

import pytest

pytest.importorskip("skyrl")

import numpy as np
import torch

import trustrl
from support import oracle, skyrl_world as world
from trustrl.engines.common import sampled_loss

NEEDS = {name: trustrl.preset(name).needs() for name in trustrl.presets()}
SAMPLED = [name for name, its in NEEDS.items() if not (its.topk or its.full)]
STOPPING = (
    "dppo-binary-kl",
    "dppo-binary-tv",
    "dppo-decoupled",
    "dis",
    "gmpo",
    "gspo",
    "icepop",
    "ipo",
    "kpop",
    "m2po",
    "minirl",
    "mis",
    "opsm",
    "ppo",
    "tis",
    "trm-sampled",
)
DRIFT = {"kpop": 4.0, "trm-sampled": 0.15, "flash-reinforce": 0.05, "gspo": 0.02}
"""Where the default would stop nothing or everything."""

LARGEST_ERROR = 1e-6
BAD = (float("nan"), float("inf"), -float("inf"))


def test_the_presets_are_those_the_oracle_knows():
    assert set(SAMPLED) <= {*oracle.ROWS, *oracle.WHOLE}
    assert {"troll", "cppo", "trm", "dppo-topk-tv", "dppo-full-kl"} <= set(NEEDS) - set(SAMPLED)


def averages(reduction, mask):
    """What each token's term is multiplied with, written from what SkyRL says of the average."""
    per_row = np.maximum(mask.sum(1, keepdims=True), 1)
    if reduction == "token_mean":
        return mask / mask.sum()
    if reduction == "sequence_mean":
        return mask / (len(mask) * per_row)
    if reduction == "seq_mean_token_sum_norm":
        return mask / (len(mask) * world.LONGEST)
    size = world.PROMPT if reduction == "prompt_mean" else world.MICRO
    groups = [mask[at : at + size] for at in range(0, len(mask), size)]
    return np.concatenate([group / (len(groups) * max(group.sum(), 1)) for group in groups])


def factors(name, tokens):
    """M·w by the oracle, which anchors a region where its preset does."""
    mask = tokens.loss_mask.bool().numpy()
    new, old, rollout = (
        np.where(mask, x.double().numpy(), -1.0)
        for x in (tokens.log_probs, tokens.old_log_probs, tokens.rollout_logprobs)
    )
    unread = np.zeros((*mask.shape, 1))  # whole distributions, which no region here looks at
    case = oracle.Case(rollout, new, tokens.advantages.double().numpy(), mask, old, unread, unread, mask, 0)
    return oracle.factors(name, case)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        (name, reduction)
        for name in SAMPLED
        for reduction in (world.REDUCTIONS if NEEDS[name].reduction is None else ["sequence_mean"])
    ],
)
def test_a_region_in_skyrl_is_the_oracles(name, reduction, monkeypatch):
    seen = []
    core = sampled_loss.policy_loss
    monkeypatch.setattr(sampled_loss, "policy_loss", lambda *a, **k: seen.append(core(*a, **k)) or seen[-1])
    stopped = []
    for seed in range(3):
        tokens = world.batch(seed, drift=DRIFT.get(name, 0.5))
        found = world.result(
            world.algorithm(f"trustrl-{name}", loss_reduction=reduction), world.scaled(tokens, reduction)
        )
        mask = tokens.loss_mask.bool()
        multiplied = torch.from_numpy(factors(name, tokens))
        wanted = -multiplied * tokens.advantages.double() * torch.from_numpy(averages(reduction, mask.numpy()))
        assert world.error(found.gradient.double(), wanted) <= LARGEST_ERROR
        assert torch.isfinite(found.gradient).all()
        decided = mask & (tokens.advantages != 0)
        verdict = seen[-1].decision.keep & (seen[-1].decision.weight != 0)
        assert torch.equal(verdict[decided], (multiplied != 0)[decided])
        stopped.append((multiplied == 0)[decided].double().mean().item())
    if name in STOPPING:
        assert 0.005 < np.mean(stopped) < 0.995, stopped


@pytest.mark.parametrize("name", [name for name in SAMPLED if not NEEDS[name].whole_call])
def test_micro_batches_add_up_to_the_mini_batch(name):
    """SkyRL sums their losses, so that is all that is needed; one of them has no token in the loss."""
    reduction = "sequence_mean" if NEEDS[name].reduction else "token_mean"
    config, tokens = (
        world.algorithm(f"trustrl-{name}", loss_reduction=reduction),
        world.scaled(world.batch(drift=DRIFT.get(name, 0.5)), reduction),
    )
    whole = world.result(config, tokens)
    parts = [
        world.result(config, world.Batch(*(x[rows] for x in tokens))) for rows in torch.arange(16).split([1, 5, 10])
    ]
    assert parts[0].loss == 0
    assert world.error(torch.cat([part.gradient for part in parts]), whole.gradient) <= LARGEST_ERROR


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("log_probs", "rollout_logprobs", "old_log_probs") for value in (*BAD, 0.5)),
        *(("advantages", value) for value in BAD),
    ],
)
@pytest.mark.parametrize("name", ["dppo-binary-tv", "minirl"])
def test_one_bad_token_is_left_out_and_the_others_keep_their_gradient(name, field, value):
    tokens = world.scaled(world.batch(), "token_mean")
    bad = getattr(tokens, field).clone()
    bad[5, 1] = value
    assert tokens.loss_mask[5, 1]
    config = world.algorithm(f"trustrl-{name}")
    found, wanted = world.result(config, tokens._replace(**{field: bad})), world.result(config, tokens)
    read = name == "minirl" or field != "old_log_probs"  # DPPO does not look at π'
    gradient = wanted.gradient.clone()
    if read:
        gradient[5, 1] = 0
    torch.testing.assert_close(found.gradient, gradient)
    assert np.isfinite(found.loss)
    assert (found.metrics["trustrl/dropped_share"] > 0) == read


def test_bad_tokens_raise_if_asked_to():
    tokens = world.batch()
    tokens.log_probs[5, 1] = float("nan")
    with pytest.raises(trustrl.errors.NonFiniteError, match="policy: 1"):
        world.result(world.algorithm("trustrl-ppo", on_nonfinite="raise"), tokens)
