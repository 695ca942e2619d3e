"""Every kind of region in a real verl training worker on VeOmni: its gradient and its metrics against plain models."""

import json

import pytest

pytest.importorskip("verl")
pytest.importorskip("veomni")

from support import regions_oracle as oracle
from support.verl_launch import on_ranks

SETUPS = {
    "two replicas, padded": {"packed": False},
    "Ulysses": {"ulysses": 2},
    "experts on two ranks, recomputed activations": {"moe": True, "expert_parallel": 2, "recompute": True},
    "replayed routes under Ulysses": {"moe": True, "ulysses": 2, "replay": "R3"},
}


def run(folder, how):
    on_ranks("verl_veomni.py", 2, folder / "found", json.dumps(how), folder="verl_veomni")
    return json.loads((folder / "found").read_text())


@pytest.mark.parametrize("setup", SETUPS)
def test_a_worker_on_veomni_trains_with_every_kind_of_region(setup, tmp_path):
    """Micro-batches, one of them without a token in the loss; ranks; both anchors; verl's KL and entropy terms."""
    found = run(tmp_path, SETUPS[setup])
    assert found["replicas"] == 2 // SETUPS[setup].get("ulysses", 1)
    assert found["cases"].keys() == (oracle.CASES | oracle.TRUNCATED).keys()
    for name, ours in found["cases"].items():
        assert ours["error"] <= 5e-6, name
        reported = {key: value for key, value in ours["wanted"].items() if key in ours["metrics"]}
        assert {"trustrl/tokens", "trustrl/masked_share", "trustrl/gap_max", "trustrl/log_ratio_p99"} <= reported.keys()
        for key, value in reported.items():
            assert ours["metrics"][key] == [pytest.approx(value, rel=1e-4, abs=1e-5)], (name, key)
        if setup == "Ulysses" and name in oracle.AGREEING:
            oracle.check_agreement(name, ours["keep"], ours["weight"])  # the same as in TRL


def test_the_comparison_fails_if_the_oracle_does_not_follow_the_replayed_routes(tmp_path):
    how = SETUPS["replayed routes under Ulysses"] | {"routed_natively": True, "only": "top-K on μ"}
    assert run(tmp_path, how)["cases"]["top-K on μ"]["error"] > 0.1
