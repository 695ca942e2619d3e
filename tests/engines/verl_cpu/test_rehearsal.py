"""A rehearsal of TROLL × PPO on verl: `main_ppo` on Ray with FSDP2 on two ranks, and a critic."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support.rehearsals import check, rehearse
from trustrl.engines.common.seam import version_of

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


@pytest.mark.xdist_group("rehearsal")
def test_troll_with_ppo_is_rehearsed_with_one_command(tmp_path):
    rehearsal, said = rehearse(tmp_path, "troll-ppo", TRUSTRL_VLLM_PYTHON="")
    assert rehearsal.model.name == "stand-in-qwen3"
    assert rehearsal.engine.ranks == 2
    assert "NOT THE DATA of open-r1/DAPO-Math-17k-Processed" in said
    check(tmp_path, rehearsal)
