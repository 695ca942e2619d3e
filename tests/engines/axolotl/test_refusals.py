"""Settings of axolotl that do not work with a region, read by axolotl's own loader."""

import pytest

pytest.importorskip("axolotl")

import yaml
from axolotl.cli.config import load_cfg
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.integrations.base import PluginManager
from axolotl.utils.import_helper import get_cls_from_module_str

import trustrl
from support import axolotl_world as world
from support.refusal_examples import AXOLOTL, cases
from trustrl.engines import axolotl as engine
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.axolotl import ROWS
from trustrl.errors import ConfigError, EngineError
from trustrl.recording import Recording


@pytest.fixture(autouse=True)
def no_plugins_of_other_tests(monkeypatch, tmp_path):
    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    monkeypatch.setattr(PluginManager, "_instance", None)
    monkeypatch.chdir(tmp_path)
    world.write(tmp_path)  # axolotl reads the model's configuration before it checks a file


def loaded(**more):
    """axolotl's configuration from a file with these settings."""
    with open("config.yaml", "w") as file:
        yaml.safe_dump(world.settings(**more), file)
    return load_cfg("config.yaml")


def given(example):
    """Dotted names as nested settings."""
    nested = {}
    for name, value in example.items():
        group, _, key = name.rpartition(".")
        if group:
            nested.setdefault(group, {})[key] = value
        else:
            nested[name] = value
    return nested


@pytest.mark.parametrize("case", cases(ROWS, AXOLOTL), ids=lambda case: case.row.setting)
def test_each_row_of_axolotls_table_refuses_its_example(case):
    row, region = case.row, trustrl.preset(case.preset)
    settings = given(case.settings) | {"trust_region": case.preset}
    others = [one for one in ROWS if one is not row]
    rows.check(others, rows.reader(world.settings(**given(case.settings))), region)
    with pytest.raises(ValueError, match="must be") as refused:
        loaded(**settings)
    assert f"{row.setting} must be {row.must_be} with a region" in str(refused.value)
    assert row.why.split("{")[-1].split("}")[-1] in str(refused.value)


def test_a_file_reaches_the_trainer_as_the_mixins_arguments():
    cfg = loaded(
        trust_region={"preset": "dppo-binary-tv", "max_ratio": None, "divergence": {"max_increase": 0.2}},
        trust_region_options={"metrics": "all", "recording": {"folder": "records"}},
    )
    found = engine.trainer_arguments(cfg)
    assert found == {
        "region": trustrl.preset("dppo-binary-tv", max_ratio=None, divergence={"max_increase": 0.2}),
        "behavior": "trainer",
        "metrics": "all",
        "recording": Recording(folder="records"),
    }


def test_a_setting_that_is_off_in_the_file_is_off_in_the_region():
    """axolotl drops settings without a value from its own groups."""
    off = trustrl.preset("tis", correction=None)
    assert off != trustrl.preset("tis")
    cfg = loaded(trust_region={"preset": "tis", "correction": None})
    assert engine.trainer_arguments(cfg)["region"] == off


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"trust_region": None}, "trust_region must be a preset's name, or a dictionary"),
        ({"trust_region": "dppo-binary"}, "Unknown preset 'dppo-binary'"),
        ({"trust_region_options": {"metric": "all"}}, "trust_region_options has no setting 'metric'. Did you mean"),
        ({"trust_region_options": {"region": "ppo"}}, "trust_region_options has no setting 'region'"),
        ({"trust_region_options": {"recording": {"smaple": 1}}}, "recording has no setting 'smaple'"),
    ],
    ids=["no region", "unknown preset", "unknown option", "a second region", "unknown recording setting"],
)
def test_settings_of_the_plugin_are_checked_while_the_file_is_read(more, message):
    with pytest.raises(Exception, match=message):
        loaded(**more)


def test_a_file_without_the_plugin_is_not_checked():
    loaded()
    loaded(plugins=[], trust_region=None, trainer_cls=None, context_parallel_size=1)


def test_the_plugin_raises_if_another_trainer_was_created(tmp_path):
    stock = world.trainer(AxolotlGRPOTrainer, tmp_path)
    with pytest.raises(EngineError, match=r"got AxolotlGRPOTrainer\. Set trainer_cls, and remove plugins"):
        engine.TrustRegionPlugin().post_trainer_create(None, stock)


def test_the_trainer_without_the_plugin_raises(tmp_path):
    with pytest.raises(
        ConfigError, match=r"plugins must contain trustrl.engines.axolotl.TrustRegionPlugin .* got \[\]"
    ):
        world.trainer(engine.TrustRegionTrainer, tmp_path)


def test_axolotl_continues_without_a_plugin_that_it_cannot_import_and_stops_at_such_a_trainer():
    """The reason for `trainer_cls` in the file."""
    PluginManager.get_instance().register("no_such_package.TrustRegionPlugin")
    assert not PluginManager.get_instance().plugins
    with pytest.raises(ImportError, match="no_such_package"):
        get_cls_from_module_str("no_such_package.TrustRegionTrainer")


@pytest.mark.parametrize(
    ("trl", "message"),
    [
        ({"top_p": 0.9}, "top_p must be 1.0"),
        ({"epsilon": 0.3}, "epsilon must be left at 0.2"),
        ({"use_liger_loss": True}, "use_liger_kernel must be False"),
        ({"loss_type": "cispo"}, "loss_type must be an average"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level must be 'token'"),
        ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold must be None"),
        ({"use_vllm": True}, "behavior must be 'sampler' when vLLM generates"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_axolotls_settings_reach_trls_rows(trl, message):
    """axolotl's own translation of `trl:` into TRL's arguments, and TRL's rows on them."""
    from axolotl.core.trainers.grpo import GRPOStrategy
    from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig

    from trustrl.engines.trl.trainer_checks import check_settings

    cfg = loaded(trl=trl)
    known = AxolotlGRPOConfig.__dataclass_fields__
    made = {name: value for name, value in GRPOStrategy.set_training_args_kwargs(cfg).items() if name in known}
    args = AxolotlGRPOConfig(output_dir="out", per_device_train_batch_size=8, use_cpu=True, bf16=False, **made)
    with pytest.raises(ConfigError, match=message):
        check_settings(args, trustrl.preset("dppo-binary-tv"), "trainer")
