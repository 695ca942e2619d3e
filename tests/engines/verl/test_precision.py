"""verl's worker in bf16, its default: a policy compared with itself has divergence 0 and ratio 1.

`nox -s precision` measures the other layouts and precisions.
"""

import pytest

pytest.importorskip("verl")

from support import precision_layouts, self_divergence as own
from trustrl.engines.common.seam import version_of

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")

KINDS = ("Binary TV", "Top-K TV", "exact TV")


def test_a_policy_is_itself_in_bf16_and_a_cast_of_the_request_would_be_seen(tmp_path):
    rows = precision_layouts.run("verl", "FSDP2", "bf16", own.model_folder(tmp_path), KINDS)
    own.check(rows)
    assert [row["kind"] for row in rows] == list(KINDS)
    assert [sorted(row["planted"]) for row in rows] == [[], [], ["arguments"]]
