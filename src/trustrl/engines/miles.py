"""miles, a fork of slime, with a trust region: a custom loss.

Seam:     `--custom-loss-function-path`, which miles calls with its arguments, a micro-batch, logits, and its reduction
Switch:   `--loss-type custom_loss --custom-loss-function-path trustrl.engines.miles.region_loss`
Settings: `trustrl_region` in the YAML file of `--custom-config-path`
Borrowed: `get_log_probs_and_entropy` with its tensor and context parallelism, `compute_approx_kl`, and the reduction
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trustrl.engines.common.response_loss import Batch, ResponseLoss

LOG_PROBS_WITH = (
    "logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy", "entropy_requires_grad",
    "non_loss_data", "max_seq_lens",
)  # fmt: skip


def _log_probs(losses: Any, args: Namespace, batch: Batch, logits: Tensor) -> Mapping[str, list[Tensor]]:
    return losses.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=args.entropy_coef != 0 or args.observe_training_entropy,
        entropy_requires_grad=args.entropy_coef != 0,
        max_seq_lens=batch.get("max_seq_lens"),
    )


_LOSS = ResponseLoss("miles", "miles.backends.training_utils.loss_hub.losses", _log_probs, LOG_PROBS_WITH)
region_loss, check_arguments, _check_seams = _LOSS.region_loss, _LOSS.check_arguments, _LOSS.check_seams
