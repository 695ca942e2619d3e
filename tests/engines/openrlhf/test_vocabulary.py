"""Top-K and TROLL in OpenRLHF's own classes and DeepSpeed's engine, against plain models and whole log-softmaxes."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("openrlhf")

import torch
from openrlhf.models import Actor
from openrlhf.trainer.ppo_utils.experience import balance_experiences
from peft import LoraConfig, get_peft_model

import trustrl
from support import openrlhf_world as world, regions_oracle as oracle
from support.regions_oracle import Case
from trustrl import regions
from trustrl.config.terms import TIS
from trustrl.engines import openrlhf as engine
from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.openrlhf.anchor_rows import CARRIED, RecordedLogp
from trustrl.engines.openrlhf.sampled_rows import SAMPLED
from trustrl.engines.openrlhf.vocabulary import VocabularyLoss, VocabularyPass
from trustrl.errors import ConfigError, EngineError, MissingDataError
from trustrl.regions.loading import config_to_dict

LARGEST_ERROR = 1e-5
"""Of a gradient, relative to the largest entry of all parameters' gradients."""

LARGEST_LOSS_ERROR = 1e-6
"""Of a loss whose terms of either sign are of size 1, in float32; relative to larger losses."""

K, PENALTIES = oracle.K, {"use_kl_loss": True}


def tight(divergence, anchor="proximal", **more):
    return regions.DPPO(divergence(k=K, max_increase=0.02, max_decrease=0.01), anchor=anchor, **more)


