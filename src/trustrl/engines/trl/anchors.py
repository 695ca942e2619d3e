"""Tensors added to TRL's rollouts: the anchors' log-probs, and more of a distribution if the region needs it.

The names of the added tensors start with `trustrl_`; TRL shuffles and splits them with its own. Bytes per token: 4 for
each anchor's log-prob, 8 K + 4 for a top-K, 2 D + 4 (in bf16) for an exact divergence, 8 each for the weights' version
and the turn, 4 (n + 1) for n ids that truncated sampling kept, and 2 for each routed expert that is recorded.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from trustrl.config.axes import Needs
from trustrl.config.statistics import Anchor
from trustrl.core.records import RolloutTokens, TopK
from trustrl.core.sampling import KeptSet, Sampling
from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.kept_policy import anchor_fields, padded_kept
from trustrl.engines.common.loss_seam import SCORE, Score
from trustrl.engines.common.region_needs import Behavior, sources
from trustrl.engines.common.sampler_fields import REPLICA
from trustrl.engines.common.step_check import check_recorded
from trustrl.engines.common.vocabulary_read import at_completions
from trustrl.engines.trl.asking_model import AskingModel
from trustrl.engines.trl.sampled_rows import (
    NOT_RECORDED,
    SampledRows,
    in_loss_of,
    kept_columns,
    topk_tensors,
    turn_tensor,
    version_tensor,
)
from trustrl.errors import ConfigError, MissingDataError

RECORDED = "sampling_per_token_logps"
"""The log-probs that the sampler recorded, as TRL names them. They come from vLLM or from a `rollout_func`."""

TRAINERS = "old_per_token_logps"
"""The trainer's own log-probs at the rollout weights, as TRL names them, over the whole vocabulary."""

SCORED = frozenset(inspect.signature(getattr(GRPOTrainer, SCORE)).parameters)
"""The parameters of TRL's method that computes log-probs; those for images have the names of a rollout's tensors."""


