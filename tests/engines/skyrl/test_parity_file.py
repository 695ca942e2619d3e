"""The shared file of tensors through SkyRL's registry: the file's verdicts and gradients, in two of SkyRL's averages."""

import pytest

pytest.importorskip("skyrl")

from support import parity, skyrl_world as world

AVERAGES = {"sequence_mean": parity.sequence_mean, "token_mean": parity.token_mean}


@pytest.mark.parametrize(
    ("name", "reduction"),
    [(name, mode) for name in parity.PRESETS for mode in AVERAGES if mode[0] == "s" or name not in parity.PER_SEQUENCE],
)
def test_a_preset_has_the_files_verdicts_and_gradient(name, reduction):
    def gradient(tokens):
        given = world.Batch(
            tokens.logp.detach(), tokens.proximal_logp, tokens.behavior_logp, tokens.advantage, tokens.in_loss.long()
        )
        divided = world.ppo_utils.apply_loss_reduction_to_advantages_minibatch(
            given.advantages, given.loss_mask, reduction, micro_batch_size=6, max_seq_len=12, prompt_boundaries=[(0, 6)]
        )
        config = world.algorithm(f"trustrl-{name}", loss_reduction=reduction)
        return world.result(config, given._replace(advantages=divided)).gradient

    parity.check(name, gradient, AVERAGES[reduction])
