"""SkyRL's FSDP2 worker in bf16: a policy compared with itself has divergence 0 and ratio 1.

`nox -s precision` measures the other layouts and precisions.
"""

import pytest

pytest.importorskip("skyrl")

from support import precision_layouts, self_divergence as own

KINDS = ("Top-K TV", "TROLL")


def test_a_policy_is_itself_in_bf16(tmp_path):
    rows = precision_layouts.run("SkyRL", "FSDP2, two ranks", "bf16", own.model_folder(tmp_path), KINDS)
    own.check(rows)
    assert [row["kind"] for row in rows] == list(KINDS)
