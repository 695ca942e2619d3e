"""A region of somebody else's: settings, a decision, and it runs everywhere ours do."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import trustrl
from support.worlds import run, world
from trustrl import regions


@dataclass(frozen=True)
class OnlyUp(regions.Region):
    """Stops every token that fell."""

    kind: ClassVar[str] = "test-only-up"
    tolerance: float = 0.0

    def needs(self):
        return regions.Needs()


@regions.register_region(OnlyUp)
def only_up(tokens, region):
    fallen = tokens.log_ratio < -region.tolerance
    return regions.Decision(
        keep=~fallen, weight=tokens.log_ratio.exp(), logp=tokens.logp, extra={"fallen_share": fallen.double()}
    )


def test_a_registered_region_decides_and_reports():
    w = world(0)
    out, policy = run(OnlyUp(0.1), w)
    log_ratio = w.at_token(w.policy) - w.at_token(w.behavior)
    stopped = (log_ratio < -0.1) & (w.advantage != 0)
    want = torch.where(w.in_loss & ~stopped, -log_ratio.exp() * w.advantage, 0.0)
    torch.testing.assert_close(policy.logp.grad, want)
    assert trustrl.rates(out.sums)["trustrl/fallen_share"] == pytest.approx(
        (log_ratio < -0.1)[w.in_loss].double().mean().item()
    )


def test_a_registered_region_loads_from_a_dictionary():
    assert trustrl.config_from_dict({"kind": "test-only-up", "tolerance": 0.2}) == OnlyUp(0.2)


def test_a_zero_advantage_is_kept_whatever_the_region_says():
    w = world(0)
    out, _ = run(OnlyUp(), w)
    assert out.decision.keep[(w.advantage == 0)].all()


@pytest.mark.parametrize("not_a_region", [dict, regions.BinaryTV, 3])
def test_only_regions_register(not_a_region):
    with pytest.raises(trustrl.errors.ConfigError, match=r"subclass of trustrl.regions.Region"):
        regions.register_region(not_a_region)


def test_a_kind_registers_once():
    with pytest.raises(trustrl.errors.DuplicateNameError, match="test-only-up"):
        regions.register_region(OnlyUp)(only_up)


def test_an_unregistered_region_is_named():
    @dataclass(frozen=True)
    class Stranger(regions.Region):
        kind: ClassVar[str] = "test-stranger"

    with pytest.raises(trustrl.errors.UnknownNameError, match="Unknown region 'test-stranger'"):
        run(Stranger(), world(0))


@dataclass(frozen=True)
class Impostor(regions.Region):
    """Reports a number under a metric's name."""

    kind: ClassVar[str] = "test-impostor"


@regions.register_region(Impostor)
def impostor(tokens, region):
    keep = torch.ones_like(tokens.usable)
    return regions.Decision(keep, tokens.log_ratio.exp(), tokens.logp, extra={"masked_share": keep})


def test_a_region_cannot_replace_a_metric():
    out, _ = run(Impostor(), world(0))
    with pytest.raises(trustrl.errors.RecordError, match="must not use the name of a metric, got 'masked_share'"):
        trustrl.rates(out.sums)
