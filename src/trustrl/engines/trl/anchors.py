"""What is added to a rollout: the anchor's log-probs, and more of its distribution where the region asks for it.

Names of the added tensors start with `trustrl_`; TRL shuffles and splits them with its own. Bytes per token: 4 for each
anchor's log-prob, 8 K + 4 for a top-K, 2 D + 4 (in bf16) for an exact divergence; 8 per sequence for its version.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.engines.forward import KEYWORD, at_completions
from trustrl.engines.roles import sources
from trustrl.engines.trl.settings import Behavior
from trustrl.errors import MissingDataError
from trustrl.records import RolloutTokens, TopK
from trustrl.sampling import Sampling

IGNORED = -100
"""The label of a token that is not scored, as in TRL and transformers."""


class SampledTopK(NamedTuple):
    """The sampler's own most probable ids at each completion token, (B, T, K); empty columns have id −1."""

    ids: Tensor
    logp: Tensor


ScoreWithSampler = Callable[[dict[str, Any], int], SampledTopK]
"""(rollout, K) → top-K of μ at its completion tokens."""


class AnchorRecorder:
    """Adds to each rollout what one region needs and TRL does not record."""

    def __init__(
        self,
        needs: Needs,
        behavior: Behavior,
        *,
        mismatch: bool,
        temperature: float,
        score: ScoreWithSampler | None,
    ) -> None:
        self.needs = needs
        self._temperature = temperature
        self.behavior: Behavior = behavior
        self.anchors, self.distribution_from = sources(needs, behavior, mismatch=mismatch)
        self._score = score

    def record(self, model: Any, rollout: dict[str, Any], *, version: int, rows: int, autocast: Any) -> dict[str, Any]:
        """The tensors to add.

        Args:
            model: at the weights the rollout was sampled with.
            rollout: what TRL's `_generate_and_score_completions` returned.
            version: of those weights.
            rows: how many sequences to run at once.
            autocast: gives the context TRL runs its own forward passes in.

        Raises:
            MissingDataError: the sampler recorded no log-probs.
        """
        ids = rollout["completion_ids"]
        added: dict[str, Any] = {"trustrl_version": torch.full((len(ids),), version, device=ids.device)}
        if "behavior" in self.anchors and self.behavior == "sampler":
            if rollout.get("sampling_per_token_logps") is None:
                raise MissingDataError(
                    "The sampler must record the log-probs of the tokens it draws, got none. trustrl never replaces "
                    "them by recomputed ones: choose the region's anchor='proximal' if that is what you want."
                )
            added["trustrl_behavior_logp"] = rollout["sampling_per_token_logps"]
        by_trainer = {"proximal"} if self.behavior == "sampler" else {"proximal", "behavior"}
        wanted = sorted(self.anchors & by_trainer)
        logp = rollout.get("old_per_token_logps")
        if self.distribution_from == "trainer" or (wanted and logp is None):
            seen = self._forward(model, rollout, rows, autocast)
            logp = seen.pop("logp")
            added |= seen
        added |= {f"trustrl_{anchor}_logp": logp for anchor in wanted}
        if self.distribution_from == "sampler":
            assert self._score is not None
            top = self._score(rollout, self.needs.topk)
            added |= {"trustrl_topk_ids": top.ids.int(), "trustrl_topk_logp": top.logp}
        return added

    @torch.no_grad()
    def _forward(self, model: Any, rollout: dict[str, Any], rows: int, autocast: Any) -> dict[str, Tensor]:
        """One pass at the rollout weights: log-probs, and the trainer's own distribution where it is the anchor."""
        input_ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        attention_mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        length = rollout["completion_ids"].shape[1]
        parts: list[dict[str, Tensor]] = []
        for start in range(0, len(input_ids), rows):
            ids, mask = input_ids[start : start + rows], attention_mask[start : start + rows]
            labels = ids.masked_fill(mask == 0, IGNORED)
            labels[:, :-length] = IGNORED
            more = {}
            if self.distribution_from == "trainer":
                more[KEYWORD] = at_completions(
                    labels, length, temperature=self._temperature, top_k=self.needs.topk, hidden=self.needs.full
                )
            with autocast():
                out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **more)
            part = {"logp": out.log_probs[:, -length:]}
            if more and self.needs.topk:
                part |= {"trustrl_topk_ids": out.topk_ids.int(), "trustrl_topk_logp": out.topk_logp}
                part["trustrl_topk_tail_logp"] = out.topk_tail_logp
            if more and self.needs.full:
                part |= {"trustrl_hidden": out.hidden, "trustrl_logsumexp": out.logsumexp}
            parts.append(part)
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def rollout_tokens(inputs: dict[str, Any], in_loss: Tensor, needs: Needs, sampling: Sampling) -> RolloutTokens:
    """One micro-batch of TRL's inputs, as trustrl names them."""
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
