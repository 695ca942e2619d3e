"""TRL's own correction of the sampler mismatch: what the runs on anchors had (docs/results/first-study.md)."""

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig


def test_by_default_trl_multiplies_a_completion_by_one_ratio_and_drops_it_above_3():
    fields = GRPOConfig.__dataclass_fields__
    assert fields["vllm_importance_sampling_mode"].default == "sequence_mask"
    assert fields["vllm_importance_sampling_clip_max"].default == 3.0
    assert fields["vllm_importance_sampling_clip_min"].default is None