class AnchorRecorder:
    """Records the tensors that a region needs in each rollout and that TRL does not record.

    Args:
        needs: The region's needs.
        behavior: The source of μ.
        mismatch: Whether to record the trainer's log-probs in addition to the sampler's.
        sampling: The sampling settings.
        logps: TRL's method that computes log-probs.
    """

    def __init__(
        self,
        needs: Needs,
        behavior: Behavior,
        *,
        mismatch: bool,
        sampling: Sampling,
        logps: Score,
    ) -> None:
        self.needs = needs
        self._sampling = sampling
        self.behavior: Behavior = behavior
        self.anchors, self.distribution_from = sources(needs, behavior, mismatch=mismatch)
        self._logps = logps
        trainers: set[Anchor] = {"proximal"} if behavior == "sampler" else {"proximal", "behavior"}
        self.by_trainer = sorted(self.anchors & trainers)
        """The anchors whose log-probs are the trainer's."""

    def record(
        self,
        model: Any,
        rollout: dict[str, Any],
        *,
        version: int,
        rows: int,
        sampled: SampledRows = NOT_RECORDED,
        shared: AskingModel | None = None,
    ) -> dict[str, Any]:
        """Returns the tensors to add to a rollout.

        Args:
            model: The model, at the weights that the rollout was sampled with.
            rollout: The result of TRL's `_generate_and_score_completions`.
            version: The version of those weights, for tokens whose version the sampler did not record.
            rows: The number of sequences to run at once.
            sampled: The sampler's own records of the same completions.
            shared: The model's outputs in TRL's own pass over this rollout, if it was asked for the distribution.

        Raises:
            ConfigError: If the sampler recorded log-probs, and `behavior` is "trainer".
            MissingDataError: If the region needs the sampler's log-probs, and the sampler did not record them.
            NonFiniteError: If the sampler recorded NaN at a token in the loss.
        """
        ids = rollout["completion_ids"]
        added: dict[str, Any] = {
            "trustrl_version": version_tensor(sampled, ids, version),
            "trustrl_turn": turn_tensor(rollout),
        }
        added |= self._from_sampler(rollout)
        wanted = self.by_trainer
        logp = rollout.get(TRAINERS)
        kept: list[KeptColumn] | None = None
        if self._sampling.truncated:
            added["trustrl_kept"] = kept = kept_columns(sampled, rollout)
            logp = None  # TRL's are those of the whole vocabulary
        if shared is not None:
            added |= self._distribution(shared)
        elif self.distribution_from == "trainer" or (wanted and logp is None):
            seen = self._forward(model, rollout, rows, kept)
            logp = seen.pop("logp")
            added |= seen
        added |= {f"trustrl_{anchor}_logp": logp for anchor in wanted}
        if self.distribution_from == "sampler":
            top_ids, top_logp = topk_tensors(sampled, rollout, self.needs.topk)
            added |= {"trustrl_topk_ids": top_ids, "trustrl_topk_logp": top_logp}
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
        check_recorded(recorded, in_loss_of(rollout))
        return {"trustrl_behavior_logp": recorded}

    @torch.no_grad()
    def _forward(
        self, model: Any, rollout: dict[str, Any], rows: int, kept: list[KeptColumn] | None
    ) -> dict[str, Tensor]:
        """Runs one pass at the rollout weights: log-probs, and the trainer's distribution if it is the anchor."""
        input_ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        attention_mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        length = rollout["completion_ids"].shape[1]
        images = {name: x for name, x in rollout.items() if name in SCORED and x is not None}

        def score(scored: Any) -> tuple[Any, ...]:
            return self._logps(scored, input_ids, attention_mask, length, rows, **images)

        if kept is not None:
            chunks = _Chunks(kept, rollout["completion_ids"])
            request: dict[str, Any] = {"length": length, "temperature": self._sampling.temperature}
            asking = AskingModel(model, lambda x: at_completions(x, kept_ids=chunks.next(x), **request))
            score(asking)
            return self._within_kept(asking.outputs, rollout["completion_ids"])
        if self.distribution_from != "trainer":
            return {"logp": score(model)[0]}
        asking = self.asking(model, length)
        return {"logp": score(asking)[0], **self._distribution(asking)}

    def asking(self, model: Any, length: int) -> AskingModel:
        """Returns a proxy of the model that requests the trainer's distribution at so many last tokens."""
        request = {"temperature": self._sampling.temperature, "top_k": self.needs.topk, "hidden": self.needs.full}
        return AskingModel(model, functools.partial(at_completions, length=length, **request))

    @property
    def shares_trls_pass(self) -> bool:
        """True if TRL's own pass over a rollout can return the anchor's distribution."""
        return self.distribution_from == "trainer" and not self._sampling.truncated

    def _distribution(self, asking: AskingModel) -> dict[str, Tensor]:
        """Returns the trainer's distribution from the outputs of a pass."""
        names = ["topk_ids", "topk_logp", "topk_tail_logp"] if self.needs.topk else []
        names += ["hidden", "logsumexp"] if self.needs.full else []
        found = {f"trustrl_{name}": torch.cat([getattr(out, name) for out in asking.outputs]) for name in names}
        if self.needs.topk:
            found["trustrl_topk_ids"] = found["trustrl_topk_ids"].int()
        return found

    def _within_kept(self, outputs: list[Any], token_ids: Tensor) -> dict[str, Tensor]:
        """Returns the trainer's side inside the kept sets."""
        tokens = token_ids.split([len(out.kept_ids) for out in outputs])
        parts = [
            anchor_fields(KeptSet(out.kept_ids, out.kept_logp), self.needs, ids)
            for out, ids in zip(outputs, tokens, strict=True)
        ]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.distribution_from != "trainer":
            return {"logp": joined["logp"]}
        return {name if name == "logp" else f"trustrl_{name}": x for name, x in joined.items()}


class _Chunks:
    """Kept ids in the order in which TRL scores its rows."""

    def __init__(self, columns: list[KeptColumn], like: Tensor) -> None:
        self._columns, self._like = columns, like
        self._start = 0

    def next(self, labels: Tensor) -> Tensor:
        """Returns the padded kept ids of the next rows, as many as there are labels."""
        here = slice(self._start, self._start + len(labels))
        self._start = here.stop
        return padded_kept(self._columns[here], self._like[here])


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
        proximal_logp=inputs.get("trustrl_proximal_logp", None if sampling.truncated else inputs.get(TRAINERS)),
        token_ids=inputs["completion_ids"],
        topk=topk,
        version=inputs["trustrl_version"],
        turn=inputs.get("trustrl_turn"),
        replica=inputs.get(REPLICA),
        kept_ids=inputs.get("trustrl_kept_ids"),
        experts=inputs.get("trustrl_experts"),
        sampling=sampling,
    )


def corrected(inputs: dict[str, Any], in_loss: Tensor) -> dict[str, Any]:
    """Moves TRL's correction of the mismatch into the advantages.

    The policy term is linear in the advantages; a penalty is not.
    """
    factor, advantages = inputs["importance_sampling_ratio"], inputs["advantages"]
    advantages = (advantages if advantages.ndim == 2 else advantages.unsqueeze(1)) * factor
    ones = torch.ones_like(factor)
    return {**inputs, "advantages": advantages.expand(in_loss.shape), "importance_sampling_ratio": ones}
