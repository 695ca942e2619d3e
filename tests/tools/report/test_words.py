"""Regions in words: every preset has a sentence, and its thresholds and units are in it."""

import pytest

from trustrl.config.statistics import BinaryTV, FullTV
from trustrl.config.terms import TIS, IcePop
from trustrl.regions.loading import config_to_dict
from trustrl.regions.presets import preset, presets
from trustrl.regions.trust_region import TrustRegion
from trustrl.runs.run import Run, RunSettings
from trustrl.tools.report.reported_runs import facts, region_in_words, unit_of


def run(settings=None, recipe=None):
    return Run(path="a", name="a", source="", settings=settings or RunSettings(), rows=[], recipe=recipe or {})


def said(region):
    return region_in_words(region, config_to_dict(region))


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_words_and_no_placeholder(name):
    text = said(preset(name))
    assert text.endswith(".")
    assert "{" not in text
    assert "not registered" not in text


@pytest.mark.parametrize(
    ("region", "words"),
    [
        pytest.param("dppo-binary-tv", ["|π − μ| of the sampled token", "0.15 (probability)", "further out"], id="DPPO"),
        pytest.param("ppo", ["|π/μ − 1|", "0.28 upwards or 0.2 downwards (ratio)"], id="PPO with two bounds"),
        pytest.param(preset("ppo", dual_clip=3.0), ["above π/μ = 3"], id="dual clip"),
        pytest.param("dppo-topk-kl", ["20 most probable tokens of μ", "0.05 (nats)"], id="Top-K KL"),
        pytest.param("troll", ["KL(π̂‖π')", "0.05 nats", "64 most probable"], id="TROLL"),
        pytest.param("score-centering", ["expectation under μ", "128 most probable tokens of μ and a tail"], id="centering"),
        pytest.param(preset("score-centering", weight=TIS()), ["the weight π/μ, capped at 2"], id="centering, capped"),
        pytest.param(preset("score-centering", weight=IcePop(), support="full"), ["whole vocabulary", "outside [0.5, 5]"], id="centering in a band"),
        pytest.param("cispo", ["Masks nothing", "capped at 5"], id="CISPO"),
        pytest.param("pg-is", ["Masks nothing", "weight is π/μ"], id="no region"),
        pytest.param("gspo", ["whole sequence", "0.0004 upwards or 0.0003 downwards"], id="GSPO"),
        pytest.param("trm", ["Drops a whole sequence", "largest", "(nats)"], id="TRM"),
        pytest.param("drpo", ["reverses", "0.2 (probability)"], id="DRPO"),
        pytest.param("cppo", ["budget", "0.15 (probability)"], id="CPPO"),
        pytest.param("minirl", ["|π/π' − 1|", "weights are π/μ"], id="MiniRL"),
        pytest.param("tis", ["π'/μ multiplies the weight, up to 2"], id="TIS"),
        pytest.param("mis", ["a token with a mismatch outside [0.5, 2]"], id="MIS"),
        pytest.param("mis-product", ["a product of the mismatch outside [0, 3]"], id="MIS by product"),
        pytest.param("tis-product", ["product of the mismatch π'/μ over the response", "up to 3"], id="TIS by product"),
        pytest.param("divergence-gate", ["sequence with a mean divergence above 0.003 (nats)", "KL(μ‖π')"], id="gate"),
        pytest.param("gmpo", ["|log π/μ| exceeds 0.4 (nats)", "geometric mean"], id="GMPO"),
        pytest.param("opsm", ["Drops a response", "log μ/π exceeds 0.5 nats", "|π/μ − 1|"], id="OPSM"),
        pytest.param(preset("opsm", statistic=None), ["Drops a response"], id="OPSM alone"),
        pytest.param("vespo", ["Masks nothing", "product of π/μ"], id="VESPO"),
        pytest.param("m2po", ["largest |log π/μ|", "at most 0.04", "micro-batch"], id="M2PO"),
        pytest.param("ppo-relaxed", ["Tokens with μ below 0.1 are never masked"], id="PPO relaxed"),
        pytest.param(preset("ppo-relaxed", relax_side="increase"), ["below 0.1 are never masked upwards"], id="PPO relaxed upwards"),
        pytest.param("troll-gspo", ["geometric mean of π̂/π'"], id="TROLL in sequences"),
        pytest.param(
            TrustRegion(FullTV(act_on="upper"), level="sequence", direction="symmetric"),
            ["whole sequence", "mean the upper end of TV over the whole vocabulary"], id="axes",
        ),
        pytest.param(preset("dppo-binary-tv", divergence=BinaryTV(max_increase=0.1, max_decrease=float("inf"))), ["∞ downwards"], id="one side off"),
    ],
)  # fmt: skip
def test_thresholds_come_with_their_unit(region, words):
    if isinstance(region, str):
        region = preset(region)
    for word in words:
        assert word in said(region)


def test_a_symmetric_region_says_nothing_of_directions():
    assert "further out" not in said(preset("ipo"))


def test_a_region_that_is_not_known_lists_its_settings():
    assert region_in_words(None, {"kind": "mine", "width": 0.3}) == "mine, which is not registered here: width = 0.3."


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("ppo", "ratio"),
        ("dppo-topk-tv", "probability"),
        ("kpop", "nats"),
        ("trm-sampled", "nats"),
        ("cispo", None),
        ("troll", None),
    ],
)
def test_a_divergence_has_the_unit_of_its_statistic(name, unit):
    assert unit_of(preset(name)) == unit


def test_a_recipe_without_tables_has_no_facts_that_are_not_there():
    assert facts(run()) == {}
    assert facts(run(recipe={"schedule": {"seed": 0}})) == {"seed": "0"}


def test_a_run_without_a_recipe_has_the_facts_of_its_settings():
    settings = RunSettings(engine="trl", engine_version="1.16", loss="grpo", temperature=0.7, top_p=0.9, seed=0)
    assert facts(run(settings=settings)) == {
        "engine": "TRL 1.16", "loss": "grpo", "sampling": "temperature 0.7, top-p 0.9", "seed": "0",
    }  # fmt: skip


def test_no_region_has_no_words():
    assert region_in_words(None, {}) == ""


def test_a_region_that_only_observed_says_so():
    text = region_in_words(preset("ppo"), config_to_dict(preset("ppo")), observed=True)
    assert text.startswith("Only observed; the engine's own loss trained this run. Masks a token once")
