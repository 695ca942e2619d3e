"""Settings of OPSM, GMPO, VESPO, M2PO, TROLL and the corrections that have no meaning, and the old name of a level."""

import pytest

import trustrl
from trustrl import regions
from trustrl.errors import ConfigError


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: regions.OPSM(0.0), "opsm.max_drift must be nats per token"),
        (lambda: regions.OPSM(statistic=0.2), "opsm.statistic must be a"),
        (lambda: regions.OPSM(statistic=regions.SequenceRatio()), "level must be 'sequence' with SequenceRatio"),
        (lambda: regions.OPSM(correction=regions.TIS()), "opsm.correction must be None with anchor='behavior'"),
        (lambda: regions.GMPO(regions.Ratio()), "gmpo.log_ratio must be a LogRatio"),
        (lambda: regions.VESPO(decay_negative=0.0), "vespo.decay_negative must be a finite number > 0"),
        (lambda: regions.VESPO(anchor="old"), "vespo.anchor must be one of"),
        (lambda: regions.VESPO(when_stale="tighten", max_staleness=1), "when_stale must be 'drop'"),
        (lambda: regions.M2PO(-1.0), "m2po.max_second_moment must be nats squared"),
        (lambda: regions.TROLL(rest="published", support="full"), "troll.rest must be 'bucket' with support='full'"),
        (lambda: regions.PPO(relax_below=1.5), "ppo.relax_below must be a probability"),
        (lambda: regions.PPO(relax_below=0.1, relax_side="high"), "ppo.relax_side must be one of"),
        (lambda: regions.PPO(relax_side="increase"), "ppo.relax_below must be given with relax_side='increase'"),
        (lambda: regions.TROLL(level="prompt"), "troll.level must be one of 'token', 'sequence'"),
        (lambda: regions.TIS(level="sequence"), "tis.level must be one of 'token', 'sequence-product'"),
        (lambda: regions.DivergenceGate(divergence=regions.FullKL()), "divergence-gate.divergence must be a BinaryKL"),
        (lambda: regions.DivergenceGate(level="word"), "divergence-gate.level must be one of"),
        (lambda: regions.DivergenceGate(divergence=regions.BinaryTV(max_increase=0.1, max_decrease=0.2)), "equal bounds"),
        (lambda: regions.DivergenceGate(divergence=regions.BinaryTV(act_on="upper")), "act_on='lower'"),
        (lambda: trustrl.KLPenalty(coefficient=1.0, unbiased="yes"), "kl.unbiased must be"),
        (lambda: trustrl.KLPenalty(coefficient=1.0, unbiased=True, gradient="score"), "kl.gradient must be 'pathwise'"),
    ],
)  # fmt: skip
def test_a_setting_without_meaning_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_the_old_name_of_the_geometric_mean_still_works_and_says_so():
    with pytest.warns(DeprecationWarning, match="now called 'sequence-mean'"):
        old = regions.MIS(min_ratio=0.5, max_ratio=2.0, level="sequence")
    assert old == regions.MIS(min_ratio=0.5, max_ratio=2.0, level="sequence-mean")


def test_the_old_spelling_of_an_action_still_works_and_says_so():
    with pytest.warns(DeprecationWarning, match="now spelled 'penalize'"):
        old = regions.TrustRegion(regions.Ratio(max_increase=0.2), action="penalise")
    assert old == regions.TrustRegion(regions.Ratio(max_increase=0.2), action="penalize")
