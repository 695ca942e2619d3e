"""The trainer logs the core metrics by default and all on request; its checks read all of them either way."""

import pytest

pytest.importorskip("trl")

from support import trl_world as world
from trustrl import regions
from trustrl.core.metrics import CORE
from trustrl.engines.trl import TrustRegionGRPOTrainer
from trustrl.errors import ConfigError, TrustRLWarning

REGION = regions.DPPO(regions.BinaryTV(max_increase=0.9, max_decrease=0.9))


def trained(**given):
    settings = world.settings(max_steps=2, num_iterations=2, learning_rate=1e-3, logging_steps=1)
    trainer = world.trainer_of(
        TrustRegionGRPOTrainer, world.tiny_model(), settings, region=REGION, behavior="trainer", **given
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "trustrl/kl_k3" in log]
    assert len(logs) == 2
    return [{name.removeprefix("trustrl/") for name in log if name.startswith("trustrl/")} for log in logs]


def test_the_default_is_the_core():
    # The warning quotes ratio_max, which is not logged. Without it, it would say 1.
    with pytest.warns(TrustRLWarning, match=r"masked no token in the first batch .*largest ratio \d+\.\d+\)"):
        logged = trained()
    assert all(names <= set(CORE) for names in logged)
    assert all({"masked_share", "kl_k3", "divergence_p99", "entropy", "dropped_share"} <= names for names in logged)


@pytest.mark.filterwarnings("ignore:.* masked no token")
def test_all_are_logged_on_request():
    assert all(len(names) > 50 for names in trained(metrics="all"))


def test_another_choice_is_refused_before_the_model_is_loaded():
    with pytest.raises(ConfigError, match="metrics must be one of 'core', 'all', got 'few'"):
        TrustRegionGRPOTrainer("no/such-model", [], region=REGION, metrics="few")
