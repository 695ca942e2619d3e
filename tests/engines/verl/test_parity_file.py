"""The shared file of tensors through verl's registry of losses, with the anchors that trustrl's worker passes."""

import pytest

pytest.importorskip("verl")

import trustrl
from support import parity, verl_world as world
from trustrl.engines.verl.losses import LossContext, active

AVERAGES = {"seq-mean-token-mean": parity.sequence_mean, "token-mean": parity.token_mean}


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in parity.PRESETS for mode in AVERAGES if mode[0] == "s" or name not in parity.PER_SEQUENCE],
)
def test_a_preset_has_the_files_verdicts_and_gradient(name, mode):
    kept = []

    def gradient(tokens):
        context = LossContext(
            region=trustrl.preset(name),
            anchors={"behavior_logp": tokens.behavior_logp, "proximal_logp": tokens.proximal_logp},
            receive=lambda out, *_: kept.append(out.decision.keep & (out.decision.weight != 0)),
        )
        given = world.Batch(tokens.proximal_logp, tokens.logp.detach(), tokens.advantage, tokens.in_loss)
        with active(context):
            return world.result(world.actor(f"trustrl-{name}"), given, mode=mode).gradient

    parity.check(name, gradient, AVERAGES[mode], verdict=lambda: kept[0])
