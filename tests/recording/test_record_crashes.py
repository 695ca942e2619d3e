"""The record of two ranks after power failures, in a run whose checkpoints are the engine's own."""

import os
from collections import Counter

import pytest
from failures import record_crashes

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the names of open files are read there")


def test_a_record_that_is_synced_before_checkpoints_is_whole_after_every_power_failure(tmp_path):
    kinds = Counter(kind for _, kind, _ in record_crashes.outcomes(tmp_path, 30))
    assert kinds == {"exact": 30}


def test_without_the_sync_steps_are_lost(tmp_path):
    """The test above can fail."""
    assert any(kind == "silent" for _, kind, _ in record_crashes.outcomes(tmp_path, 20, synced=False))
