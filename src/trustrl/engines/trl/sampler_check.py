"""Gap between decode and prefill: log-probs that vLLM recorded while it sampled, and those of the finished sequence.

Both come from the same weights. They differ by rounding, because vLLM runs other kernels for one new token than for a
whole sequence: about 0 in float32 on a CPU, and a few hundredths of a nat in bf16. This is why trustrl records μ while
vLLM decodes, and never scores again afterwards.
"""

import functools
from typing import Any

import torch

from trustrl.config.sampling_parameters import is_truncated
from trustrl.config.validators import whole
from trustrl.engines.trl.anchors import RECORDED
from trustrl.engines.trl.sampled_rows import in_loss_of
from trustrl.engines.vllm.scoring import score_rollout

GAP = "trustrl/decode_prefill_gap"
"""Mean |log μ while decoding − log μ by prefill| at sampled tokens, in nats. `_max` is the largest."""

LONGEST = 512
"""The number of ids that are scored. vLLM holds this many rows of float32 logits for a moment."""


class SamplerCheck:
    """Scores the beginning of one sequence per rank with the colocated vLLM, in some rollouts, and logs the gap.

    Cost: one prefill of at most `LONGEST` ids per rank, and one gather of three numbers.

    Args:
        every: The number of rollouts from one check to the next; 0 never checks.
    """

    def __init__(self, every: int) -> None:
        whole("check_sampler_every", every, low=0)
        self._every = every
        self._rollouts = 0

    def run(self, trainer: Any, rollout: dict[str, Any]) -> None:
        """Checks a training rollout, if it is this one's turn. Call it on every rank."""
        turn, self._rollouts = self._rollouts, self._rollouts + 1
        if not self._every or turn % self._every or not _comparable(trainer) or rollout.get(RECORDED) is None:
            return
        sequences, lengths, place = _beginning(rollout, turn // self._every, _room(trainer))
        gap = torch.zeros(0)
        if sequences or trainer.vllm_generation.tensor_parallel_size > 1:
            scores = score_rollout(trainer.vllm_generation, sequences, lengths, 0)
            gap = _gap(rollout, place, scores.logp[0][scores.valid[0]]) if sequences else gap
        mine = torch.tensor(
            [gap.sum(), gap.numel(), gap.max() if gap.numel() else 0.0], device=trainer.accelerator.device
        )
        total, tokens, largest = trainer.accelerator.gather(mine).view(-1, 3).unbind(-1)
        if tokens.sum() > 0:
            trainer._metrics["train"][GAP].append((total.sum() / tokens.sum()).item())
            trainer._metrics["train"][f"{GAP}_max"].append(largest.max().item())


def _comparable(trainer: Any) -> bool:
    """Returns whether prefill scores the distribution that was drawn from: vLLM scores ids, before temperature."""
    if getattr(trainer, "_is_vlm", False):  # on every rank alike, with or without images in its rows
        return False
    if not trainer.use_vllm or getattr(trainer, "rollout_func", None) is not None:
        return False
    generation = trainer.vllm_generation
    if generation.mode != "colocate" or generation.enable_sleep_mode:  # a sleeping sampler cannot score
        return False
    settings = functools.partial(getattr, trainer)
    return not is_truncated(settings) and trainer.temperature == trainer.repetition_penalty == 1.0


def _room(trainer: Any) -> int:
    return min(LONGEST, trainer.vllm_generation.llm.model_config.max_model_len - 1)  # vLLM samples one more token


def _beginning(rollout: dict[str, Any], turn: int, room: int) -> tuple[list[list[int]], list[int], int]:
    """Returns the first ids of one sequence whose answer has room, its prompt's length, and its row; or no sequence."""
    prompts, answers = (rollout[f"{part}_mask"].sum(-1).tolist() for part in ("prompt", "completion"))
    fitting = [
        row for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)) if prompt < room and answer
    ]
    if not fitting:
        return [], [], -1
    row = fitting[turn % len(fitting)]
    prompt = rollout["prompt_ids"][row][rollout["prompt_mask"][row].bool()].tolist()
    answer = rollout["completion_ids"][row][: answers[row]].tolist()
    return [(prompt + answer)[:room]], [len(prompt)], row


def _gap(rollout: dict[str, Any], row: int, scored: torch.Tensor) -> torch.Tensor:
    mask = in_loss_of(rollout)[row, : len(scored)].cpu()
    return (rollout[RECORDED][row][: len(scored)].cpu() - scored).abs()[mask]
