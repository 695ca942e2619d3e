"""A training step of a verl worker with a region on the vocabulary never holds a number per token and word."""

import json
import sys

import pytest

pytest.importorskip("verl")

from support.step_memory import LOGITS
from support.uneven import LARGE, SMALL
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of

pytestmark = [
    pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]


def peak_beside_gradients(preset):
    """Bytes a step needs beyond weights, optimiser and gradients."""
    found = json.loads(on_ranks("verl_memory.py", 1, preset).splitlines()[-1])
    return found["peak"] - found["gradients"]


@pytest.mark.parametrize("preset", ["dppo-topk-tv", pytest.param("troll", marks=pytest.mark.long)])
def test_a_step_at_a_real_vocabulary_needs_a_third_of_the_logits_memory(preset):
    """One copy of the logits is 622 MB; a second copy of the gradients, which FSDP2 makes, is 78 of what is left."""
    used = peak_beside_gradients(preset)
    assert used < LOGITS / 3, f"{used / 1e6:.0f} MB"


def test_verls_own_forward_pass_holds_several_copies_of_the_logits():
    """Regions on sampled tokens use it; and the measurement sees logits where there are some."""
    used = peak_beside_gradients("dppo-binary-tv")
    assert used > 2 * LOGITS, f"{used / 1e6:.0f} MB"


@pytest.mark.parametrize("longest", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)])
def test_memory_follows_tokens_and_not_the_longest_response(longest):
    """One long response, and 31 of 1/32 of its length; padded, TROLL takes 170 MB at 1,024 tokens and not 20."""
    peaks = json.loads(on_ranks("verl_uneven.py", 1, longest).splitlines()[-1])
    for name, peak in peaks.items():
        assert peak["uneven"]["wide"] < 1.02 * peak["even"]["wide"], name
        assert peak["uneven"]["whole"] < 1.1 * peak["even"]["whole"], name
