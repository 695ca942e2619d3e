"""Records with π' alone, as a transformers sampler leaves them: every verb measures from it and says so."""

import json

import pytest

pytest.importorskip("pyarrow")

from support import recorded
from support.run_folders import write_records
from trustrl.cli import main

NOTE = "Measured from π' (proximal_logp)"


@pytest.fixture
def without_sampler(tmp_path):
    """4,000 tokens whose policy moved in every tenth; the sampler's log-probs were not recorded."""
    moved = [-2.5 if index % 10 == 0 else -1.0 for index in range(4000)]
    for step, policy in enumerate(([-1.0] * 4000, moved)):
        columns = {
            "behavior_logp": [None] * 4000, "proximal_logp": [-1.0] * 4000, "policy_logp": policy,
            "sequence": [1] * 4000, "update": [step] * 4000, "advantage": [-1.0] * 4000,
        }  # fmt: skip
        write_records(tmp_path, columns, step=step, region=None)
    return tmp_path


def test_audit_replays_regions_from_the_anchor_that_is_there(without_sampler, capsys):
    assert main(["audit", str(without_sampler), "--regions", "dppo-binary-tv,ppo"]) == 0
    said = capsys.readouterr().out
    assert NOTE in said
    assert "recorded without a region" in said
    assert main(["audit", str(without_sampler), "--regions", "dppo-binary-tv,ppo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["anchor"] == "proximal"
    assert [found["regions"][name]["stopped"] for name in ("dppo-binary-tv", "ppo")] == [400, 400]


def test_calibrate_measures_the_trainers_own_noise(without_sampler, capsys):
    assert main(["calibrate", str(without_sampler)]) == 0
    assert NOTE in capsys.readouterr().out
    assert main(["calibrate", str(without_sampler), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["anchor"], found["noise"], found["proximal"]) == ("proximal", 4000, 0)
    assert found["statistics"]["tv"]["recommended"] == found["statistics"]["tv"]["published"]


def test_bound_reads_the_anchor_that_is_there(tmp_path, capsys):
    columns = {
        "behavior_logp": [None] * 4,
        "proximal_logp": [-1.0] * 4,
        "sequence": [0, 0, 1, 1],
        "position": [0, 1] * 2,
    }
    write_records(tmp_path, columns)
    recorded.add_rewards(tmp_path)
    assert main(["bound", str(tmp_path)]) == 0
    assert "μ is proximal_logp" in capsys.readouterr().out


def test_the_sampler_comes_first_and_either_can_be_asked_for(tmp_path, capsys):
    recorded.record(tmp_path)
    for arguments, anchor in (([], "behavior"), (["--anchor", "proximal"], "proximal")):
        assert main(["audit", str(tmp_path), "--regions", "ppo", "--json", *arguments]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["anchor"] == anchor
        assert found["reproduced"]["rows"] > 0
        assert found["reproduced"]["kept_differs"] == 0


@pytest.mark.parametrize("verb", ["audit", "calibrate"])
def test_an_anchor_that_is_not_recorded_is_refused(tmp_path, verb, capsys):
    recorded.record(tmp_path, proximal=False)
    assert main([verb, str(tmp_path), "--anchor", "proximal"]) == 1
    assert "Pass --anchor behavior" in capsys.readouterr().err
