"""What a region on the vocabulary costs on Megatron: memory at a real vocabulary, bytes between ranks."""

import json
import sys

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from support.regions_oracle import HIDDEN, K
from support.verl_launch import ON_MEGATRON, on_ranks


def printed(script, *arguments):
    said = on_ranks(script, 2, *arguments, folder="verl_megatron", modules=ON_MEGATRON)
    return json.loads(said.splitlines()[-1])


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_needs_a_fraction_of_verls_own_logits():
    """Each rank's part of the logits is 311 MB: 1,024 tokens, 75,968 ids, float32. Megatron keeps its gradients."""
    from support.step_memory import LOGITS

    ours, theirs = (printed("verl_megatron_memory.py", preset) for preset in ("dppo-topk-tv", "dppo-binary-tv"))
    assert theirs > LOGITS, f"{theirs / 1e6:.0f} MB"  # the measurement sees logits where there are some
    assert ours < LOGITS / 2, f"{ours / 1e6:.0f} MB"
    assert ours < theirs / 4, f"{ours / 1e6:.0f} and {theirs / 1e6:.0f} MB"


def test_ranks_send_k_plus_3_numbers_per_token_and_nothing_else():
    sent = printed("verl_megatron_bytes.py")
    assert sum(one["rows"] for one in sent) > 20
    for one in sent:
        assert [size for _, size in one["collectives"]] == [4 * (K + 3) * one["rows"]], one


def test_a_record_of_exact_divergences_has_the_models_own_precision(tmp_path):
    """Megatron converts what its model returns to float32, which would double the record and the cost of products."""
    how = {"tp": 2, "dtype": "bfloat16", "only": "exact TV on π'"}
    arguments = tmp_path / "found.json", json.dumps(how)
    on_ranks("verl_megatron.py", 2, *arguments, folder="verl_megatron", modules=ON_MEGATRON)
    (case,) = json.loads((tmp_path / "found.json").read_text())["cases"].values()
    assert case["bytes_per_token"] == 2 * HIDDEN + 8
