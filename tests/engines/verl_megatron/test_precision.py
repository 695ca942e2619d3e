"""verl's Megatron worker in bf16, its default: a policy compared with itself has divergence 0 and ratio 1.

`nox -s precision` measures the other layouts and precisions.
"""

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from support import precision_layouts, self_divergence as own
from support.devices import ON_GPU

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="verl's optimizer for fp16 needs transformer-engine")
KINDS = ("Binary TV", "Top-K TV", "TROLL", "exact TV")


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=needs_gpu)])
def test_a_policy_is_itself_in_16_bits(precision, tmp_path):
    rows = precision_layouts.run("Megatron", "tensor parallel 2", precision, own.model_folder(tmp_path), KINDS)
    own.check(rows)
    assert [row["kind"] for row in rows] == list(KINDS)
    assert all(row["wide"] for row in rows)
