"""`axolotl train` from a YAML file, with real steps on a CPU."""

import pytest

pytest.importorskip("axolotl")

import trustrl
from support import axolotl_world as world
from trustrl.recording import read


def test_a_yaml_file_trains_with_a_region(tmp_path):
    file = world.write(
        tmp_path,
        trust_region={"preset": "dppo-binary-tv", "max_ratio": 5.0},
        trust_region_options={"metrics": "all", "recording": {"folder": "records", "sample": 1.0}},
    )
    done = world.train(file)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    log = world.trained(file)
    assert [line["step"] for line in log] == list(range(1, world.STEPS + 1))
    for line in log:
        if line["step"] in (1, 5):  # four updates per rollout; the first has the rollout's weights
            assert line["trustrl/ratio_max"] == pytest.approx(1, abs=1e-5)
            assert line["trustrl/masked_share"] == 0
    assert sum(line["trustrl/masked_share"] > 0 for line in log) >= 4
    assert max(line["trustrl/ratio_max"] for line in log) > 2
    assert trustrl.config_from_dict(world.stored_region(file)) == trustrl.preset("dppo-binary-tv", max_ratio=5.0)
    records = read(tmp_path / "records")
    assert len(records.table) == sum(line["trustrl/tokens"] for line in log)


VOCABULARY = {
    "dppo-topk-tv": ({"preset": "dppo-topk-tv", "max_increase": 0.05, "max_decrease": 0.05}, "trustrl/masked_share"),
    "troll": ({"preset": "troll", "bound": 0.01}, "trustrl/projected_share"),
}


@pytest.mark.parametrize("name", VOCABULARY)
def test_a_yaml_file_trains_with_a_region_on_more_of_the_vocabulary(name, tmp_path):
    region, acts = VOCABULARY[name]
    file = world.write(tmp_path, trust_region=region, trust_region_options={"metrics": "all"})
    done = world.train(file)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    log = world.trained(file)
    assert [line["step"] for line in log] == list(range(1, world.STEPS + 1))
    for line in log:
        assert line["trustrl/dropped_share"] == 0
        if line["step"] in (1, 5):  # four updates per rollout; the first has the rollout's weights
            assert line["trustrl/ratio_max"] == pytest.approx(1, abs=1e-5)
            assert line[acts] == 0
    assert sum(line[acts] > 0 for line in log) >= 4