CASES = {
    "top-K TV": Case(tight(regions.TopKTV)),
    "top-K KL": Case(tight(regions.TopKKL)),
    "top-K TV, corrected": Case(tight(regions.TopKTV, correction=TIS(max_ratio=1.1))),
    "top-K TV, mean of sequences": Case(tight(regions.TopKTV), mode="seq-mean-token-mean"),
    "top-K TV with OpenRLHF's KL and entropy": Case(tight(regions.TopKTV), settings=PENALTIES),
    "CPPO": Case(trustrl.preset("cppo", anchor="proximal")),
    "TRM": Case(trustrl.preset("trm", anchor="proximal")),
    "score centering": Case(trustrl.preset("score-centering", k=K, anchor="proximal")),
    "TROLL": Case(trustrl.preset("troll", k=K, bound=0.01)),
    "TROLL, mean of sequences": Case(trustrl.preset("troll", k=K, bound=0.01), mode="seq-mean-token-mean"),
    "TROLL's sequence ratio": Case(trustrl.preset("troll-gspo", k=K), mode="seq-mean-token-mean"),
    "top-K TV on μ": Case(tight(regions.TopKTV, "behavior")),
    "top-K KL on μ": Case(tight(regions.TopKKL, "behavior")),
    "TROLL on μ": Case(trustrl.preset("troll", k=K, bound=0.01, anchor="behavior")),
    "top-K TV, truncated": Case(tight(regions.TopKTV), truncated=True),
    **oracle.TRUNCATED,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return oracle.tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(folder, monkeypatch):
    """Starts a run of a case. What OpenRLHF sends through Ray is passed on in the process."""
    engine.install()
    from openrlhf.trainer.ppo_utils import experience_maker

    monkeypatch.setattr(experience_maker, "ray", SimpleNamespace(get=lambda refs: refs, put=lambda value: value))

    def started(case, *given, **more):
        monkeypatch.setenv("TRUSTRL_REGION", json.dumps(config_to_dict(case.region)))
        level = "token" if case.truncated or "behavior" in case.region.needs().anchors else "off"
        given = (*given, *(["--rollout.top_p", 0.9] if case.truncated else []))
        arguments = ["--train.max_epochs", 1, "--algo.advantage.is_correction_level", level, *given]
        if case.settings.get("use_kl_loss"):
            arguments += ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--actor.entropy_coef", 0.2]
            arguments += ["--algo.kl.init_coef", 0.3]
        return world.Run(folder, case, *arguments, **more)

    return started


@pytest.mark.parametrize("name", CASES)
def test_an_update_with_deepspeed_has_the_gradient_of_whole_log_softmaxes_with_plain_calls_for_ray(start, folder, name):
    case = CASES[name]
    run = start(case)
    before = {key: p.detach().clone() for key, p in run.model.named_parameters()}
    status = run.update(kl=0.3 if case.settings else 0.0)
    wanted = oracle.expected(folder, 1, case)
    # OpenRLHF counts sequences with tokens in the loss only
    scale = 1.0 if case.mode == "token-mean" else oracle.ROWS / run.batch.in_loss.any(1).sum().item()
    largest = max(gradient.abs().max() for gradient in wanted.by_name.values()) * scale
    for key, gradient in wanted.by_name.items():
        assert (run.gradient[key] - gradient * scale).abs().max() / largest <= LARGEST_ERROR, key
    if not case.settings:
        loss = sum(run.losses) / len(run.losses)  # DeepSpeed divides each micro-batch's by their number
        assert loss == pytest.approx(wanted.loss * scale, rel=LARGEST_LOSS_ERROR, abs=LARGEST_LOSS_ERROR)
    share = wanted.metrics["trustrl/masked_share"]
    assert status["trustrl/masked_share"] == pytest.approx(share, abs=1e-6)
    if name.startswith("top-K"):
        assert 0.02 < share < 0.98
    moved = max((p.detach() - before[key] * oracle.GROWTH).abs().max() for key, p in run.model.named_parameters())
    assert moved > 0  # the optimizer's step


def rows_of(experience):
    return [inputs[CARRIED] for inputs in experience.mm_train_inputs]


def test_the_actor_returns_openrlhfs_log_probs_and_the_top_k_of_whole_log_softmaxes(start, folder):
    case = CASES["top-K TV"]
    run = start(case)
    (made, *_) = run.experiences()
    with torch.no_grad():
        stock = Actor.forward(run.actor, made.sequences, made.action_mask, made.attention_mask)
    assert torch.equal(made.action_log_probs, stock)
    batch = run.batch
    whole = oracle.distribution(oracle.model_of(folder), batch.prompts, batch.responses)
    for at, row in enumerate(rows_of(made)):
        inside = batch.in_loss[at]
        ids, token_ids = row.topk_ids.long(), batch.responses[at, inside]
        values, tail = oracle.support(whole[at, inside], ids, token_ids)
        assert torch.equal(ids.sort().values, whole[at, inside].topk(K).indices.sort().values)
        found = (row.topk_logp, row.topk_tail_logp, row.logp)
        sampled = whole[at, inside].gather(-1, token_ids[:, None])[:, 0]
        for one, other in zip(found, (values, tail, sampled), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_rows_stay_with_their_sequences_when_openrlhf_sorts_splits_and_pads(start):
    run = start(CASES["top-K TV"])
    made = run.experiences()
    wanted = {tuple(ids.tolist()): row for one in made for ids, row in zip(one.sequences, rows_of(one), strict=True)}
    for sorted_rows in balance_experiences(made, run.args):
        run.trainer.replay_buffer.append(sorted_rows)
    for item in run.trainer.replay_buffer.items:
        (row,) = rows_of(item)
        (ids,) = [ids for ids in wanted if ids[: len(item.sequences)] == tuple(item.sequences.tolist())]
        assert row is wanted[ids]
        assert len(row.logp) == item.action_mask.sum()


@pytest.mark.parametrize("lost", ["all", "one", "a token"])
def test_an_update_without_the_anchor_is_refused(start, lost):
    run = start(CASES["top-K TV"])
    for experience in run.experiences():
        if lost == "all":
            experience.mm_train_inputs = []
        if lost == "one":
            experience.mm_train_inputs[0] = None
        if lost == "a token":
            experience.action_mask[-1, oracle.PROMPT] = 1 - experience.action_mask[-1, oracle.PROMPT]
        run.trainer.replay_buffer.append(experience)
    with pytest.raises(MissingDataError, match=r"mm_train_inputs must carry π' at \["):
        run.trainer.ppo_train(0.0)


def test_an_actor_without_the_region_is_noticed(start):
    run = start(CASES["top-K TV"])
    del run.actor.forward
    with pytest.raises(MissingDataError, match=r"must return π' for 2 micro-batches, got 0"):
        run.experiences()


def test_a_region_on_the_sampled_token_leaves_the_experience_alone(start):
    made = start(Case(regions.PPO(anchor="proximal"))).experiences()
    assert all(one.mm_train_inputs == [None] * len(one.sequences) for one in made)
    assert all(isinstance(one.action_log_probs, torch.Tensor) for one in made)


@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_older_weights_than_the_region_allows_are_dropped(start, folder, monkeypatch, updates):
    edges = {"max_increase": 0.002, "max_decrease": 0.001}
    run = start(Case(regions.DPPO(regions.BinaryTV(**edges), max_staleness=1)))
    monkeypatch.setattr(type(run.trainer).__base__, "broadcast_to_vllm", lambda self: None)
    for _ in range(updates):
        run.trainer.broadcast_to_vllm()
    run.update()
    if updates == 2:
        assert all((gradient == 0).all() for gradient in run.gradient.values())
        return
    wanted = oracle.expected(folder, 1, Case(regions.DPPO(regions.BinaryTV(**edges)))).by_name
    largest = max(gradient.abs().max() for gradient in wanted.values())
    assert largest > 0
    assert all((run.gradient[key] - wanted[key]).abs().max() / largest <= LARGEST_ERROR for key in wanted)


@pytest.mark.parametrize("lost", ["all", "one", "kept ids"])
def test_an_experience_without_the_samplers_record_is_refused(start, lost):
    run = start(CASES["top-K on μ, truncated"])
    samples = run.samples()
    for sample in samples if lost == "all" else samples[2:3]:
        row = sample.mm_train_inputs[0][SAMPLED]
        empty = KeptColumn(row.kept.ids[:0], 0 * row.kept.counts)
        sample.mm_train_inputs = [{SAMPLED: row._replace(kept=empty)} if lost == "kept ids" else None]
    run.samples = lambda: samples
    message = "must record the ids that top-p" if lost == "kept ids" else r"must carry the sampler's record at \["
    with pytest.raises(MissingDataError, match=message):
        run.experiences()


def test_an_agent_that_truncates_a_run_that_does_not_is_refused(start):
    run, truncating = start(CASES["top-K TV on μ"]), start(CASES["top-K on μ, truncated"])
    run.samples = truncating.samples
    with pytest.raises(EngineError, match=r"--rollout\.top_p must be below 1 if an agent truncates"):
        run.experiences()


def test_an_actor_without_the_kept_ids_is_noticed(start):
    run = start(CASES["TROLL on π', truncated"])
    run.trainer.scoring = lambda inputs: nullcontext()
    with pytest.raises(MissingDataError, match="forward must receive the kept ids of each sequence, got 0 columns"):
        run.experiences()


def test_a_record_moves_its_log_probs_and_not_its_rows():
    record = RecordedLogp(torch.zeros(1, 2), [])
    assert record.to("meta").logp.device.type == "meta"
    assert record.to("meta").rows is record.rows


def test_an_actor_of_images_is_refused(folder):
    actor = SimpleNamespace(model=oracle.model_of(folder), is_vlm=True)
    with pytest.raises(ConfigError, match=r"model_name_or_path must be a text model with dppo"):
        VocabularyPass(actor, VocabularyLoss(CASES["top-K TV"].region))


def test_an_adapter_on_the_output_layer_is_refused(folder):
    model = get_peft_model(oracle.model_of(folder), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match="output layer must be a plain linear layer"):
        VocabularyPass(SimpleNamespace(model=model), VocabularyLoss(CASES["top-K TV"].region))
