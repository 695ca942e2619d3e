"""Agent loops that record the sampler's most probable ids: μ's top-K.

verl's servers return only the log-prob of the sampled token. For distillation, they also score finished sequences: one
prefill with `prompt_logprobs`, with the same parameters for vLLM and SGLang. These loops run verl's own loop, then
request the top-K at every response token from the server that sampled, and return it in the fields that verl passes to
its workers.

verl catches every error of an agent loop, logs it, and trains on the remaining sequences (or, in asynchronous modes,
on others instead). Scoring fails more often for long sequences, so this would bias training toward short answers.
These loops therefore never raise if scoring fails: the sequence carries the reason, and the worker raises it.

Cost: one prefill of each sequence in addition to its generation (the prefix cache is not read), and 8 K bytes per
response token through verl's queue. At a temperature other than 1, two prefills: servers score before temperature, and
the sampled token's own score relates the two.
"""

import logging
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from trustrl.engines.common.region_settings import is_region_name
from trustrl.engines.refusals.verl import RECORDING
from trustrl.engines.verl.anchors import FAULT, NOT_SCORED, SAMPLED_IDS, SAMPLED_LOGP
from trustrl.engines.verl.verl_config import region_of
from trustrl.errors import EngineError, MissingDataError

logger = logging.getLogger(__name__)


class RecordsTopK:
    """Mixin that records the top-K in a verl agent loop: `class Mine(RecordsTopK, MyAgentLoop)`."""

    config: Any
    server_manager: Any

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Runs verl's own loop, then records the sampler's top-K that the region needs."""
        output = await super().run(sampling_params, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        k = sampled_topk(self.config)
        if k:
            temperature = float(sampling_params.get("temperature", 1.0))
            for one in output if isinstance(output, list) else [output]:
                one.extra_fields |= await self._recorded(one, k, temperature)
        return output

    async def _recorded(self, output: Any, k: int, temperature: float) -> dict[str, Any]:
        """Returns the fields that a sequence carries to the workers: its scores, or the reason why they are missing."""
        try:
            ids, logp = await self._score(output, k, temperature)
        except Exception as error:
            logger.exception("trustrl could not score a sequence; the next training step will raise")
            ids = torch.full((len(output.response_ids), k), NOT_SCORED, dtype=torch.int32)
            return {SAMPLED_IDS: ids, SAMPLED_LOGP: torch.zeros(ids.shape), FAULT: f"{type(error).__name__}: {error}"}
        return {SAMPLED_IDS: ids, SAMPLED_LOGP: logp}

    async def _score(self, output: Any, k: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns ((R, K) ids, (R, K) log-probs) at the response's tokens."""
        ids, logp = await self._prompt_logprobs(output, k)
        if temperature != 1.0 and temperature > 0:  # greedy validation does not draw from a distribution
            if output.response_logprobs is None:
                raise MissingDataError(
                    "The sampler must record the log-probs of the tokens it draws at a temperature other than 1, got "
                    "none. Set actor_rollout_ref.rollout.calculate_log_probs=True."
                )
            _, raw = await self._prompt_logprobs(output, 0)
            drawn = torch.tensor(output.response_logprobs).unsqueeze(1)
            logp = ((logp - raw) / temperature + drawn).clamp(max=0.0)
        return ids, logp

    async def _prompt_logprobs(self, output: Any, k: int) -> tuple[Tensor, Tensor]:
        sequence = [*output.prompt_ids, *output.response_ids]
        scored = await self.server_manager.generate(
            request_id=uuid4().hex,
            prompt_ids=sequence,
            # One token must be generated. Greedily, because a drawn token would advance the rollouts' random stream.
            sampling_params={"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k, "detokenize": False},
        )
        _check_version(output.extra_fields, scored.extra_fields.get("global_steps"))
        # Row t − 1 holds the distribution that token t was drawn from.
        first, last = len(output.prompt_ids) - 1, len(sequence) - 1
        ids = torch.tensor(scored.extra_fields["prompt_ids"][first:last], dtype=torch.int32)
        return ids, torch.tensor(scored.extra_fields["prompt_logprobs"][first:last])


def _check_version(sampled: dict[str, Any], scored_at: int | None) -> None:
    """Raises if the scoring weights differ from the sampling weights, as far as the servers report versions."""
    known = {sampled[name] for name in ("min_global_steps", "max_global_steps") if sampled.get(name) is not None}
    if scored_at is not None and known - {scored_at}:
        raise EngineError(
            f"A sequence must be scored with the weights that sampled it, got weights of step {scored_at} for a "
            f"sequence of step {' and '.join(map(str, sorted(known)))}. Use verl's synchronous trainer, or set "
            "region.anchor=proximal to anchor the region on the trainer's own policy."
        )


def sampled_topk(config: Any) -> int:
    """Returns how many of the sampler's most probable ids the run's region needs; 0 if it needs none."""
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if not is_region_name(policy_loss.get("loss_mode", "")):
        return 0
    needs = region_of(policy_loss.loss_mode, policy_loss).needs()
    return needs.topk if needs.anchor == "behavior" else 0


@register(RECORDING["single_turn_agent"])
class SingleTurnTopK(RecordsTopK, SingleTurnAgentLoop):
    """verl's `single_turn_agent` with recording."""


@register(RECORDING["tool_agent"])
class ToolTopK(RecordsTopK, ToolAgentLoop):
    """verl's `tool_agent` with recording."""
