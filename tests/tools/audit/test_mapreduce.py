"""One stream, several processes and Ray Data count the same."""

from functools import partial

import pytest

pytest.importorskip("pyarrow")

from support import recorded
from trustrl.errors import ConfigError, RecordError
from trustrl.recording.record_files import part_files
from trustrl.regions.presets import preset
from trustrl.tools.audit import TokenCounts, arm, count_records
from trustrl.tools.audit.region_replay import COLUMNS

OF = partial(TokenCounts.of, arms=[arm(name, preset(name)) for name in ("ppo", "gspo", "dppo-topk-tv")])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return part_files(recorded.record(tmp_path_factory.mktemp("records"), seeds=range(5)))


def test_processes_count_what_one_stream_counts(files):
    one = count_records(files, OF, kind=TokenCounts, columns=COLUMNS)
    assert int(one.counts["rows"]) > 500
    assert count_records(files, OF, kind=TokenCounts, columns=COLUMNS, workers=2) == one


def test_ray_data_counts_what_one_stream_counts(files, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not the cluster of another test on this machine, which may end first
    try:
        found = count_records(files, OF, kind=TokenCounts, columns=COLUMNS, where="ray")
    finally:
        ray.shutdown()
    assert found == count_records(files, OF, kind=TokenCounts, columns=COLUMNS)


def test_what_does_not_fit_is_refused(files, tmp_path):
    with pytest.raises(ConfigError, match="--workers"):
        count_records(files, OF, kind=TokenCounts, columns=COLUMNS, workers=0)
    with pytest.raises(RecordError, match="none"):
        count_records([], OF, kind=TokenCounts, columns=COLUMNS)
    broken = tmp_path / "step-0.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(RecordError, match="complete Parquet file"):
        count_records([broken], OF, kind=TokenCounts, columns=COLUMNS)
