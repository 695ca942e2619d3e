"""TRL's trainer in bf16, sharded as accelerate shards it: a policy compared with itself has divergence 0 and ratio 1.

`nox -s precision` measures the other layouts and precisions.
"""

import pytest

pytest.importorskip("trl")

from support import precision_layouts, self_divergence as own

KINDS = ("Binary TV", "Top-K TV", "exact TV")


def test_a_policy_is_itself_in_bf16_and_both_faults_would_be_seen(tmp_path):
    rows = precision_layouts.run("TRL", "FSDP2", "bf16", own.model_folder(tmp_path), KINDS)
    own.check(rows)
    assert all(row["wide"] for row in rows)  # accelerate's policy rounds outputs to bf16; these are from before
    binary, top, exact = (row["planted"] for row in rows)
    assert binary.keys() == top.keys() == {"outputs"}
    assert exact.keys() == {"arguments", "outputs"}


def test_a_remembered_head_has_the_precision_of_the_pass_that_recorded(tmp_path):
    """In float32 products, the float32 weights that FSDP2 shards are not the bf16 weights of a pass."""
    own.check(precision_layouts.run("TRL", "FSDP2, float32 head", "bf16", own.model_folder(tmp_path), ["exact TV"]))
