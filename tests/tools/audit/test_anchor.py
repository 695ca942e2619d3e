"""The anchor that a record has, wherever in it that is."""

import pytest

pytest.importorskip("pyarrow")

from support.run_folders import write_records
from trustrl.recording.record_files import part_files
from trustrl.tools.audit.record_anchor import anchor_in

NEITHER = {"behavior_logp": [None, None], "proximal_logp": [None, None]}
TRAINER = NEITHER | {"proximal_logp": [-1.0, -1.0]}


@pytest.mark.parametrize(
    ("files", "anchor"),
    [
        pytest.param([{"behavior_logp": [-1.0, -1.0]}], "behavior", id="the sampler"),
        pytest.param([TRAINER], "proximal", id="the trainer alone"),
        pytest.param([NEITHER, TRAINER, NEITHER], "proximal", id="in the middle alone"),
        pytest.param([NEITHER], "behavior", id="none, which the audit then says"),
    ],
)
def test_the_anchor_is_that_of_the_first_file_that_has_one(files, anchor, tmp_path):
    for step, columns in enumerate(files):
        write_records(tmp_path, columns, step=step)
    assert anchor_in(part_files(tmp_path)) == anchor
    assert anchor_in(part_files(tmp_path), "behavior") == "behavior"
