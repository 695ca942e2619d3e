"""Our DPPO against TRL 1.8.0's DPPOTrainer, the last release that has one: the same weights, batch and thresholds.

Set TRUSTRL_TRL_1_8 to a folder made by `pip install --no-deps --target FOLDER trl==1.8.0`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from safetensors.torch import load_file, save_file

from support import trl_world as world
from trustrl import regions

RELEASE = os.environ.get("TRUSTRL_TRL_1_8")
pytestmark = [
    pytest.mark.skipif(
        RELEASE is None, reason="TRUSTRL_TRL_1_8 is not set: pip install --no-deps --target FOLDER trl==1.8.0"
    ),
    pytest.mark.xdist_group("TRL's own DPPO"),
]

LOW, HIGH, CAP, K = {"tv": 0.06, "kl": 0.02}, {"tv": 0.08, "kl": 0.03}, 20.0, 20
SMALL_K = 5
STATISTICS = {
    "binary_tv": regions.BinaryTV,
    "binary_kl": regions.BinaryKL,
    "topk_tv": regions.TopKTV,
    "topk_kl": regions.TopKKL,
}
STEPS = [(1, 1), (1, 4), (2, 4)]
"""(gradient_accumulation_steps, steps_per_generation)."""


def region(kind: str, k: int = K) -> regions.DPPO:
    bounds = {"max_decrease": LOW[kind[-2:]], "max_increase": HIGH[kind[-2:]]}
    more = {"k": k} if kind.startswith("topk") else {}
    return regions.DPPO(STATISTICS[kind](**bounds, **more), max_ratio=CAP)


def their_settings(kind: str, k: int = K, **more) -> dict:
    return {
        "divergence_type": kind, "divergence_topk": k, "clip_ratio_c": CAP, "epsilon": LOW[kind[-2:]],
        "epsilon_high": HIGH[kind[-2:]], "max_completion_length": world.COMPLETION, **more,
    }  # fmt: skip


def policy_model():
    """The rollout's weights some steps later."""
    model = world.tiny_model()
    world.drift(model, 0.02)
    return model


def make_batch() -> dict[str, torch.Tensor]:
    """Drawn from the behavior weights' top K, so that the recorded top K holds every sampled id.

    Two tokens with A < 0 are recorded as rarer than they were: pulled back, so kept, at a ratio above the cap.
    """
    behavior = world.tiny_model()
    inputs = world.sequences()
    world.draw(behavior, inputs, top=K, seed=1)
    logp = world.logprobs(behavior, inputs)
    for row, at in ((1, 3), (4, 6)):
        logp[row, at, inputs["completion_ids"][row, at]] -= 5.0
    top = world.logprobs(behavior, inputs).topk(K, dim=-1).indices
    return inputs | {
        "sampling_per_token_logps": world.at_sampled(logp, inputs),
        "sampling_topk_logps": logp.gather(-1, top),
        "sampling_topk_token_ids": top,
    }


@pytest.fixture(scope="module")
def batch():
    return make_batch()


