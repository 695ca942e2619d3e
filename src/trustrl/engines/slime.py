"""slime with a trust region: a custom loss.

Seam:     `--custom-loss-function-path`, which slime calls with its arguments, a micro-batch, logits, and its reduction
Switch:   `--loss-type custom_loss --custom-loss-function-path trustrl.engines.slime.region_loss`
Settings: `trustrl_region` in the YAML file of `--custom-config-path`
Borrowed: `get_log_probs_and_entropy` with its tensor and context parallelism, `compute_approx_kl`, and the reduction
"""

from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from trustrl.engines.common.response_loss import Batch, Reducer, ResponseLoss, require_seams, sampled_loss
from trustrl.engines.refusals.slime import ROWS

LOG_PROBS_WITH = (
    "logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "non_loss_data",
)  # fmt: skip

SAMPLED = sampled_loss("slime")


def region_loss(
    args: Namespace, batch: Batch, logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of one micro-batch and its metrics, as slime's own losses do.

    Args:
        args: slime's arguments, with `trustrl_region` from `--custom-config-path`.
        batch: A micro-batch of slime; lists with one tensor per response.
        logits: (1, tokens, vocabulary of this rank) in float32, with gradient.
        sum_of_sample_mean: slime's reduction of one value per response token to a number.

    Raises:
        ConfigError: If an argument does not work with the region; names the argument.
        EngineError: If this slime calls its losses in a way that trustrl does not support.
        MissingDataError: If the region's anchor is missing.
    """
    _check_seams()
    return _LOSS(args, batch, logits, sum_of_sample_mean)


def check_arguments(args: Namespace) -> None:
    """Checks the arguments when slime starts: `--custom-megatron-init-path trustrl.engines.slime.check_arguments`.

    Without it, the first micro-batch makes the same checks.

    Raises:
        ConfigError: If an argument does not work with the region; names the argument.
        EngineError: If this slime calls its losses in a way that trustrl does not support.
    """
    _check_seams()
    _LOSS.warn_of_idle_region(args, _LOSS.check_arguments(args))


def _log_probs(args: Namespace, batch: Batch, logits: Tensor) -> Mapping[str, list[Tensor]]:
    _, outputs = _theirs().get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    return outputs


def _approx_kl(log_probs: Tensor, reference: Tensor, kind: str) -> Tensor:
    return _theirs().compute_approx_kl(log_probs, reference, kl_loss_type=kind)


_LOSS = ResponseLoss(SAMPLED, ROWS, _log_probs, _approx_kl)


def _theirs() -> Any:
    from slime.backends.megatron_utils import loss

    return loss


@cache
def _check_seams() -> None:
    require_seams(_theirs(), LOG_PROBS_WITH, more=True)
