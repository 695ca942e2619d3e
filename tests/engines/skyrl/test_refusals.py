"""Every row of SkyRL's table of refused settings, on SkyRL's own configuration."""

import pytest

pytest.importorskip("skyrl")

from skyrl.train.config import make_config

import trustrl
from support.refusal_examples import SKYRL, cases
from trustrl.engines import skyrl as engine
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.skyrl import ALGORITHM_ROWS, ROWS
from trustrl.errors import ConfigError

WORKING = {"gspo": ["trainer.algorithm.loss_reduction=sequence_mean"]}


def configured(case, settings):
    """SkyRL's configuration with these settings, and the example's region."""
    made = make_config(algorithm_cls=engine.RegionAlgorithmConfig)
    lines = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    region = [f"trainer.algorithm.region.{key}={value}" for key, value in case.region.items()]
    name = f"trainer.algorithm.policy_loss_type=trustrl-{case.preset}"
    return made.from_cli_overrides([name, *WORKING.get(case.preset, []), *region, *lines])


@pytest.mark.parametrize("case", cases(ROWS, SKYRL), ids=lambda case: case.row.setting)
def test_each_row_of_skyrl_s_table_refuses_its_example(case):
    row, config = case.row, configured(case, case.settings)
    region = engine.region_of(f"trustrl-{case.preset}", config.trainer.algorithm)
    rows.check([one for one in ROWS if one is not row], rows.reader(config), region)
    with pytest.raises(ConfigError) as refused:
        engine.check_settings(config)
    assert str(refused.value).startswith(row.setting.split("{")[0])
    assert f" must be {row.must_be.split('{')[0]}" in str(refused.value)
    assert row.why.split("{")[-1].split("}")[-1] in str(refused.value)
    if case.settings:
        engine.check_settings(configured(case, {}))  # the example is what was refused
    if row in ALGORITHM_ROWS:
        with pytest.raises(ConfigError):
            engine.skyrl_config.check_algorithm(config.trainer.algorithm, region)


def test_one_update_per_batch_against_the_trainers_own_log_probs_is_said_to_leave_the_region_nothing_to_do():
    def config(*more):
        name = "trainer.algorithm.policy_loss_type=trustrl-ppo"
        made = make_config(algorithm_cls=engine.RegionAlgorithmConfig)
        return made.from_cli_overrides([name, "trainer.policy_mini_batch_size=1024", *more])

    proximal = "trainer.algorithm.region.anchor=proximal"
    with pytest.warns(trustrl.errors.TrustRLWarning, match="ppo cannot act: .* Set trainer.policy_mini_batch_size"):
        engine.check_settings(config(proximal))
    engine.check_settings(config(proximal, "trainer.update_epochs_per_batch=2"))
    engine.check_settings(config())


def test_no_row_of_skyrl_refuses_a_sampled_token_s_region_with_skyrl_s_defaults():
    for name in trustrl.presets():
        region = trustrl.preset(name)
        if rows.VOCABULARY.holds(region.needs()) or rows.PER_SEQUENCE.holds(region.needs()):
            continue
        config = make_config(algorithm_cls=engine.RegionAlgorithmConfig).from_cli_overrides(
            [f"trainer.algorithm.policy_loss_type=trustrl-{name}"]
        )
        assert engine.check_settings(config) == region
