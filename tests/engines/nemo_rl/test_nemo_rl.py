"""Regions in NeMo RL: its own `wrap_loss_fn_with_input_preparation` calls ours. Stubs replace mlflow and swanlab."""

import pickle
from types import SimpleNamespace

import pytest

from support import nemo_rl_world  # noqa: F401  before NeMo RL

loss = pytest.importorskip(
    "nemo_rl.algorithms.loss", reason="NeMo RL's checkout must be on the path; see `nox -s sources`"
)

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from support import parity
from support.refusal_examples import NEMO_RL, cases
from trustrl.engines import nemo_rl as engine
from trustrl.engines.refusals.nemo_rl import ROWS
from trustrl.errors import ConfigError, EngineError

AVERAGES = {True: parity.token_mean, False: parity.sequence_mean}
OWN_CLIP = {"preset": "ppo", "ratio": {"max_increase": 0.2, "max_decrease": 0.2}, "anchor": "proximal"}


def configuration(region="dppo-binary-tv", generation=None, **settings):
    """NeMo RL's own configuration of the loss, inside a master configuration."""
    fields = {"reference_policy_kl_penalty": 0.0, "trustrl_metrics": "all", **settings}
    config = loss.ClippedPGLossConfig(trustrl_region=region, **fields)
    sampling = {"top_p": 1.0, "top_k": None, **(generation or {})}
    return SimpleNamespace(loss_fn=config, policy={"generation": sampling})


def made(*args, **settings):
    master = configuration(*args, **settings)
    return engine.with_region(loss.ClippedPGLossFn(master.loss_fn), master)


def batch(tokens):
    """A micro-batch of NeMo RL: a first column that is not predicted, and one row that counts for nothing."""

    def padded(x, fill=0.0):
        x = torch.cat([torch.full((len(x), 1), fill), x.float()], 1)
        return torch.cat([x, torch.full((1, x.shape[1]), -1.0)])

    rows, width = tokens.logp.shape
    return BatchedDataDict(
        {
            "input_ids": torch.zeros(rows + 1, width + 1, dtype=torch.long),
            "advantages": padded(tokens.advantage),
            "prev_logprobs": padded(tokens.proximal_logp),
            "generation_logprobs": padded(tokens.behavior_logp),
            "reference_policy_logprobs": padded(tokens.proximal_logp - 0.1),
            "token_mask": torch.cat([padded(tokens.in_loss)[:-1], torch.ones(1, width + 1)]),
            "sample_mask": torch.cat([torch.ones(rows), torch.zeros(1)]),
        }
    )


def result(loss_fn, tokens):
    """NeMo RL's own wrapper with this loss; its preparation returns the given log-probs, as with its fused head."""
    leaf = tokens.logp.detach().clone().requires_grad_(True)
    given = torch.cat([leaf, torch.full((1, leaf.shape[1]), -0.5)])
    loss_fn.use_fused_linear_logprobs = True  # NeMo RL then takes log-probs in place of logits
    value, metrics = loss.wrap_loss_fn_with_input_preparation(
        given, batch(tokens), torch.tensor(float(len(leaf))), tokens.in_loss.sum().float(), loss_fn,
        loss.prepare_loss_input,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(value, leaf)
    return gradient, metrics


@pytest.mark.parametrize(
    ("name", "per_token"),
    [(name, flag) for name in parity.PRESETS for flag in AVERAGES if not flag or name not in parity.PER_SEQUENCE],
)
def test_a_preset_has_the_files_verdicts_and_gradient(name, per_token):
    loss_fn = made(name, token_level_loss=per_token)
    parity.check(name, lambda tokens: result(loss_fn, tokens)[0], AVERAGES[per_token])


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_ppo_is_nemo_rls_own_clip(per_token, kl):
    settings = {"token_level_loss": per_token, "reference_policy_kl_penalty": kl}
    tokens = parity.read("ppo").batch
    ours, told = result(made(OWN_CLIP, **settings), tokens)
    theirs, wanted = result(loss.ClippedPGLossFn(configuration(**settings).loss_fn), tokens)
    assert 0.05 < told["trustrl/masked_share"] < 0.95
    assert ((ours - theirs).abs().max() / theirs.abs().max()).item() <= 1e-6
    assert told["kl_penalty"] == wanted["kl_penalty"]


def test_metrics_of_micro_batches_add_up():
    tokens = parity.read("ppo").batch
    _, told = result(made("ppo"), tokens)
    decided = tokens.in_loss & (tokens.advantage != 0)
    masked = ((parity.read("ppo").factors == 0) & decided).sum() / decided.sum()
    assert told["trustrl/masked_share"] == pytest.approx(masked.item(), rel=1e-6)
    loss_fn = made("ppo")
    result(loss_fn, tokens)
    advertised = loss_fn.metric_normalizations
    assert {advertised[name].value for name in told if name.startswith("trustrl/")} == {"tokens"}


def test_the_loss_reaches_ray_workers_by_pickle():
    tokens = parity.read("ppo").batch
    copy = pickle.loads(pickle.dumps(made("minirl")))
    assert torch.equal(result(copy, tokens)[0], result(made("minirl"), tokens)[0])


@pytest.mark.parametrize("case", cases(ROWS, NEMO_RL), ids=lambda case: case.row.setting)
def test_each_row_refuses_its_example(case):
    row = case.row
    working = {"token_level_loss": False} if case.preset == "gspo" else {}
    settings = {key.rpartition(".")[2]: value for key, value in case.settings.items()}
    generation = settings if row.setting.startswith("policy.") else {}
    own = {} if generation else settings
    region = {"preset": case.preset, **case.region}
    master = configuration(region, generation, **working | own)
    with pytest.raises(ConfigError) as refused:
        engine.with_region(SimpleNamespace(use_fused_linear_logprobs=False), master)
    assert str(refused.value).startswith(f"{row.setting} must be {row.must_be}")
    assert row.why.split("}")[-1] in str(refused.value)
    made(region, **working)  # the example is what was refused


@pytest.mark.parametrize("name", ["dppo-topk-tv", "troll", "dppo-full-kl"])
def test_a_region_of_the_vocabulary_is_refused(name):
    with pytest.raises(ConfigError, match="must read only sampled tokens in NeMo RL"):
        made(name)


def test_another_signature_is_refused(monkeypatch):
    monkeypatch.setattr(loss.ClippedPGLossFn, "__call__", lambda self, logits, data: None)
    with pytest.raises(EngineError, match=r"__call__ must take .*got \('self', 'logits', 'data'\)"):
        made()
