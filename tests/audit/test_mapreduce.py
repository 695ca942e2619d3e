"""One stream, several processes and Ray Data count the same."""

from functools import partial

import pytest

pytest.importorskip("pyarrow")

import recorded

from trustrl.audit import Summary, arm, summarised
from trustrl.audit.verdicts import COLUMNS
from trustrl.config.presets import preset
from trustrl.errors import ConfigError, RecordError
from trustrl.recording.reading import part_files

OF = partial(Summary.of, arms=[arm(name, preset(name)) for name in ("ppo", "gspo", "dppo-topk-tv")])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return part_files(recorded.record(tmp_path_factory.mktemp("records"), seeds=range(5)))


def test_processes_count_what_one_stream_counts(files):
    one = summarised(files, OF, columns=COLUMNS)
    assert int(one.counts["rows"]) > 500
    assert summarised(files, OF, columns=COLUMNS, workers=2) == one


def test_ray_data_counts_what_one_stream_counts(files):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    try:
        found = summarised(files, OF, columns=COLUMNS, where="ray")
    finally:
        ray.shutdown()
    assert found == summarised(files, OF, columns=COLUMNS)


def test_what_does_not_fit_is_refused(files, tmp_path):
    with pytest.raises(ConfigError, match="--workers"):
        summarised(files, OF, columns=COLUMNS, workers=0)
    with pytest.raises(RecordError, match="none"):
        summarised([], OF, columns=COLUMNS)
    broken = tmp_path / "step-0.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(RecordError, match="whole Parquet file"):
        summarised([broken], OF, columns=COLUMNS)
