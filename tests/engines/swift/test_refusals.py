"""Every row of ms-swift's table of refused settings, and the variables that choose a region."""

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("swift")

import torch

import trustrl
from support import swift_world as world
from support.refusal_examples import SWIFT, cases
from trustrl.engines import swift as engine
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.swift import BEHAVIOR, GENERATION, ROWS
from trustrl.engines.swift import trainer as adapter, trainer as environment
from trustrl.errors import ConfigError, EngineError, MissingDataError, UnknownNameError

TEMPLATE = {"padding_free": False, "sequence_parallel_size": 1}
WORKING = {"loss_type": "grpo", "top_k": 512, "use_vllm": False}


def checked(case, settings):
    """Checks settings as the trainer does, with the example's region."""
    given = {**WORKING, BEHAVIOR: "trainer", **settings}
    template = SimpleNamespace(**{name: given.pop(name, value) for name, value in TEMPLATE.items()})
    model = SimpleNamespace(
        model_meta=SimpleNamespace(is_multimodal=given.pop("model", None) == "multimodal"),
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=512)),
        generation_config=given.pop(GENERATION, None),
    )
    region = trustrl.preset(case.preset, **case.region)
    chosen = environment.Settings(region, given.pop(BEHAVIOR))
    adapter.check_settings(SimpleNamespace(**given), chosen, template, model)


@pytest.mark.parametrize("case", cases(ROWS, SWIFT), ids=lambda case: f"{case.row.setting} {case.row.must_be}")
def test_each_row_of_ms_swifts_table_refuses_its_example(case):
    row = case.row
    with pytest.raises(ConfigError) as refused:
        checked(case, case.settings)
    assert str(refused.value).startswith(row.setting.split("{")[0])
    assert f" must be {row.must_be.split('{')[0]}" in str(refused.value)
    assert row.why.split("{")[-1].split("}")[-1] in str(refused.value)
    if case.settings and row.scope is not rows.SAMPLER_TOPK:
        checked(case, {name: x for name, x in case.settings.items() if name in ("use_vllm", "top_k")} | _kept(case))


def _kept(case):
    """The rest of an example that works without its last setting."""
    vllm = case.settings.get("use_vllm", False)
    return {BEHAVIOR: "sampler" if vllm else "trainer"} | ({} if vllm else {"top_k": 512})


def test_ms_swifts_own_trainer_refuses_a_setting_before_it_trains(given, chosen):
    with pytest.raises(ConfigError, match=r"top_k must be the vocabulary's size, 512, with a region, got -1"):
        world.trainer_of({**given, "top_k": "-1"})


def test_a_top_k_of_minus_one_is_truncated_sampling_in_transformers(given, chosen, monkeypatch):
    monkeypatch.setattr(adapter, "check_settings", lambda *args: None)
    trainer = world.trainer_of({**given, "top_k": "-1"})
    config = trainer.engine._prepare_generation_config(trainer.request_config)
    prepared, _ = trainer.engine.model._prepare_generation_config(config)
    assert prepared.top_k == 50  # the reason for the row on top_k


def test_a_run_without_a_region_or_with_an_unknown_one_is_refused(given, chosen, monkeypatch):
    chosen(region="dppo-binary-tw")
    with pytest.raises(UnknownNameError, match="dppo-binary-tv"):
        environment.settings()
    monkeypatch.delenv("TRUSTRL_REGION")
    with pytest.raises(ConfigError, match=r"TRUSTRL_REGION must be set with `import trustrl\.engines\.swift`"):
        world.trainer_of(given)


@pytest.mark.parametrize("name", ["BEHAVIOR", "METRICS", "STARTUP_CHECKS", "MAX_DROPPED_SHARE"])
def test_a_variable_with_another_value_is_refused(chosen, name):
    chosen(**{name.lower() if name == "BEHAVIOR" else name: "often"})
    with pytest.raises(ConfigError, match=f"TRUSTRL_{name} must be"):
        environment.settings()


def test_log_probs_that_ms_swift_dropped_are_never_replaced():
    with pytest.raises(MissingDataError, match="must hold vLLM's log-probs, got None"):
        adapter._check_sampler(SimpleNamespace(rollout_per_token_logps=None))
    mask = torch.ones(1, 2, dtype=torch.bool)
    broken = SimpleNamespace(rollout_per_token_logps=torch.tensor([[-1.0, float("nan")]]), completion_mask=mask)
    with pytest.raises(trustrl.errors.NonFiniteError, match="got NaN at 1 of 2 tokens"):
        adapter._check_sampler(broken)


def test_megatrons_trainer_which_would_ignore_the_region_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "swift.megatron", SimpleNamespace())
    with pytest.raises(ConfigError, match="got `megatron rlhf`"):
        engine.install()


@pytest.mark.parametrize("method", ["_compute_loss_and_metrics", "_prepare_batch_inputs"])
def test_another_signature_is_refused_when_a_trainer_is_made(given, chosen, monkeypatch, method):
    monkeypatch.setattr(adapter.GRPOTrainer, method, lambda self, other: None)
    with pytest.raises(EngineError, match=rf"GRPOTrainer.{method} must take .* different version of ms-swift"):
        world.trainer_of(given)


def test_one_update_per_rollout_is_said_to_leave_the_region_nothing_to_do(given, chosen):
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dppo cannot act: .* Set num_iterations above 1"):
        world.trainer_of({**given, "num_iterations": "1", "steps_per_generation": "1"})
