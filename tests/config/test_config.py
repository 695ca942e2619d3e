"""Settings: what is refused, with which sentence, and the way through plain dictionaries and back."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass, is_dataclass
from typing import ClassVar

import pytest

import trustrl
from trustrl import regions
from trustrl.regions.loading import KINDS, laid_over
from trustrl.regions.presets import override

INVALID = [
    pytest.param(lambda: regions.BinaryTV(max_increase=0), "binary-tv.max_increase must be a probability gap", id="a bound of 0"),
    pytest.param(lambda: regions.BinaryTV(max_increase=-0.1), "must be a probability gap", id="a negative bound"),
    pytest.param(lambda: regions.BinaryTV(max_decrease=math.nan), "max_decrease must be", id="a NaN bound"),
    pytest.param(lambda: regions.BinaryTV(max_increase="0.1"), "got '0.1'", id="a bound in quotes"),
    pytest.param(lambda: regions.BinaryTV(max_increase=True), "got True", id="a boolean bound"),
    pytest.param(lambda: regions.TopKTV(k=0), "For k = 0 use binary-tv", id="k = 0"),
    pytest.param(lambda: regions.TopKTV(k=2.0), "whole number", id="k as a float"),
    pytest.param(lambda: regions.TopKKL(act_on="upper"), "no finite upper end", id="the upper end of a KL"),
    pytest.param(lambda: regions.BinaryTV(act_on="middle"), "one of 'lower', 'upper'", id="an unknown end"),
    pytest.param(lambda: regions.DPPO(0.15), "Build one, for example", id="a bare number as divergence"),
    pytest.param(lambda: regions.DPPO(anchor="old"), "one of 'behavior', 'proximal'", id="an unknown anchor"),
    pytest.param(lambda: regions.DPPO(max_ratio=0), "max_ratio must be a cap", id="a cap of 0"),
    pytest.param(lambda: regions.PPO(dual_clip=0.9), "dual_clip must be a ratio > 1", id="a dual clip below 1"),
    pytest.param(lambda: regions.PPO(action="clip", max_ratio=3.0), "no max_ratio", id="textbook clip with a cap"),
    pytest.param(lambda: regions.PPO(action="project"), "one of 'mask', 'clip'", id="ppo by projection"),
    pytest.param(lambda: regions.CISPO(None), "For no cap use pg-is", id="cispo without a cap"),
    pytest.param(lambda: regions.SAPO(0.0), "temperature_positive must be", id="a temperature of 0"),
    pytest.param(lambda: regions.SPO(-1.0), "spo.width must be", id="a negative width"),
    pytest.param(lambda: regions.TROLL(0.0), "troll.bound must be nats", id="an empty ball"),
    pytest.param(lambda: regions.TROLL(k=0), "troll.k must be", id="troll without ids"),
    pytest.param(lambda: regions.TROLL(alpha=-1.0), "troll.alpha must be", id="a negative pull"),
    pytest.param(lambda: regions.TROLL(support="full", rest="fill"), "no unrecorded ids", id="filling a full vocabulary"),
    pytest.param(lambda: regions.ScoreCentering(k=0), "score-centering.k must be", id="centering without ids"),
    pytest.param(lambda: regions.ScoreCentering(tail_mass=1.0), "a mass below 1", id="centering without a record"),
    pytest.param(lambda: regions.ScoreCentering(support="half"), "one of 'topk', 'full'", id="centering on a part"),
    pytest.param(lambda: regions.ScoreCentering(weight=2.0), "score-centering.weight must be a TIS, IcePop", id="centering with a bare cap"),
    pytest.param(lambda: regions.ScoreCentering(correction=regions.TIS()), "correction must be None", id="centering corrected twice"),
    pytest.param(lambda: regions.IPO(log_ratio_penalty=math.inf), "finite number", id="an infinite penalty"),
    pytest.param(lambda: regions.TRM(regions.BinaryKL(max_increase=0.1, max_decrease=0.2)), "equal bounds", id="trm with two bounds"),
    pytest.param(lambda: regions.TRM(regions.TopKKL(), mean=regions.TopKKL()), "never exceeds the maximum", id="a mean bound that cannot act"),
    pytest.param(lambda: regions.TRM(regions.TopKKL(), mean=regions.BinaryKL()), "never exceeds the maximum", id="another mean bound that cannot act"),
    pytest.param(lambda: regions.TRM(regions.TopKKL(), mean=regions.FullKL(max_increase=0.001)), "read the same ids", id="trm on two supports"),
    pytest.param(lambda: regions.TRM(regions.TopKKL(k=20), mean=regions.TopKKL(k=10, max_increase=0.001)), "read the same ids", id="trm with two k"),
    pytest.param(lambda: regions.TRM(regions.Ratio()), "trm.statistic must be", id="trm on the ratio"),
    pytest.param(lambda: regions.CPPO(regions.TopKTV(max_increase=0.1, max_decrease=0.2)), "Give one bound for both directions", id="cppo with two bounds"),
    pytest.param(lambda: regions.PrefixBudget(rate=-1), "Or use 'p90'", id="a negative budget"),
    pytest.param(lambda: regions.PrefixBudget(rate_low=0.5), "at most rate_high", id="a budget band upside down"),
    pytest.param(lambda: regions.PrefixBudget(last_weight=0.0), "a weight in", id="a last weight of 0"),
    pytest.param(lambda: regions.MIS(min_ratio=2.0, max_ratio=1.0, level="token"), "must have 1 between them", id="a band upside down"),
    pytest.param(lambda: regions.IcePop(min_ratio=1.5, max_ratio=5.0), "must have 1 between them", id="a band without agreement"),
    pytest.param(lambda: regions.MIS(min_ratio=0.5, max_ratio=2.0, level="word"), "one of 'token', 'sequence-mean'", id="an unknown level"),
    pytest.param(lambda: regions.TIS(max_ratio=0.0), "tis.max_ratio", id="a correction cap of 0"),
    pytest.param(lambda: trustrl.KLPenalty(coefficient=-1.0), "kl.coefficient", id="a negative coefficient"),
    pytest.param(lambda: trustrl.KLPenalty(coefficient=1.0, estimator="k4"), "one of 'k1', 'k2', 'k3'", id="an unknown estimator"),
    pytest.param(lambda: trustrl.KLPenalty(coefficient=1.0, gradient="none"), "one of 'pathwise', 'score'", id="an unknown gradient"),
    pytest.param(lambda: trustrl.EntropyBonus(coefficient=math.nan), "entropy.coefficient", id="a NaN coefficient"),
    pytest.param(lambda: trustrl.KLPenalty(coefficient=1.0, only_kept="False"), "kl.only_kept must be true or false, got 'False'", id="a truth in quotes"),
    pytest.param(lambda: trustrl.EntropyBonus(coefficient=1.0, only_kept=1), "entropy.only_kept must be true or false, got 1", id="a number for a truth"),
    pytest.param(lambda: trustrl.FixedLength(length=0, num_sequences=2), "fixed-length.length", id="a length of 0"),
    pytest.param(lambda: regions.TrustRegion(regions.TopKTV(), action="clip"), "where the textbook objective is defined", id="clip on a divergence"),
    pytest.param(lambda: regions.TrustRegion(regions.TopKTV(), action="penalize"), "Only these have a signed gap", id="penalize on a top-K"),
    pytest.param(lambda: regions.TrustRegion(regions.Ratio(), action="penalize", max_ratio=2.0), "follows from the objective", id="penalize with a cap"),
    pytest.param(lambda: regions.TrustRegion(regions.BinaryTV(act_on="upper"), action="penalize"), "follows from the objective", id="penalize on an upper end"),
    pytest.param(lambda: regions.TrustRegion(regions.Ratio(), action="truncate"), "Truncation masks nothing", id="truncate with a statistic"),
    pytest.param(lambda: regions.TrustRegion(None), "trust-region.statistic must be a Ratio, LogRatio", id="a mask without a statistic"),
    pytest.param(lambda: regions.TrustRegion(regions.TopKKL(), action="project"), "Use trustrl.regions.TROLL", id="project on the axes"),
    pytest.param(lambda: regions.TrustRegion(regions.SequenceRatio()), "must be 'sequence' with SequenceRatio", id="a sequence ratio per token"),
    pytest.param(lambda: regions.TrustRegion(regions.BinaryTV(), level="prefix"), "one of 'token', 'sequence'", id="prefix without a budget"),
    pytest.param(lambda: regions.TrustRegion(regions.BinaryTV(), level=regions.PrefixBudget(), direction="symmetric"), "must be 'away'", id="a symmetric budget"),
    pytest.param(lambda: regions.TrustRegion(regions.Ratio(), level=regions.PrefixBudget()), "Give one bound for both directions", id="a budget of ratios"),
    pytest.param(lambda: regions.TrustRegion(regions.BinaryTV(), direction="up"), "one of 'away', 'symmetric'", id="an unknown direction"),
    pytest.param(lambda: regions.TrustRegion(regions.BinaryTV(), correction=regions.TIS()), "twice", id="a correction on the behavior anchor"),
    pytest.param(lambda: regions.PPO(anchor="proximal", correction="tis"), "must be a TIS", id="a correction by name"),
    pytest.param(lambda: trustrl.Sampling(logprobs="cooked"), "one of 'raw', 'processed'", id="an unknown log-prob mode"),
    pytest.param(lambda: trustrl.Sampling(logprobs="raw", temperature=0.0), "temperature must be", id="a sampling temperature of 0"),
    pytest.param(lambda: regions.Needs(anchor="proximal"), "must contain the anchor 'proximal'", id="an anchor that is not needed"),
    pytest.param(lambda: trustrl.preset("ppo", clip=0.2), "ppo has no setting 'clip'.*Its ratio has: max_increase, max_decrease", id="an override the region does not have"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), INVALID)
def test_a_wrong_setting_is_refused_with_a_sentence(build, message):
    with pytest.raises(trustrl.errors.ConfigError, match=message) as caught:
        build()
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, trustrl.errors.TrustRLError)


def test_one_bound_sets_both_and_infinity_is_allowed():
    assert regions.BinaryTV(max_increase=0.2).bounds == (0.2, 0.2)
    assert regions.BinaryTV(max_decrease=0.3).bounds == (0.3, 0.3)
    assert regions.BinaryTV(max_increase=math.inf, max_decrease=0.1).bounds == (0.1, math.inf)
    assert regions.BinaryTV().bounds == (0.15, 0.15)
    assert regions.BinaryTV(max_increase=1).bounds == (1.0, 1.0)


EQUAL, DIFFERENT = regions.TRM(regions.BinaryTV()), regions.PPO()


@pytest.mark.parametrize(
    ("region", "field", "given", "bounds"),
    [
        pytest.param(EQUAL, "statistic", {"max_increase": 0.2}, (0.2, 0.2), id="one of two equal bounds"),
        pytest.param(EQUAL, "statistic", {"max_decrease": 0.2}, (0.2, 0.2), id="the other of two equal bounds"),
        pytest.param(EQUAL, "statistic", {"max_increase": None}, (0.15, 0.15), id="none"),
        pytest.param(EQUAL, "statistic", {"act_on": "upper"}, (0.15, 0.15), id="something else"),
        pytest.param(
            EQUAL, "statistic", {"kind": "binary-kl", "max_increase": 0.2}, (0.2, 0.2), id="another statistic"
        ),
        pytest.param(DIFFERENT, "ratio", {"max_increase": 0.5}, (0.2, 0.5), id="the upper of two different bounds"),
        pytest.param(DIFFERENT, "ratio", {"max_decrease": 0.1}, (0.1, 0.28), id="the lower of two different bounds"),
        pytest.param(DIFFERENT, "ratio", {"max_increase": 0.3, "max_decrease": 0.1}, (0.1, 0.3), id="both"),
    ],
)
def test_bounds_laid_over_a_region_are_as_if_it_were_built_with_them(region, field, given, bounds):
    found = trustrl.config_from_dict(laid_over(trustrl.config_to_dict(region), {field: given}))
    assert getattr(found, field).bounds == bounds


def test_bounds_of_a_region_without_a_statistic_are_two_settings(monkeypatch):
    """The rule is a statistic's: a region of somebody else's may mean anything by these names."""

    @dataclass(frozen=True, kw_only=True)
    class Own(regions.Region):
        kind: ClassVar[str] = "own-bounds"
        max_increase: float = 1.0
        max_decrease: float = 1.0

    monkeypatch.setitem(KINDS._entries, Own.kind, Own)
    own = {"kind": "own-bounds", "max_increase": 3.0, "max_decrease": 3.0}
    assert laid_over(own, {"max_increase": 2.0}) == own | {"max_increase": 2.0}


PUBLISHED = {
    "dppo-binary-tv": {"divergence.bounds": (0.15, 0.15), "anchor": "behavior", "max_ratio": None},
    "dppo-topk-tv": {"divergence.k": 20, "divergence.bounds": (0.15, 0.15)},
    "dppo-topk-kl": {"divergence.k": 20, "divergence.bounds": (0.05, 0.05)},
    "dppo-full-kl": {"divergence.bounds": (0.05, 0.05)},
    "dppo-binary-tv-scaling": {"divergence.bounds": (0.2, 0.2), "anchor": "behavior", "max_ratio": 5.0},
    "dppo-binary-kl-scaling": {"divergence.bounds": (0.05, 0.05), "max_ratio": 5.0},
    "dppo-topk-tv-scaling": {"divergence.k": 20, "divergence.bounds": (0.2, 0.2), "max_ratio": 5.0},
    "dppo-topk-kl-scaling": {"divergence.k": 20, "divergence.bounds": (0.05, 0.05), "max_ratio": 5.0},
    "dppo-binary-tv-capped": {"divergence.bounds": (0.3, 0.3), "anchor": "behavior", "max_ratio": 2.0},
    "dppo-topk-tv-capped": {"divergence.k": 20, "divergence.bounds": (0.3, 0.3), "max_ratio": 2.0},
    "troll": {"bound": 0.05, "alpha": 1.0, "k": 64, "tail_mass": 1e-5, "anchor": "proximal"},
    "ppo": {"ratio.bounds": (0.2, 0.28), "dual_clip": None},
    "gspo": {"ratio.bounds": (3e-4, 4e-4)},
    "cispo": {"max_ratio": 5.0},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
    "spo": {"width": 0.2},
    "drpo": {"width": 0.2},
    "cppo": {"divergence.bounds": (0.15, 0.15), "divergence.k": 20, "budget.last_weight": 0.8, "budget.rate": "p90"},
    "ipo": {"divergence.bounds": (0.3, 0.3), "log_ratio_penalty": 0.0},
    "kpop": {"divergence.bounds": (2.0, 2.0)},
    "trm": {"statistic.bounds": (0.05, 0.05), "mean": None},
    "trm-sampled": {"statistic.kind": "sampled-k2"},
    "tis": {"correction.max_ratio": 2.0, "anchor": "proximal"},
    "dppo-decoupled": {
        "divergence.bounds": (0.15, 0.15),
        "anchor": "proximal",
        "correction.max_ratio": math.inf,
        "max_ratio": None,
    },
    "icepop": {"correction.min_ratio": 0.5, "correction.max_ratio": 5.0},
    "minirl": {"ratio.bounds": (0.2, 0.28), "max_ratio": None},
    "score-centering": {"k": 128, "weight": None, "anchor": "behavior", "support": "topk"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name):
    for path, want in PUBLISHED[name].items():
        value = trustrl.preset(name)
        for part in path.split("."):
            value = getattr(value, part)
        assert value == want, path


@pytest.mark.parametrize("name", trustrl.presets())
def test_settings_survive_json(name):
    region = trustrl.preset(name)
    assert trustrl.config_from_dict(json.loads(json.dumps(trustrl.config_to_dict(region)))) == region


def test_infinite_bounds_survive_json():
    one_sided = regions.DPPO(regions.BinaryTV(max_increase=math.inf, max_decrease=0.1))
    assert (
        trustrl.config_from_dict(json.loads(json.dumps(trustrl.config_to_dict(one_sided), allow_nan=False)))
        == one_sided
    )


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"kind": "dppoo"}, trustrl.errors.UnknownNameError, "Did you mean 'dppo'"),
        ({"kind": "dppo", "max_ration": 3}, trustrl.errors.ConfigError, "Did you mean 'max_ratio'"),
        (
            {"kind": "dppo", "divergence": {"kind": "binary-tv", "delta": 0.1}},
            trustrl.errors.ConfigError,
            "has no setting 'delta'",
        ),
        ({"divergence": {}}, trustrl.errors.ConfigError, "with a 'kind'"),
        ({"kind": 3}, trustrl.errors.ConfigError, "with a 'kind'"),
        ([], trustrl.errors.ConfigError, "with a 'kind'"),
        ({"kind": "mis", "level": "token"}, trustrl.errors.ConfigError, "must be given min_ratio, max_ratio"),
        ({"kind": "token-mean"}, trustrl.errors.ConfigError, "must be given num_tokens"),
    ],
)
def test_a_wrong_dictionary_is_refused_with_a_sentence(data, error, message):
    with pytest.raises(error, match=message):
        trustrl.config_from_dict(data)


def test_only_settings_become_dictionaries():
    with pytest.raises(trustrl.errors.ConfigError, match="a trustrl settings object"):
        trustrl.config_to_dict({"kind": "dppo"})


def test_dppo_alone_is_its_binary_tv():
    assert trustrl.preset("dppo") == trustrl.preset("dppo-binary-tv")
    assert trustrl.preset("dppo", max_increase=0.2) == regions.DPPO(regions.BinaryTV(max_increase=0.2))


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        pytest.param("dppo-binary-tv", {"max_increase": 0.2}, regions.DPPO(regions.BinaryTV(max_increase=0.2)), id="a nested setting by its own name"),
        pytest.param("dppo-topk-tv", {"k": 50, "max_decrease": 0.3}, regions.DPPO(regions.TopKTV(k=50, max_decrease=0.3)), id="two of them"),
        pytest.param("dppo-binary-tv", {"divergence": {"max_increase": 0.2}}, regions.DPPO(regions.BinaryTV(max_increase=0.2)), id="a nested mapping"),
        pytest.param("dppo-binary-tv", {"divergence": regions.TopKKL(k=9)}, regions.DPPO(regions.TopKKL(k=9)), id="a settings object"),
        pytest.param("dppo-binary-tv", {"divergence": {"kind": "binary-kl"}}, regions.DPPO(regions.BinaryKL()), id="another kind"),
        pytest.param("ppo", {"max_increase": 0.4}, regions.PPO(regions.Ratio(max_increase=0.4, max_decrease=0.2)), id="one of two different bounds"),
        pytest.param("cppo", {"last_weight": 0.5}, regions.CPPO(budget=regions.PrefixBudget(last_weight=0.5)), id="in another nested object"),
    ],
)  # fmt: skip
def test_overrides_follow_one_rule_in_presets_recipes_and_engines(name, given, wanted):
    from trustrl.engines.common.region_settings import SettingNames, region_named
    from trustrl.runner.recipe import _region

    assert trustrl.preset(name, **given) == wanted
    plain = {key: trustrl.config_to_dict(value) if is_dataclass(value) else value for key, value in given.items()}
    assert _region({"preset": name, **plain}) == wanted
    if "kind" not in str(plain):  # a loss's name says the kinds
        assert region_named(f"trustrl-{name}", plain, SettingNames("loss", "region", "how")) == wanted


def test_a_setting_that_two_nested_objects_have_must_be_said_where():
    region = regions.TRM(regions.BinaryTV(), mean=regions.BinaryTV(max_increase=0.01))
    with pytest.raises(trustrl.errors.ConfigError, match=r"Use one of: statistic.max_increase or mean.max_increase"):
        override(region, {"max_increase": 0.2})


def test_the_papers_delta_is_answered_with_the_settings_there_are():
    with pytest.raises(
        trustrl.errors.ConfigError, match=r"dppo has no setting 'delta'.*divergence has: max_increase, max_d"
    ):
        trustrl.preset("dppo-binary-tv", delta=0.2)


def test_unknown_presets_suggest_the_nearest():
    with pytest.raises(trustrl.errors.UnknownNameError, match="Did you mean 'dppo-binary-tv'") as caught:
        trustrl.preset("dppo-binray-tv")
    assert isinstance(caught.value, LookupError)


def test_overrides_replace_fields():
    region = trustrl.preset("dppo-binary-tv", max_ratio=5.0, anchor="proximal")
    assert (region.max_ratio, region.anchor) == (5.0, "proximal")


def test_settings_load_without_torch():
    """Command lines and --help must not pay for it."""
    code = "import sys, trustrl, trustrl.core.metrics; trustrl.preset('dppo-topk-tv').needs(); trustrl.presets(); trustrl.core.metrics.METRICS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_needs_tell_an_engine_what_to_record():
    troll = regions.TROLL(k=32).needs()
    assert (troll.topk, troll.anchor, troll.tail_mass, troll.projects) == (32, "proximal", 1e-5, True)
    assert trustrl.preset("tis").needs().anchors == {"behavior", "proximal"}
    assert trustrl.preset("dppo-full-tv").needs().full
    assert trustrl.preset("cppo").needs().sequences
    assert trustrl.preset("gspo").needs().reduction is trustrl.SequenceMeanTokenMean
    assert regions.IPO(log_ratio_penalty=0.1).needs().penalty == "log_ratio_penalty"
    assert (troll.penalty, regions.TROLL(alpha=0.0).needs().penalty) == ("alpha", None)
    per_sequence = regions.MIS(min_ratio=0.5, max_ratio=2.0, level="sequence-mean")
    assert regions.PPO(anchor="proximal", correction=per_sequence).needs().sequences
    assert regions.TROLL(correction=per_sequence).needs().sequences
    assert not trustrl.preset("ppo").needs().sequences
    centered = regions.ScoreCentering(k=32).needs()
    assert (centered.topk, centered.anchor, centered.tail_mass, centered.projects) == (32, "behavior", 1e-5, True)
    assert (centered.penalty, centered.own_topk, centered.full) == (None, "none", False)
    whole = regions.ScoreCentering(support="full").needs()
    assert (whole.topk, whole.full, whole.tail_mass) == (0, True, 0.0)
    both = regions.ScoreCentering(anchor="proximal", correction=per_sequence).needs()
    assert both.sequences
    assert both.anchors == {"behavior", "proximal"}


@pytest.mark.parametrize(
    "reduction", [trustrl.TokenSum(), trustrl.TokenMean(num_tokens=1), trustrl.SequenceMeanTokenSum(num_sequences=1)]
)
def test_gspo_is_refused_with_another_average(reduction):
    import torch

    logp = torch.zeros(1, 1)
    rollout = trustrl.RolloutTokens(behavior_logp=logp, advantage=torch.ones(1), in_loss=torch.ones(1, 1).bool())
    with pytest.raises(trustrl.errors.ConfigError, match="another algorithm"):
        trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, regions.GSPO(), reduction=reduction)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": "dppo"}, "region must be a trustrl region"),
        ({"reduction": "mean"}, "a trustrl reduction"),
        ({"on_nonfinite": "ignore"}, "one of 'drop', 'zero', 'raise'"),
        ({"penalties": [trustrl.EntropyBonus(coefficient=1.0)] * 2}, "each kind once"),
    ],
)
def test_policy_loss_refuses_what_it_cannot_read(changes, message):
    import torch

    logp = torch.zeros(1, 1)
    rollout = trustrl.RolloutTokens(behavior_logp=logp, advantage=torch.ones(1), in_loss=torch.ones(1, 1).bool())
    settings = {"region": regions.DPPO(), "reduction": trustrl.TokenSum(), **changes}
    with pytest.raises(trustrl.errors.ConfigError, match=message):
        trustrl.policy_loss(trustrl.PolicyTokens(logp=logp, entropy=logp), rollout, settings.pop("region"), **settings)
