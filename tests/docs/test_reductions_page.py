"""The page on reductions states the bytes that the sums of one call have."""

import re
from pathlib import Path

import pytest
import torch

import trustrl

PAGE = (Path(__file__).parents[2] / "docs/concepts/reductions.md").read_text()
ROWS = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| (\d+) \| ([\d,]+) \|$", PAGE, re.M)


def vectors(preset, length):
    """The two vectors that ranks add: of four completions, with a second anchor for the preset that corrects."""
    logp = torch.full((4, length), -1.0)
    in_loss = torch.ones(4, length, dtype=torch.bool)
    proximal = logp if preset == "tis" else None
    rollout = trustrl.RolloutTokens(
        behavior_logp=logp, proximal_logp=proximal, advantage=torch.ones(4), in_loss=in_loss
    )
    policy = trustrl.PolicyTokens(logp=logp - 0.1)
    return trustrl.policy_loss(policy, rollout, trustrl.preset(preset), reduction=trustrl.TokenSum()).sums.flat()


def test_the_page_has_five_presets():
    assert [name for name, *_ in ROWS] == ["pg-is", "cispo", "ppo", "tis", "dppo-binary-tv"]


@pytest.mark.parametrize("length", [8, 512])
@pytest.mark.parametrize(("preset", "added", "highest", "size"), ROWS, ids=[name for name, *_ in ROWS])
def test_a_preset_has_the_stated_sizes_for_any_number_of_tokens(preset, added, highest, size, length):
    sums, extremes = vectors(preset, length)
    assert f"{sums.numel():,}" == added
    assert str(extremes.numel()) == highest
    assert f"{8 * (sums.numel() + extremes.numel()):,}" == size
