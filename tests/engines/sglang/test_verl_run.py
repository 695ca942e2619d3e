"""verl's `main_ppo` on Ray with SGLang and truncated sampling: what workers train on against SGLang's own answers.

verl's own SGLang server and weight transfer run unchanged, but for the recording and a log. `colocate_async` pauses
the sampler while it trains, and continues the interrupted answers.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("sglang")
pytest.importorskip("verl")

from support.sglang_world import CPU
from support.verl_cpu_runs import ROLLOUT, logged_run, sequences_of
from trustrl.runner.directory import RunDirectory

SETTINGS = "engine.settings"
LIMITS = {"max_total_tokens": 8192, "enable_memory_saver": False, "enable_weights_cpu_backup": False}
SERVER = {name: CPU[name] for name in ("device", "attention_backend", "sampling_backend")} | LIMITS
COMMON = [
    "records.topk=true", "records.kept_ids=true",
    f"{SETTINGS}.algorithm.rollout_correction.bypass_mode=true",
    f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=200", f"{ROLLOUT}.max_num_seqs=16",
    f"{ROLLOUT}.gpu_memory_utilization={CPU['mem_fraction_static']}",
    *(f"{SETTINGS}.+actor_rollout_ref.rollout.engine_kwargs.sglang.{name}={str(value).lower()}"
      if isinstance(value, bool | int) else
      f'{SETTINGS}.+actor_rollout_ref.rollout.engine_kwargs.sglang.{name}="{value}"' for name, value in SERVER.items()),
]  # fmt: skip
LONG = ["schedule.max_completion_tokens=48", "schedule.steps=4", "schedule.checkpoint_every=4"]
RUNS = {
    "sync": ["region.preset=dppo-topk-tv", "schedule.steps=20", "schedule.checkpoint_every=20"],
    "colocate_async": ["region.preset=troll", "region.anchor=behavior", *LONG],
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """The folder of a run, with the sampler's log next to it."""
    folder = tmp_path_factory.mktemp(request.param)
    server = Path(__file__).with_name("verl_logged_sglang.py")
    settings = [*COMMON, *RUNS[request.param]]
    return logged_run(folder, request.param, settings, server, SGLANG_USE_CPU_ENGINE="1", seconds=2400)


def answers(run):
    with open(run.parent / "sampler.jsonl") as log:
        return [row for row in map(json.loads, log) if "output_token_sampling_mask" in row]


def is_answer(row, kept, logps, token, version):
    """Whether a recorded row holds SGLang's own numbers at one token."""
    k = len(row["topk_ids"])
    return (
        row["token_id"] == token
        and row["behavior_logp"] == pytest.approx(logps[kept.index(token)], abs=1e-6)
        and [i for i in row["topk_ids"] if i >= 0] == kept[:k]
        and row["topk_logp"][: len(kept)] == pytest.approx(logps[:k], abs=1e-6)
        and sorted(row["kept_ids"]) == sorted(kept)
        and row["sampler_version"] == version + 1  # on-policy in the next step
    )


def told_as(rows, log, prompt=None):
    """Whether answers in the log, each to the prompt and answers before it, say exactly what was recorded."""
    if not rows:
        return True
    for answer in log:
        size = len(answer["tokens"])
        if not size or size > len(rows) or (prompt is not None and answer["prompt"] != prompt):
            continue
        told = zip(
            rows[:size], answer["output_token_sampling_mask"], answer["output_token_sampling_logprobs"],
            answer["tokens"], strict=True,
        )  # fmt: skip
        if all(is_answer(*one, answer["version"]) for one in told) and told_as(
            rows[size:], log, answer["prompt"] + answer["tokens"]
        ):
            return True
    return False


def test_every_recorded_token_is_what_sglang_answered(run):
    log, sequences = answers(run), sequences_of(run)
    steps = len(RunDirectory(run).rows())
    assert len(sequences) == steps * 32
    lost = [rows for rows in sequences if not told_as(rows, log)]
    assert not lost, f"{len(lost)} of {len(sequences)}"
    tokens = sum(map(len, sequences))
    print(f"{len(sequences)} sequences, {tokens:,} tokens equal SGLang's answers")
    damaged = [dict(row) for row in sequences[0]]
    damaged[-1]["behavior_logp"] += 1e-3
    assert not told_as(damaged, log)


def test_the_sampler_follows_the_trainer_and_the_reward_rises(run):
    """In bypass mode the ratio of a fresh token is π/μ: 1 only if μ is the truncated distribution of the same weights."""
    rows = RunDirectory(run).rows()
    fresh = [row for row in rows if row["trustrl/staleness_max"] == 0]
    assert fresh, "no step was on-policy"
    print("largest |ratio - 1|:", max(abs(row["trustrl/ratio_mean"] - 1) for row in fresh),
          "largest mean |log π/μ|:", max(row["trustrl/gap_abs_mean"] for row in fresh),
          "rewards:", [round(row["reward"], 3) for row in rows])  # fmt: skip
    assert all(abs(row["trustrl/ratio_mean"] - 1) < 1e-4 for row in fresh)
    assert all(row["trustrl/gap_abs_mean"] < 1e-4 for row in fresh)
    if len(rows) == 20:
        assert sum(row["reward"] for row in rows[-4:]) > 1.5 * sum(row["reward"] for row in rows[:4])


def test_an_answer_that_an_update_interrupted_is_continued_with_its_versions(run):
    if run.parent.name.startswith("sync"):
        pytest.skip("verl waits for all answers before it sends weights")
    assert any(answer["stop"] == "abort" and answer["tokens"] for answer in answers(run))
    versions = [[row["sampler_version"] for row in rows] for rows in sequences_of(run)]
    assert all(one == sorted(one) for one in versions)
