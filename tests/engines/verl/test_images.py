"""Regions on a vision-language model in a real verl training worker: loss and gradient against two plain models."""

import pytest

pytest.importorskip("verl")

import torch

import trustrl
from support import regions_oracle as oracle, tiny_vision as tiny, verl_world as world
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


def grown(folder, growth=1.0):
    model = type(tiny.model()).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(growth)
    return model


@pytest.fixture(scope="module")
def world_of_images(tmp_path_factory):
    """The model's folder, the recorded log-probs, and what each region must find."""
    folder = tmp_path_factory.mktemp("vision")
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    rows = tiny.rows()
    tokens = torch.stack([torch.nn.functional.pad(row.response, (0, tiny.LONGEST - len(row.response))) for row in rows])
    in_loss = torch.stack([torch.arange(tiny.LONGEST) < len(row.response) for row in rows])
    anchor = grown(folder)
    with torch.no_grad():
        before = tiny.distribution(anchor, rows, oracle.TEMPERATURE)
    expected = {}
    for name, region in tiny.REGIONS.items():
        policy = grown(folder, oracle.GROWTH)
        now = tiny.distribution(policy, rows, oracle.TEMPERATURE)
        advantages = tiny.ADVANTAGES.unsqueeze(1).expand(in_loss.shape)
        out = tiny.loss(before, now, tokens, in_loss, advantages, in_loss / in_loss.sum(), region)
        out.loss.backward()
        gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
        expected[name] = (out.loss.item(), gradient, trustrl.rates(out.sums))
    recorded = folder / "recorded.pt"
    torch.save(
        {
            "proximal_logp": before.gather(-1, tokens.unsqueeze(-1)).squeeze(-1),
            "positions": [row.positions(anchor) for row in rows],
        },
        recorded,
    )
    return folder, recorded, expected


def test_a_worker_trains_on_images_with_every_kind_of_region(world_of_images, tmp_path):
    """Padded: without padding, verl's attention of these models calls flash-attention."""
    folder, recorded, expected = world_of_images
    on_ranks("verl_images.py", 1, folder, recorded, tmp_path / "found")
    found = torch.load(tmp_path / "found", weights_only=False)
    assert found.keys() == expected.keys()
    for name, (loss, gradient, rates) in expected.items():
        ours = found[name]["metrics"]
        assert ours["loss"] == [pytest.approx(loss, abs=1e-5)], name
        assert world.error(found[name]["gradient"], gradient) <= 1e-5, name
        for key in ("trustrl/tokens", "trustrl/masked_share", "trustrl/ratio_max"):
            assert ours[key] == [pytest.approx(rates[key], rel=1e-4, abs=1e-5)], (name, key)
