"""The tables of the scale plan follow from the counted and measured figures."""

import scale_plan

from trustrl.runner.plan_estimates import BYTES


def test_the_page_is_written_from_the_figures():
    assert scale_plan.page() == scale_plan.PAGE.read_text(encoding="utf-8"), "Run `python scripts/scale_plan.py`."


def test_a_region_keeps_the_bytes_that_the_page_states_for_it():
    assert scale_plan.record_bytes("dppo-binary-tv") == 0
    assert scale_plan.record_bytes("dppo-topk-tv") == 8 * 20
    assert scale_plan.record_bytes("troll") == 8 * 64 + 8
    assert scale_plan.record_bytes("dppo-full-tv", "region.anchor=proximal") == BYTES["bfloat16"] * scale_plan.D + 8
