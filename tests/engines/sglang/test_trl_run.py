"""TRL with SGLang as its sampler: a `rollout_func` that asks a real engine, and updates its weights inside answers.

Each rollout after the first begins with the weights of the step before, and continues with the trainer's own.
"""

import asyncio
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

pytest.importorskip("sglang")
pytest.importorskip("trl")

import trustrl
from support import trl_world as world
from support.sglang_world import Sampler
from trustrl import regions
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.sglang import SGLangAdapter
from trustrl.engines.trl import TrustRegionGRPOTrainer, rollout_fields

K, STEPS, LENGTH = 8, 3, 160
"""K, steps of a run, and tokens of a completion. SGLang sends the first tokens when it has drawn fifty."""

TRUNCATED = {"top_p": 0.9, "top_k": 64}
REGIONS = {
    "Top-K TV": regions.DPPO(regions.TopKTV(k=K, max_increase=0.02, max_decrease=0.02)),
    "TROLL": trustrl.preset("troll", k=K, anchor="behavior"),
}
EXACT = 1e-4
"""Largest |log π/μ| of a token that the trainer's own weights drew."""


class Run(NamedTuple):
    answers: list[dict[str, Any]]
    """SGLang's own, of all rollouts."""

    losses: list[Any]
    """(LossOutput, PolicyTokens, RolloutTokens) of each step."""

    logs: list[dict[str, float]]
    moved: float
    """The largest change of a weight."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    save(policy(), folder)
    engine = Sampler(folder)
    yield engine
    engine.close()


def policy():
    return world.tiny_model(max_position_embeddings=256)


def save(model, folder):
    model.save_pretrained(folder)
    world.tokenizer().save_pretrained(folder)


class Agent:
    """The `rollout_func`."""

    def __init__(self, engine, folder):
        self.engine, self.folder, self.answers = engine, folder, []
        self.adapter = SGLangAdapter.of(engine.manager.server_args, world.VOCABULARY, pause="retract")

    def __call__(self, prompts, trainer):
        wanted = Wanted(K, TRUNCATED["top_k"])
        request = self.adapter.request(
            wanted, {"temperature": trainer.temperature, "max_tokens": LENGTH, "ignore_eos": True, **TRUNCATED}
        )
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        answers = self.engine.run(self.answered(ids, request, trainer))
        self.answers += answers
        return rollout_fields(ids, [self.adapter.record(answer, wanted) for answer in answers])

    async def answered(self, ids, request, trainer):
        step, manager = trainer.state.global_step, self.engine.manager
        save(trainer.model, self.folder)
        if step == 0:  # the last run's weights
            await self.engine.updated(self.folder, "0", mode="abort")
        jobs = [asyncio.create_task(self.engine.answer(one, *request)) for one in ids]
        if step:
            states = manager.rid_to_state
            while len(states) < len(ids) or not all(state.output_ids for state in states.values()):
                await asyncio.sleep(0.01)
            await self.engine.updated(self.folder, str(step), mode="retract")
        return await asyncio.gather(*jobs)


@pytest.fixture(scope="module", params=REGIONS)
def run(request, engine, tmp_path_factory):
    agent, patch = Agent(engine, tmp_path_factory.mktemp("weights")), pytest.MonkeyPatch()
    losses, model = world.spy(patch), policy()
    settings = world.settings(
        max_steps=STEPS, learning_rate=3e-3, logging_steps=1, max_completion_length=LENGTH, **TRUNCATED
    )
    trainer = world.trainer_of(
        TrustRegionGRPOTrainer, model, settings, rollout_func=agent, region=REGIONS[request.param], metrics="all"
    )
    trainer.reward_funcs = [
        lambda completions, **_: [sum(map(ord, text)) / 100 for text in completions]
    ]  # no two alike
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    patch.undo()
    moved = max((p - old).abs().max().item() for p, old in zip(model.parameters(), before, strict=True))
    logs = [entry for entry in trainer.state.log_history if "trustrl/tokens" in entry]
    return Run(agent.answers, losses, logs, moved)


def rows_of(rollout):
    """Each sequence's tokens in the loss, as slices of the packed ones."""
    starts = [*(rollout.position == 0).nonzero()[:, 0].tolist(), len(rollout.position)]
    return [slice(*pair) for pair in pairwise(starts)]


def told(answer):
    """SGLang's own numbers of an answer: tokens, log μ, K ids by rank, their log-probs, kept ids, versions."""
    meta, tokens = answer["meta_info"], answer["output_ids"]
    kept, logps = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    versions = [int(span["version"]) for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
    own = [logp[ids.index(token)] for ids, logp, token in zip(kept, logps, tokens, strict=True)]
    return tokens, own, [ids[:K] for ids in kept], [logp[:K] for logp in logps], [sorted(ids) for ids in kept], versions


def test_the_loss_reads_what_sglang_answered_token_for_token(run):
    answers = {tuple(answer["output_ids"]): told(answer) for answer in run.answers}
    tokens = 0
    for _, _, rollout in run.losses:
        for row in rows_of(rollout):
            _, own, top_ids, top_logp, kept, versions = answers[tuple(rollout.token_ids[row].tolist())]
            assert rollout.behavior_logp[row].tolist() == pytest.approx(own, abs=1e-6)
            assert rollout.version[row].tolist() == versions
            for t, at in enumerate(range(row.start, row.stop)):
                ids = rollout.topk.ids[at].tolist()
                assert [token for token in ids if token >= 0] == top_ids[t]
                assert rollout.topk.logp[at][: len(top_ids[t])].tolist() == pytest.approx(top_logp[t], abs=1e-6)
                assert sorted(token for token in rollout.kept_ids[at].tolist() if token >= 0) == kept[t]
            tokens += row.stop - row.start
    assert tokens == STEPS * 6 * LENGTH
    print(f"{tokens} tokens equal SGLang's answers")


def test_tokens_of_the_trainers_own_weights_have_ratio_1_and_older_ones_are_counted(run):
    assert run.logs[0]["trustrl/ratio_max"] == pytest.approx(1, abs=EXACT)
    assert all(0 < entry["grad_norm"] < 100 for entry in run.logs)
    assert run.moved > 1e-3
    for step, (_, policy, rollout) in enumerate(run.losses):
        gap = (policy.logp.detach() - rollout.behavior_logp).abs()
        fresh = rollout.version == step
        assert gap[fresh].max() < EXACT
        print(
            f"step {step}: {int(fresh.sum())} fresh tokens, gap {gap[fresh].max():.1e}, others {gap[~fresh].max() if step else 0:.1e}"
        )
        if step:
            assert set(rollout.version.tolist()) == {step - 1, step}
            assert gap[~fresh].max() > 100 * EXACT, "the weights moved"
            assert run.logs[step]["trustrl/staleness_max"] == 1
