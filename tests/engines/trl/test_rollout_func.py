"""TRL's `rollout_func`, the agentic path: its recorded log-probs are μ, with TRL's own loop around it.

The sampler is another network than the trainer's: the same architecture with slightly other weights, so that what it
records differs from what the trainer would compute.
"""

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from trl import GRPOTrainer

import trustrl
from support import trl_world as world
from trustrl import regions
from trustrl.engines.common import replica_gaps, seam
from trustrl.engines.common.kept_columns import column_of
from trustrl.engines.common.sampled_record import UNKNOWN, SampledRecord
from trustrl.engines.refusals.trl import OLDEST_FUSED
from trustrl.engines.trl import TrustRegionGRPOTrainer, TrustRegionMixin, rollout_fields
from trustrl.errors import ConfigError, EngineError, MissingDataError, NonFiniteError, RecordError, TrustRLWarning

EDGE = 0.002
REGION = regions.DPPO(regions.BinaryTV(max_increase=EDGE, max_decrease=EDGE))
TOOL = slice(2, 4)
"""Places of a completion that an environment wrote, where there is one."""


def sampler_network(width=0.003):
    network = world.tiny_model().eval()
    world.drift(network, width)
    return network


@torch.no_grad()
def draw(network, prompts, length):
    """(ids, log-probs) for each prompt; ends with no EOS."""
    ids, logps = [], []
    for prompt in prompts:
        drawn, recorded = [], []
        for _ in range(length):
            logp = network(torch.tensor([prompt + drawn])).logits[0, -1].log_softmax(-1)
            logp = logp.index_fill(0, torch.arange(3), -torch.inf).log_softmax(-1)
            drawn.append(int(torch.multinomial(logp.exp(), 1)))
            recorded.append(network(torch.tensor([prompt + drawn])).logits[0, -2].log_softmax(-1)[drawn[-1]].item())
        ids.append(drawn)
        logps.append(recorded)
    return ids, logps


def rollout_func(network, *, records="logprobs", tool=False, length=6):
    """As TRL calls it: (prompts, trainer) → prompt_ids, completion_ids, logprobs."""

    def roll_out(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        ids, logps = draw(network, prompt_ids, length)
        if records == "nonsense":
            logps = [[-1.0] * length for _ in logps]
        if isinstance(records, dict):
            logps = [[records.get(at, x) for at, x in enumerate(row)] for row in logps]
        more = {}
        if tool:
            more["env_mask"] = [[int(not TOOL.start <= at < TOOL.stop) for at in range(length)] for _ in ids]
            if not isinstance(records, dict):
                logps = [[0.0 if TOOL.start <= at < TOOL.stop else x for at, x in enumerate(row)] for row in logps]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None if records is None else logps, **more}

    return roll_out


def trainer_of(region=REGION, *, roll_out, cls=TrustRegionGRPOTrainer, given=None, **more):
    usual = {"max_steps": 2, "num_iterations": 2, "learning_rate": 1e-2, "logging_steps": 1}
    args = world.settings(**usual | more)
    ours = {"region": region, "metrics": "all", **(given or {})}
    return world.trainer_of(cls, world.tiny_model(), args, rollout_func=roll_out, **ours)


def logs(trainer):
    return [entry for entry in trainer.state.log_history if "trustrl/tokens" in entry]