@pytest.fixture(scope="module")
def answers(batch, tmp_path_factory) -> Path:
    """A folder with 1.8.0's answer to everything this file asks, from one run of it."""
    folder = tmp_path_factory.mktemp("dppo")
    world.tiny_model().save_pretrained(folder / "behavior")
    policy_model().save_pretrained(folder / "policy")
    world.tokenizer().save_pretrained(folder / "tokenizer")
    num_items = {"num_items_in_batch": batch["completion_mask"].sum().float()}
    jobs = [
        {"name": f"{kind}-{accumulated}-{per_generation}", "settings": their_settings(
            kind, gradient_accumulation_steps=accumulated, steps_per_generation=per_generation
        )}
        for kind in STATISTICS for accumulated, per_generation in STEPS
    ]  # fmt: skip
    prompts = [ids[on.bool()].tolist() for ids, on in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    jobs += [
        {"name": f"rollout-{kind}", "settings": their_settings(kind, SMALL_K), "generate": prompts}
        for kind in ("topk_tv", "topk_kl")
    ]
    save_file(batch | num_items, folder / "batch.safetensors")
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = os.environ | {"PYTHONPATH": str(RELEASE), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("dppo_oracle.py")
    done = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def our_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same batch under the names our trainer adds."""
    return batch | {
        "num_items_in_batch": batch["completion_mask"].sum(),
        "trustrl_version": torch.full_like(batch["completion_ids"], -1),
        "trustrl_behavior_logp": batch["sampling_per_token_logps"],
        "trustrl_topk_ids": batch["sampling_topk_token_ids"].int(),
        "trustrl_topk_logp": batch["sampling_topk_logps"],
    }


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize(("accumulated", "per_generation"), STEPS)
def test_our_dppo_has_the_gradient_of_trls_but_for_its_divisor(kind, accumulated, per_generation, answers, batch):
    """`num_items_in_batch` counts a whole generation, of which one optimiser step sees `accumulated /
    per_generation`: 1.8.0 divides by all of it, TRL 1.16 and we by the step's part."""
    wanted = load_file(answers / f"{kind}-{accumulated}-{per_generation}.safetensors")
    up, down = wanted.pop("masked_positive").item(), wanted.pop("masked_negative").item()
    steps = {"gradient_accumulation_steps": accumulated, "steps_per_generation": per_generation}
    trainer = world.ours(region(kind), policy_model(), **steps)
    found = world.result(trainer, our_inputs(batch))
    assert min(up, down) > 0.02
    assert 0.05 < up + down < 0.6
    stopped = found.metrics["clip_ratio/high_mean"], found.metrics["clip_ratio/low_mean"]
    assert stopped == pytest.approx((up, down), abs=1e-6)
    assert found.metrics["trustrl/capped_share"] > 0
    too_small = per_generation / accumulated
    wanted = {name: too_small * x for name, x in wanted.items()}
    assert world.error(found.gradient, wanted) <= 1e-6


@pytest.mark.parametrize("kind", ["topk_tv", "topk_kl"])
def test_where_the_sampled_id_is_outside_the_top_k_trl_replaces_the_kth_id_and_we_take_the_union(
    kind, answers, monkeypatch
):
    """1.8.0's own rollout at K = 5. Replacing merges the K-th id into the rest, which can only lose divergence: .010 of
    TV and .008 nats on average here, nothing where the sampled id is inside."""
    rollout = load_file(answers / f"rollout-{kind}.safetensors")
    theirs = rollout.pop("divergence")
    trainer = world.ours(region(kind, SMALL_K))
    inputs = rollout | {"num_items_in_batch": rollout["completion_mask"].sum(), "advantages": torch.ones(6)}
    del inputs["sampling_per_token_logps"]  # 1.8.0's sampler was its trainer, and ours records its own
    recorded = trainer._recorder.record(trainer.model, inputs, version=-1, rows=6)
    on = rollout["completion_mask"].bool()
    ids = world.laid_out(inputs | recorded, "trustrl_topk_ids", -1).long()
    outside = on & ~(ids == rollout["completion_ids"].unsqueeze(-1)).any(-1)
    inside = on & ~outside
    assert min(inside.sum(), outside.sum()) >= 10

    # What is recorded: the same, but for the last id where the sampled one has taken its place.
    assert torch.equal(ids[inside], rollout["sampling_topk_token_ids"][inside])
    assert torch.equal(ids[outside][:, :-1], rollout["sampling_topk_token_ids"][outside][:, :-1])
    assert torch.equal(rollout["completion_ids"][outside], rollout["sampling_topk_token_ids"][outside][:, -1])
    torch.testing.assert_close(recorded["trustrl_behavior_logp"][on], rollout["sampling_per_token_logps"][on])

    # What is measured, at the policy's weights.
    world.drift(trainer.model, 0.02)
    seen = world.spy(monkeypatch)
    world.result(trainer, inputs | recorded)
    ours = torch.zeros(on.shape).masked_scatter(on, seen[0][0].decision.divergence.lower.float())
    torch.testing.assert_close(ours[inside], theirs[inside], atol=2e-6, rtol=1e-5)
    lost = (ours - theirs)[outside]
    assert lost.min() >= -2e-6
    assert 0.005 < lost.mean() < 0.02
