"""Tensors added to TRL's rollouts: the anchors' log-probs, and more of a distribution if the region needs it.

The names of the added tensors start with `trustrl_`; TRL shuffles and splits them with its own. Bytes per token: 4 for
each anchor's log-prob, 8 K + 4 for a top-K, 2 D + 4 (in bf16) for an exact divergence; 8 per sequence for its version.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.core.records import RolloutTokens, TopK
from trustrl.core.sampling import Sampling
from trustrl.engines.common.region_needs import Behavior, sources
from trustrl.engines.common.vocabulary_forward import at_completions
from trustrl.engines.trl.forward_capture import AskingModel, Score
from trustrl.errors import ConfigError, MissingDataError

RECORDED = "sampling_per_token_logps"
"""The log-probs that the sampler recorded, as TRL names them. They come from vLLM or from a `rollout_func`."""


class SampledTopK(NamedTuple):
    """The sampler's most probable ids at each completion token, (B, T, K); empty columns have id −1."""

    ids: Tensor
    logp: Tensor


ScoreWithSampler = Callable[[dict[str, Any], int], SampledTopK]
"""(rollout, K) → the top-K of μ at the rollout's completion tokens."""


class AnchorRecorder:
    """Records the tensors that a region needs in each rollout and that TRL does not record.

    Args:
        needs: The region's needs.
        behavior: The source of μ.
        mismatch: Whether to record the trainer's log-probs in addition to the sampler's.
        temperature: The sampling temperature.
        logps: TRL's method that computes log-probs.
        score: Re-scores a rollout with the sampler; None if the region does not need the sampler's top-K.
    """

    def __init__(
        self,
        needs: Needs,
        behavior: Behavior,
        *,
        mismatch: bool,
        temperature: float,
        logps: Score,
        score: ScoreWithSampler | None,
    ) -> None:
        self.needs = needs
        self._temperature = temperature
        self.behavior: Behavior = behavior
        self.anchors, self.distribution_from = sources(needs, behavior, mismatch=mismatch)
        self._logps = logps
        self._score = score

    def record(self, model: Any, rollout: dict[str, Any], *, version: int, rows: int) -> dict[str, Any]:
        """Returns the tensors to add to a rollout.

        Args:
            model: The model, at the weights that the rollout was sampled with.
            rollout: The result of TRL's `_generate_and_score_completions`.
            version: The version of those weights.
            rows: The number of sequences to run at once.

        Raises:
            ConfigError: If the sampler recorded log-probs, and `behavior` is "trainer".
            MissingDataError: If the region needs the sampler's log-probs, and the sampler did not record them.
        """
        ids = rollout["completion_ids"]
        added: dict[str, Any] = {"trustrl_version": torch.full((len(ids),), version, device=ids.device)}
        added |= self._from_sampler(rollout)
        by_trainer = {"proximal"} if self.behavior == "sampler" else {"proximal", "behavior"}
        wanted = sorted(self.anchors & by_trainer)
        logp = rollout.get("old_per_token_logps")
        if self.distribution_from == "trainer" or (wanted and logp is None):
            seen = self._forward(model, rollout, rows)
            logp = seen.pop("logp")
            added |= seen
        added |= {f"trustrl_{anchor}_logp": logp for anchor in wanted}
        if self.distribution_from == "sampler":
            assert self._score is not None
            top = self._score(rollout, self.needs.topk)
            added |= {"trustrl_topk_ids": top.ids.int(), "trustrl_topk_logp": top.logp}
        return added

    def _from_sampler(self, rollout: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the sampler's recorded log-probs. trustrl never replaces them."""
        recorded = rollout.get(RECORDED)
        if recorded is None:
            if "behavior" in self.anchors and self.behavior == "sampler":
                raise MissingDataError(
                    "The sampler must record the log-probs of the tokens it draws, got none. A rollout_func returns "
                    "them as 'logprobs'. trustrl never replaces them with recomputed ones: set anchor='proximal' on "
                    "the region to anchor on the trainer, or behavior='trainer' if the trainer's own model generated."
                )
            return {}
        if self.behavior == "trainer":
            raise ConfigError(
                "behavior must be 'sampler' when the rollout carries the sampler's log-probs, got 'trainer'. The "
                "trainer's log-probs would replace the recorded ones and hide the mismatch. To anchor on the trainer's "
                "log-probs, set anchor='proximal' on the region; a rollout_func that records none returns "
                "'logprobs': None."
            )
        return {"trustrl_behavior_logp": recorded}

    @torch.no_grad()
    def _forward(self, model: Any, rollout: dict[str, Any], rows: int) -> dict[str, Tensor]:
        """Runs one pass at the rollout weights: log-probs, and the trainer's distribution if it is the anchor."""
        input_ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        attention_mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        length = rollout["completion_ids"].shape[1]
        asking = None
        if self.distribution_from == "trainer":
            more = {"temperature": self._temperature, "top_k": self.needs.topk, "hidden": self.needs.full}
            asking = AskingModel(model, functools.partial(at_completions, length=length, **more))
        logp = self._logps(asking or model, input_ids, attention_mask, length, rows)[0]
        found = {"logp": logp}
        if asking is not None:
            names = ["topk_ids", "topk_logp", "topk_tail_logp"] if self.needs.topk else []
            names += ["hidden", "logsumexp"] if self.needs.full else []
            found |= {f"trustrl_{name}": torch.cat([getattr(out, name) for out in asking.outputs]) for name in names}
            if self.needs.topk:
                found["trustrl_topk_ids"] = found["trustrl_topk_ids"].int()
        return found


def rollout_tokens(inputs: dict[str, Any], in_loss: Tensor, needs: Needs, sampling: Sampling) -> RolloutTokens:
    """Returns one micro-batch of TRL's inputs as trustrl's record."""
    topk = None
    if needs.topk:
        topk = TopK(
            inputs["trustrl_topk_ids"].long(),
            inputs["trustrl_topk_logp"],
            of=needs.anchor,
            tail_logp=inputs.get("trustrl_topk_tail_logp"),
        )
    return RolloutTokens(
        advantage=inputs["advantages"],
        in_loss=in_loss,
        behavior_logp=inputs.get("trustrl_behavior_logp"),
        proximal_logp=inputs.get("trustrl_proximal_logp", inputs.get("old_per_token_logps")),
        token_ids=inputs["completion_ids"],
        topk=topk,
        version=inputs["trustrl_version"].unsqueeze(1).expand(in_loss.shape),
        sampling=sampling,
    )