@torch.no_grad()
def test_recorded_log_probs_are_mu_their_mismatch_is_reported_and_masks_follow_them(monkeypatch):
    trainer = trainer_of(roll_out=rollout_func(sampler_network()), given={"measure_mismatch": True})
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    rollouts, original = [], GRPOTrainer._generate_and_score_completions

    def watched(self, inputs):
        rollouts.append(original(self, inputs))
        return rollouts[-1]

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
    seen = world.spy(monkeypatch)
    with torch.enable_grad():
        trainer.train()
    assert len(rollouts) == 1
    assert len(seen) == 2

    trainer.model.load_state_dict(first)
    trainers = world.at_sampled(world.logprobs(trainer.model, rollouts[0]), rollouts[0])
    recorded = rollouts[0]["sampling_per_token_logps"]
    gap = (trainers - recorded).abs()
    assert gap.mean() > 0.01, "the sampler must differ from the trainer for this test to say something"
    before, after = logs(trainer)
    print(
        {name: before[f"trustrl/{name}"] for name in ("mismatch_abs_mean", "mismatch_max", "masked_share", "ratio_max")}
    )
    assert before["trustrl/mismatch_abs_mean"] == pytest.approx(gap.mean().item(), rel=1e-4)
    assert before["trustrl/ratio_mean"] == pytest.approx(torch.exp(trainers - recorded).mean().item(), rel=1e-4)
    assert after["trustrl/mismatch_abs_mean"] == before["trustrl/mismatch_abs_mean"]

    for out, policy, rollout in seen:
        assert sorted(rollout.behavior_logp.flatten().tolist()) == sorted(recorded.flatten().tolist())
        pi, mu, sign = policy.logp.exp(), rollout.behavior_logp.exp(), rollout.advantage.sign()
        leaves = (sign * (pi - mu) > EDGE) & (sign != 0)
        assert torch.equal(~out.decision.keep, leaves)
        assert 0.02 < leaves.double().mean() < 0.9
    assert before["trustrl/masked_share"] > 0.02, "against the trainer's own log-probs nothing has moved yet"


