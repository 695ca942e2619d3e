"""A rehearsal of DPPO's mixture of experts: Megatron with tensor and expert parallelism over two ranks, and vLLM."""

import os

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core")
pytest.importorskip("pyarrow")
pytest.importorskip("math_verify")

from support.rehearsals import check, rehearse
from trustrl_verl_cpu.vllm_server import VARIABLE


@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} is not set")
@pytest.mark.xdist_group("rehearsal")
def test_dppos_mixture_of_experts_is_rehearsed_with_one_command(tmp_path):
    rehearsal, _ = rehearse(tmp_path, "dppo-moe")
    assert (rehearsal.model.name, rehearsal.sampler.kind) == ("stand-in-qwen3_moe", "vllm")
    assert (rehearsal.layout.tensor_parallel, rehearsal.layout.expert_parallel, rehearsal.engine.ranks) == (2, 2, 2)
    check(tmp_path, rehearsal)
