"""OpenRLHF's actor in bf16, its default: a policy compared with itself has divergence 0 and ratio 1.

`nox -s precision` measures fp16 too.
"""

import pytest

pytest.importorskip("openrlhf")

from support import precision_layouts, self_divergence as own

KINDS = ("Binary TV", "PPO clip", "both anchors", "Top-K TV", "TROLL")


def test_a_policy_is_itself_in_bf16(tmp_path):
    rows = precision_layouts.run("OpenRLHF", "weights in half precision", "bf16", own.model_folder(tmp_path), KINDS)
    own.check(rows)
    assert [row["kind"] for row in rows] == list(KINDS)
    assert all(row["wide"] for row in rows)  # OpenRLHF turns the logits into float32 first
