"""Random histories: overlapping processes, other numbers of ranks, other runs, and kills between any two calls.

`python tests/support/record_histories.py --histories 500` checks more of them.
"""

import pytest

pytest.importorskip("pyarrow")

from support import record_histories

HISTORIES = 30


def test_a_reader_finds_what_the_last_process_of_each_rank_recorded():
    counts = record_histories.run(range(HISTORIES), actions=8)
    assert counts["histories"] == HISTORIES
    for happened in ("kills", "starts", "steps of overlapping processes", "processes stopped", "superseded files"):
        assert counts[happened] >= HISTORIES / 6, counts
    assert counts["foreign runs refused"] >= 3
