"""Regions on a vision-language model in TRL's own trainer: each loss and gradient against two plain models."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

import torch
from datasets import Dataset
from trl import GRPOTrainer

import trustrl
from support import tiny_vision as tiny, trl_world as world
from trustrl.engines.common.seam import version_of
from trustrl.engines.trl import TrustRegionGRPOTrainer, anchors
from trustrl.engines.trl.sampler import _comparable
from trustrl.engines.trl.stock_record import record
from trustrl.recording import read

pytestmark = pytest.mark.skipif(version_of("trl") < (1, 15), reason="older versions have no fused output layer")

PASSED = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
IMAGES = (1, 0, 2, 1, 1, 2, 1, 1)
STEPS = 8


class Compared(TrustRegionGRPOTrainer):
    """Compares each of its losses with a direct computation."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compared = []

    def _generate_and_score_completions(self, inputs):
        self.before = {name: x.detach().clone() for name, x in self.model.state_dict().items()}
        rollout = super()._generate_and_score_completions(inputs)
        self.num_images = rollout.get("num_images")
        return rollout

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        weights = dict(model.named_parameters())
        gradient = torch.autograd.grad(loss, [*weights.values()], retain_graph=True, allow_unused=True)
        wanted, wanted_gradient, acted = direct(self, model, inputs)
        pairs = [(x, y) for x, y in zip(gradient, wanted_gradient, strict=True) if y is not None]
        assert all(x is not None for x, _ in pairs)
        largest = max(y.abs().max() for _, y in pairs)
        vision = [y for name, y in zip(weights, wanted_gradient, strict=True) if "visual" in name and y is not None]
        self.compared.append(
            {
                "loss": abs(loss.item() - wanted.item()),
                "gradient": (max((x - y).abs().max() for x, y in pairs) / largest).item(),
                "vision": max((y.abs().max() for y in vision), default=torch.tensor(0.0)).item(),
                "images": inputs.get("num_images"),
                "acted": acted,
            }
        )
        return loss


def direct(trainer, model, inputs):
    """The loss, its gradient and the share of masked or projected tokens, from the whole logits of two plain models."""
    length = inputs["completion_ids"].shape[1]
    ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    images = {name: inputs[name] for name in PASSED if inputs.get(name) is not None}

    def distribution(weights):
        plain = tiny.model()
        plain.load_state_dict(weights)
        logits = plain(input_ids=ids, attention_mask=mask, **images).logits[:, -length - 1 : -1]
        return plain, (logits / trainer.temperature).log_softmax(-1)

    with torch.no_grad():
        _, before = distribution(trainer.before)
    policy, now = distribution(model.state_dict())
    in_loss = inputs["completion_mask"].bool()
    weights = in_loss / in_loss.sum() / trainer.current_gradient_accumulation_steps  # loss_type="bnpo"
    advantages = inputs["advantages"]
    out = tiny.loss(before, now, inputs["completion_ids"], in_loss, advantages, weights, trainer.region)
    gradient = torch.autograd.grad(out.loss, [*policy.parameters()], allow_unused=True)
    rates = trustrl.rates(out.sums)
    return out.loss.detach(), gradient, rates.get("trustrl/projected_share", rates["trustrl/masked_share"])


def trainer_of(kind, counts, **more):
    own = {name: more.pop(name) for name in ("region", "behavior", "startup_checks") if name in more}
    args = world.settings(
        per_device_train_batch_size=4, steps_per_generation=2, max_steps=STEPS, learning_rate=3e-3, loss_type="bnpo",
        temperature=0.9, logging_steps=1, **more,
    )  # fmt: skip
    data = Dataset.from_list(tiny.prompts(counts))
    return kind(
        model=tiny.model(), reward_funcs=reward, args=args, train_dataset=data, processing_class=tiny.processor(), **own
    )


def reward(completions, **_):
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


def trained(name, counts=IMAGES, **more):
    trainer = trainer_of(Compared, counts, region=tiny.REGIONS[name], behavior="trainer", **more)
    trainer.train()
    assert trainer.state.global_step == STEPS
    for compared in trainer.compared:
        assert compared["loss"] <= 1e-5, (name, compared)
        assert compared["gradient"] <= 1e-5, (name, compared)
    return trainer.compared


@pytest.mark.parametrize("name", tiny.REGIONS)
def test_eight_steps_with_images_are_those_of_plain_models(name):
    """Two updates a rollout, so TRL scores it, four rows at a time; the second update is away from its anchor."""
    compared = trained(name)
    assert {0, 1, 2} <= {count for step in compared for count in step["images"]}
    assert all(step["vision"] > 1e-4 for step in compared[1::2])
    assert sum(step["acted"] for step in compared) > 0


@pytest.mark.parametrize("name", tiny.REGIONS)
def test_our_own_pass_over_a_rollout_takes_its_images_four_rows_at_a_time(name, monkeypatch):
    passes = []
    forward = anchors.AnchorRecorder._forward

    def watched(self, model, rollout, rows, kept):
        passes.append((len(rollout["completion_ids"]), rows))
        return forward(self, model, rollout, rows, kept)

    monkeypatch.setattr(anchors.AnchorRecorder, "_forward", watched)
    monkeypatch.setattr(anchors.AnchorRecorder, "shares_trls_pass", False)
    # On the sampled token, TRL's own log-probs serve. It makes none if one update takes the whole rollout.
    trained(name, **({"gradient_accumulation_steps": 2} if name == "binary" else {}))
    assert set(passes) == {(8, 4)}


def test_a_rollout_of_text_trains_a_vision_language_model():
    compared = trained("top-K", counts=(0,) * 8)
    assert all(step["images"] is None and step["vision"] == 0 for step in compared)


def test_a_stock_run_with_images_is_recorded(tmp_path):
    trainer = trainer_of(GRPOTrainer, IMAGES)
    record(trainer, tmp_path, sample=1.0)
    trainer.train()
    tokens = read(tmp_path)
    assert tokens["step"].unique().tolist() == [*range(STEPS)]
    # Within the two passes' rounding, the first update of each rollout is at the weights of its anchor.
    first = tokens["step"] % 2 == 0
    torch.testing.assert_close(tokens["policy_logp"][first], tokens["proximal_logp"][first], rtol=0, atol=1e-5)


def test_the_samplers_prefill_scores_no_images():
    trainer = trainer_of(Compared, IMAGES, region=tiny.REGIONS["binary"], behavior="trainer")
    assert not _comparable(trainer)