def test_the_trainers_log_probs_in_place_of_recorded_ones_are_refused_before_the_first_step():
    trainer = trainer_of(roll_out=rollout_func(sampler_network()), given={"behavior": "trainer"})
    with pytest.raises(
        ConfigError, match=r"behavior must be 'sampler' when the rollout carries .*got 'trainer'.*anchor='proximal'"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_rollout_func_that_records_nothing_is_refused_and_the_trainer_may_stand_in_by_name():
    silent = rollout_func(sampler_network(), records=None)
    with pytest.raises(MissingDataError, match=r"sampler must record .*'logprobs'.*anchor='proximal'"):
        trainer_of(roll_out=silent).train()
    trainer = trainer_of(roll_out=silent, given={"behavior": "trainer"})
    trainer.train()
    assert logs(trainer)[0]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_recorded_log_probs_that_are_not_the_samplers_are_refused_before_the_first_step():
    trainer = trainer_of(roll_out=rollout_func(sampler_network(), records="nonsense"))
    with pytest.raises(EngineError, match=r"ratio π/b must be 1 .*the sampler's log-probs"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("value", [float("nan"), None], ids=["NaN", "None, as TRL writes vLLM's NaN"])
def test_a_sampler_that_records_no_number_is_an_error_with_its_cause(value):
    trainer = trainer_of(roll_out=rollout_func(sampler_network(), records={1: value}))
    with pytest.raises(NonFiniteError, match=r"every token in the loss, got NaN at 6 of 36 tokens\. .*speculative"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_no_number_is_needed_where_an_environment_wrote_and_infinity_is_dropped_and_counted():
    records = {0: float("-inf"), TOOL.start: float("nan")}
    roll_out = rollout_func(sampler_network(), records=records, tool=True)
    trainer = trainer_of(roll_out=roll_out, max_steps=1, num_iterations=1)
    with pytest.warns(trustrl.errors.TrustRLWarning, match="tokens were dropped"):
        trainer.train()
    assert logs(trainer)[0]["trustrl/fault_behavior"] == 6


def test_what_an_environment_wrote_is_neither_counted_nor_anchored(monkeypatch):
    trainer = trainer_of(roll_out=rollout_func(sampler_network(), tool=True), max_steps=1, num_iterations=1)
    seen = world.spy(monkeypatch)
    trainer.train()
    ((out, _, rollout),) = seen
    assert not torch.isin(rollout.position, torch.arange(6)[TOOL]).any()
    assert rollout.in_loss.sum() == 6 * 4
    assert logs(trainer)[0]["trustrl/tokens"] == 6 * 4
    assert out.decision.keep.shape == (6 * 4,)


def test_a_region_on_the_trainer_reports_the_mismatch_for_nothing():
    trainer = trainer_of(regions.PPO(anchor="proximal"), roll_out=rollout_func(sampler_network()))
    trainer.train()
    assert logs(trainer)[0]["trustrl/mismatch_abs_mean"] > 0.01
    assert logs(trainer)[0]["trustrl/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_evaluation_takes_the_recorded_log_probs_too():
    data = Dataset.from_dict({"prompt": ["1+1=", "2+1=", "3+1="]})
    trainer = trainer_of(
        roll_out=rollout_func(sampler_network()), given={"measure_mismatch": True, "eval_dataset": data}
    )
    trainer.evaluate()
    found = trainer.state.log_history[-1]
    assert found["eval_trustrl/mismatch_abs_mean"] > 0.01
    assert found["eval_trustrl/ratio_max"] > 1.01


K = 8
fused = pytest.mark.skipif(seam.version_of("trl") < OLDEST_FUSED, reason="an older TRL has no fused output layer")


def recording_func(network, *, width=K, versions=None, length=6, edit=None):
    """A `rollout_func` that also records its most probable ids and, per token, the version of its weights."""

    @torch.no_grad()
    def roll_out(prompts, trainer):
        found = rollout_func(network, length=length)(prompts, trainer)
        tables = []
        for prompt, completion in zip(found["prompt_ids"], found["completion_ids"], strict=True):
            logp = network(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            top = logp.topk(width)
            tables.append((top.indices.numpy(), top.values.numpy()))
        found["trustrl_topk"] = tables if edit is None else edit(tables)
        if versions is not None:
            found["trustrl_version"] = [versions for _ in tables]
        return found

    return roll_out


def test_a_server_that_the_function_names_and_that_does_not_follow_is_named(monkeypatch):
    """The network of `b` is never synced: its log-probs are far from the trainer's."""
    monkeypatch.setattr(replica_gaps, "FEWEST_TOKENS", 8)
    behind = rollout_func(sampler_network())

    @torch.no_grad()
    def roll_out(prompts, trainer):
        found = behind(prompts, trainer)
        found["trustrl_replica"] = ["a", "b"] * (len(prompts) // 2)
        for row, (prompt, completion) in enumerate(zip(found["prompt_ids"], found["completion_ids"], strict=True)):
            if row % 2 == 0:  # `a` follows
                logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
                own = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])
                found["logprobs"][row] = (own[:, 0] + 1e-3).tolist()
        return found

    trainer = trainer_of(roll_out=roll_out, given={"startup_checks": False})
    with pytest.warns(TrustRLWarning, match=r"Replica b stands out at step 0: "):
        trainer.train()
    assert trainer.state.log_history[0]["trustrl/stale_replicas"] == 1
    trainer = trainer_of(roll_out=roll_out, given={"startup_checks": False, "on_stale_replica": "raise"})
    with pytest.raises(EngineError, match=r"Replica b .* Set on_stale_replica='warn' to train on"):
        trainer.train()


@fused
def test_a_top_k_that_the_function_recorded_is_the_anchor_and_reward_functions_do_not_see_it(monkeypatch):
    region = regions.DPPO(regions.TopKTV(k=K, max_increase=EDGE, max_decrease=EDGE))
    network, rewarded = sampler_network(), []

    def reward(completions, **fields):
        rewarded.append(sorted(fields))
        return [float(len(set(completion))) for completion in completions]

    trainer = trainer_of(region, roll_out=recording_func(network, width=K + 4))
    trainer.reward_funcs = [reward]
    seen = world.spy(monkeypatch)
    trainer.train()
    assert len(seen) == 2
    assert not any(name.startswith("trustrl") for fields in rewarded for name in fields)
    for _, policy, rollout in seen:
        assert rollout.topk.ids.shape == (*policy.logp.shape, K)
        own = rollout.topk.ids == rollout.token_ids[..., None]
        inside = own.any(-1)
        assert inside.double().mean() > 0.1
        recorded = torch.where(own, rollout.topk.logp, 0.0).sum(-1)
        torch.testing.assert_close(recorded[inside], rollout.behavior_logp[inside], atol=1e-5, rtol=0)
    first = logs(trainer)[0]
    assert first["trustrl/masked_share"] > 0.02, "against the trainer's own distribution nothing has moved yet"
    assert first["trustrl/divergence_mean"] > 1e-3


def test_versions_per_token_reach_the_records_and_the_bins_of_staleness(monkeypatch):
    trainer = trainer_of(
        roll_out=recording_func(sampler_network(), versions=[-3, -3, -1, -1, 0, 0]), max_steps=1, num_iterations=1
    )
    seen = world.spy(monkeypatch)
    trainer.train()
    ((_, policy, rollout),) = seen
    assert policy.version == 0
    assert rollout.version.tolist() == [-3, -3, -1, -1, 0, 0] * 6
    (entry,) = logs(trainer)
    bins = {name.removeprefix("trustrl/gap_abs_mean_staleness_") for name in entry if "gap_abs_mean_staleness" in name}
    assert bins == {"below_1", "from_1", "from_3"}


@fused
@pytest.mark.parametrize(
    ("edit", "error", "sentence"),
    [
        (lambda tables: None, MissingDataError, r"8 most probable ids at each token, got none.*'trustrl_topk'"),
        (lambda tables: tables[:-1], RecordError, r"one entry per completion, got 5 for 6"),
        (
            lambda tables: [(ids[:, :4], logp[:, :4]) for ids, logp in tables],
            RecordError,
            r"trustrl_topk\[0\] must be ids and log-probs of shape \(6, 8\) or wider, got \(6, 4\)",
        ),
        (
            lambda tables: [(ids[:3], logp[:3]) for ids, logp in tables],
            RecordError,
            r"of shape \(6, 8\) or wider, got \(3, 8\)",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_the_first_step(edit, error, sentence):
    region = regions.DPPO(regions.TopKTV(k=K))
    trainer = trainer_of(region, roll_out=recording_func(sampler_network(), edit=edit))
    with pytest.raises(error, match=sentence):
        trainer.train()
    assert trainer.state.global_step == 0


class RecordsItself(GRPOTrainer):
    """A subclass that samples with a network of its own."""

    def _generate_single_turn(self, prompt_ids, *_):
        ids, logps = draw(self.network, prompt_ids, 6)
        return ids, logps


def test_a_subclass_that_generates_and_records_is_taken_at_its_word():
    cls = type("Mine", (TrustRegionMixin, RecordsItself), {"network": sampler_network()})
    trainer = trainer_of(roll_out=None, cls=cls, given={"measure_mismatch": True})
    trainer.train()
    assert logs(trainer)[0]["trustrl/mismatch_abs_mean"] > 0.01


SIZES = (5, 1, 9, 3, 2, 7)
"""Kept ids at each token of a completion."""


def truncating_func(network, *, records=True):
    """A `rollout_func` that draws from the most probable ids alone, as many as `SIZES` says, and records them."""

    @torch.no_grad()
    def roll_out(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        found = {"prompt_ids": prompt_ids, "completion_ids": [], "logprobs": [], "trustrl_kept": []}
        for prompt in prompt_ids:
            drawn, logps, kept = [], [], []
            for size in SIZES:
                logits = network(torch.tensor([prompt + drawn])).logits[0, -1]
                best = logits.index_fill(0, torch.arange(3), -torch.inf).topk(size)
                logp = best.values.log_softmax(-1)
                at = int(torch.multinomial(logp.exp(), 1))
                drawn.append(int(best.indices[at]))
                logps.append(logp[at].item())
                kept.append(best.indices.tolist())
            found["completion_ids"].append(drawn)
            found["logprobs"].append(logps)
            found["trustrl_kept"].append(kept)
        if not records:
            del found["trustrl_kept"]
        return found

    return roll_out


@fused
@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
def test_kept_ids_that_the_function_recorded_make_the_first_ratio_one(anchor, monkeypatch):
    """The trainer's own weights draw, so every ratio inside the kept sets is 1, and π' inside them is μ."""
    region = regions.DPPO(regions.BinaryTV(max_increase=EDGE, max_decrease=EDGE), anchor=anchor)
    trainer = trainer_of(
        region, roll_out=truncating_func(world.tiny_model().eval()), top_k=9, given={"measure_mismatch": True}
    )
    seen = world.spy(monkeypatch)
    trainer.train()
    first, second = logs(trainer)
    assert first["trustrl/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["trustrl/mismatch_max"] < 1e-4
    assert second["trustrl/ratio_max"] > 1.001
    _, policy, rollout = seen[0]
    assert (rollout.kept_ids >= 0).sum(-1).tolist() == list(SIZES) * 6
    assert rollout.sampling.kept_known
    one = rollout.in_loss & ((rollout.kept_ids >= 0).sum(-1) == 1)
    assert one.any()
    assert policy.logp[one].abs().max() == 0  # the only id that was left


@fused
def test_kept_ids_that_are_missing_are_an_error():
    trainer = trainer_of(roll_out=truncating_func(world.tiny_model().eval(), records=False), top_k=9)
    with pytest.raises(MissingDataError, match=r"got none at 6 tokens of sequence 0\. A rollout_func returns them"):
        trainer.train()


def record_of(versions, **more):
    count, logp = len(versions), -np.float32(0.75) * np.arange(1, K + 1, dtype=np.float32)
    return SampledRecord(
        tokens=np.arange(5, 5 + count, dtype=np.int32), logp=logp[:count],
        topk_ids=np.tile(np.arange(5, 5 + K, dtype=np.int32), (count, 1)), topk_logp=np.tile(logp, (count, 1)),
        version=np.array(versions, np.int32), **more,
    )  # fmt: skip


@fused
def test_records_of_any_sampler_are_the_fields_that_the_trainer_reads(monkeypatch):
    """A sampler that draws the same ids in the same order, from weights of two versions and from K kept ids."""
    kept = column_of([list(range(5, 5 + K))] * 4)

    def roll_out(prompts, trainer):
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        return rollout_fields(ids, [record_of([-2, -2, 0, 0], kept=kept, replica="b") for _ in prompts])

    region = regions.DPPO(regions.TopKTV(k=K))
    trainer = trainer_of(
        region, roll_out=roll_out, top_k=K, max_steps=1, num_iterations=1, given={"startup_checks": False}
    )
    seen = world.spy(monkeypatch)
    trainer.train()
    ((_, _, rollout),) = seen
    assert rollout.token_ids.tolist() == [5, 6, 7, 8] * 6
    assert rollout.version.tolist() == [-2, -2, 0, 0] * 6
    assert rollout.behavior_logp.tolist() == [-0.75, -1.5, -2.25, -3.0] * 6
    assert rollout.topk.ids.tolist() == [list(range(5, 5 + K))] * 24
    assert (rollout.kept_ids >= 0).sum(-1).tolist() == [K] * 24


def test_a_sampler_that_knows_the_version_of_some_tokens_is_refused():
    assert "trustrl_version" not in rollout_fields([[5]], [record_of([UNKNOWN, UNKNOWN])])
    with pytest.raises(MissingDataError, match=r"of each token or of none, got 1 unknown of 3\. Abort or retract"):
        rollout_fields([[5], [5]], [record_of([UNKNOWN, 3]), record_of([3])])
