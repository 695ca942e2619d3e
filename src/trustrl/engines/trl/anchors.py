"""Tensors added to TRL's rollouts: the anchors' log-probs, and more of a distribution if the region needs it.

The names of the added tensors start with `trustrl_`; TRL shuffles and splits them with its own. Values of one number
per token are (B, T), as TRL's are. Wider ones exist only for tokens in the loss: a list of one tensor per sequence.
Bytes per token: 4 for each anchor's log-prob, 8 K + 4 for a top-K, 2 D + 4 (in bf16) for an exact divergence, 8 each
for the weights' version, the turn and the position, 4 (n + 1) for n ids that truncated sampling kept, and 2 for each
routed expert that is recorded.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from trustrl.config.axes import Needs
from trustrl.config.statistics import Anchor
from trustrl.core.records import RolloutTokens, TopK
from trustrl.core.sampling import KeptSet, Sampling
from trustrl.engines.common import seam
from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.loss_seam import SCORE, Score
from trustrl.engines.common.region_needs import Behavior, sources
from trustrl.engines.common.sampler_fields import REPLICA
from trustrl.engines.common.step_check import check_recorded
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import AskingModel, LogitsForward, VocabularyForward
from trustrl.engines.common.vocabulary_read import VocabularyOutput, Wanted, anchor_fields, at_completions, packed_kept
from trustrl.engines.refusals.trl import OLDEST_FUSED
from trustrl.engines.trl.sampled_rows import (
    NOT_RECORDED,
    SampledRows,
    in_loss_of,
    kept_columns,
    topk_rows,
    turn_tensor,
    version_tensor,
)
from trustrl.errors import ConfigError, EngineError, MissingDataError

RECORDED = "sampling_per_token_logps"
"""The log-probs that the sampler recorded, as TRL names them. They come from vLLM or from a `rollout_func`."""

TRAINERS = "old_per_token_logps"
"""The trainer's own log-probs at the rollout weights, as TRL names them, over the whole vocabulary."""

SCORED = frozenset(inspect.signature(getattr(GRPOTrainer, SCORE)).parameters)
"""The parameters of TRL's method that computes log-probs; those for images have the names of a rollout's tensors."""

POSITIONS = "trustrl_positions"
"""The positions of the tokens in the loss, one tensor per sequence."""


class FusedAskingModel(AskingModel):
    """Model proxy for TRL's fused output layer. `wanted` maps TRL's labels to the tokens to score, and to the request.

    Calls return log-probs and entropies in TRL's shape, (B, T).
    """

    def __init__(self, model: Any, wanted: Callable[[Tensor], tuple[TokenPlaces, Wanted]]) -> None:
        super().__init__(model, wanted)
        self.places: list[TokenPlaces] = []
        """The tokens of each call."""

    def __call__(self, *args: Any, **kwargs: Any) -> VocabularyOutput:
        """Runs one forward pass.

        Raises:
            EngineError: If the call has no labels.
        """
        if kwargs.get("labels") is None or not kwargs.get("fused_lm_head"):
            raise EngineError(
                "TRL's _get_per_token_logps_and_entropies must call the model with `labels` and `fused_lm_head=True`, "
                f"got {sorted(kwargs)}. Install a TRL version listed in trustrl's documentation, or choose a region on "
                "the sampled token such as trustrl.preset('dppo-binary-tv-capped')."
            )
        where, wanted = self._wanted(kwargs["labels"])
        output = self._ask(wanted, *args, **kwargs)
        self.places.append(where)
        return VocabularyOutput(log_probs=where.padded(output.log_probs), entropy=where.padded(output.entropy))

    def logp(self) -> Tensor:
        """Returns the log-probs of all calls, (B, T)."""
        return torch.cat([where.padded(out.log_probs) for where, out in zip(self.places, self.outputs, strict=True)])


class LogitsAskingModel(FusedAskingModel):
    """Model proxy for TRL before 1.15, which computes its own log-probs from logits.

    trustrl uses those of its own read: TRL's have the dtype of the logits and would not fit those at the K ids.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> VocabularyOutput:
        """Runs one forward pass."""
        labels = kwargs["input_ids"].masked_fill(kwargs["attention_mask"] == 0, -100)
        where, wanted = self._wanted(labels)
        self.places.append(where)
        return self._ask(wanted, *args, **kwargs)


_FUSED = seam.version_of("trl") >= OLDEST_FUSED
AskingTrlModel = FusedAskingModel if _FUSED else LogitsAskingModel
ReadingForward = VocabularyForward if _FUSED else LogitsForward
"""The proxy and the model's forward pass for the installed TRL."""


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
        shared: FusedAskingModel | None = None,
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
        where = TokenPlaces.of_mask(in_loss_of(rollout))
        added: dict[str, Any] = {
            POSITIONS: where.split(where.column),
            "trustrl_version": version_tensor(sampled, rollout["completion_ids"], version),
            "trustrl_turn": turn_tensor(rollout),
        }
        added |= self._from_sampler(rollout)
        wanted = self.by_trainer
        logp = rollout.get(TRAINERS)
        kept: list[KeptColumn] | None = None
        if self._sampling.truncated:
            added["trustrl_kept"] = kept = kept_columns(sampled, rollout)
            logp = None  # TRL's are those of the whole vocabulary
        distribution: dict[str, Tensor] = {}
        if shared is not None:
            logp, distribution = shared.logp(), self._distribution(shared, rollout)
        elif self.distribution_from == "trainer" or (wanted and logp is None):
            logp, distribution = self._forward(model, rollout, rows, kept)
        added |= {f"trustrl_{anchor}_logp": logp for anchor in wanted}
        if self.distribution_from == "sampler":
            distribution = topk_rows(sampled, rollout, self.needs.topk)
        return added | {f"trustrl_{name}": where.split(x) for name, x in distribution.items()}

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
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs one pass at the rollout weights: (B, T) log-probs, and the distribution if the trainer is the anchor."""
        input_ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        attention_mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        length = rollout["completion_ids"].shape[1]
        images = {name: x for name, x in rollout.items() if name in SCORED and x is not None}

        def score(scored: Any) -> tuple[Any, ...]:
            return self._logps(scored, input_ids, attention_mask, length, rows, **images)

        if kept is not None:
            return self._forward_within(model, rollout, score, kept)
        if self.distribution_from != "trainer":
            return score(model)[0], {}
        asking = self.asking(model, length)
        score(asking)
        return asking.logp(), self._distribution(asking, rollout)

    def asking(self, model: Any, length: int) -> FusedAskingModel:
        """Returns a proxy of the model that requests the trainer's distribution at so many last tokens."""
        request = {"temperature": self._sampling.temperature, "top_k": self.needs.topk, "hidden": self.needs.full}

        def wanted(labels: Tensor) -> tuple[TokenPlaces, Wanted]:
            where = TokenPlaces.of_mask(labels[:, -length:] >= 0)
            return where, at_completions(labels, where, **request)

        return AskingTrlModel(model, wanted)

    @property
    def shares_trls_pass(self) -> bool:
        """True if TRL's own pass over a rollout can return the anchor's distribution."""
        return self.distribution_from == "trainer" and not self._sampling.truncated

    def _distribution(self, asking: FusedAskingModel, rollout: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the trainer's distribution at the tokens in the loss, from the outputs of a pass."""
        names = ["topk_ids", "topk_logp", "topk_tail_logp"] if self.needs.topk else []
        names += ["hidden", "logsumexp"] if self.needs.full else []
        masks = in_loss_of(rollout).split([where.shape[0] for where in asking.places])
        chosen = [where.of(mask) for where, mask in zip(asking.places, masks, strict=True)]  # TRL scores tools' tokens
        passes = list(zip(asking.outputs, chosen, strict=True))
        fields = {name: torch.cat([getattr(out, name)[mask] for out, mask in passes]) for name in names}
        return {name: x.int() if name == "topk_ids" else x for name, x in fields.items()}

    def _forward_within(
        self, model: Any, rollout: dict[str, Any], score: Score, kept: list[KeptColumn]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs the pass inside the kept sets."""
        in_loss, first = in_loss_of(rollout), 0
        parts: list[tuple[TokenPlaces, Tensor]] = []

        def wanted(labels: Tensor) -> tuple[TokenPlaces, Wanted]:
            nonlocal first
            chunk = slice(first, first + len(labels))
            first = chunk.stop
            where = TokenPlaces.of_mask(in_loss[chunk])
            parts.append((where, where.of(rollout["completion_ids"][chunk])))
            ids = packed_kept(kept[chunk], labels.device)
            return where, at_completions(labels, where, temperature=self._sampling.temperature, kept_ids=ids)

        asking = FusedAskingModel(model, wanted)
        score(asking)
        fields = [
            anchor_fields(KeptSet(out.kept_ids, out.kept_logp), self.needs, ids)
            for out, (_, ids) in zip(asking.outputs, parts, strict=True)
        ]
        logp = torch.cat([where.padded(x["logp"]) for (where, _), x in zip(parts, fields, strict=True)])
        names = [name for name in fields[0] if name != "logp" and self.distribution_from == "trainer"]
        return logp, {name: torch.cat([part[name] for part in fields]) for name in names}


class RolloutPass:
    """The first forward pass of the policy while TRL makes a rollout, asked for the anchor's distribution.

    TRL runs it for `old_per_token_logps` if several optimizer steps take one rollout. No second pass is needed then.

    Args:
        model: The policy.
        recorder: The recorder, which knows what the region needs.
    """

    def __init__(self, model: Any, recorder: AnchorRecorder) -> None:
        self._model, self._recorder = model, recorder
        self._asking: FusedAskingModel | None = None
        self._logp: Any = None

    def run(self, score: Score, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls TRL's own method."""
        length = kwargs.get("logits_to_keep", args[2] if len(args) > 2 else None)
        # Only the policy's first pass is shared: TRL scores the reference model with the same method.
        if not self._recorder.shares_trls_pass or model is not self._model or self._asking or length is None:
            return score(model, *args, **kwargs)
        self._asking = self._recorder.asking(model, length)
        result = score(self._asking, *args, **kwargs)
        self._logp = result[0]
        return result

    def outputs(self, rollout: dict[str, Any]) -> FusedAskingModel | None:
        """Returns the outputs of the pass if it made TRL's `old_per_token_logps`, and not a reference's."""
        return self._asking if self._logp is not None and rollout.get(TRAINERS) is self._logp else None


def places_of(inputs: dict[str, Any], in_loss: Tensor) -> TokenPlaces:
    """Returns the tokens of one micro-batch. Waits for the device only if `AnchorRecorder` did not make the rollout."""
    positions = inputs.get(POSITIONS)
    return TokenPlaces.of_mask(in_loss) if positions is None else TokenPlaces.of_columns(positions, in_loss.shape)


def rollout_tokens(
    inputs: dict[str, Any], in_loss: Tensor, where: TokenPlaces, needs: Needs, sampling: Sampling
) -> RolloutTokens:
    """Returns one micro-batch of TRL's inputs as trustrl's record, packed."""

    def packed(name: str) -> Tensor | None:
        return None if inputs.get(name) is None else where.of(inputs[name])

    topk = None
    if needs.topk:
        topk = TopK(
            where.of(inputs["trustrl_topk_ids"]).long(),
            where.of(inputs["trustrl_topk_logp"]),
            of=needs.anchor,
            tail_logp=packed("trustrl_topk_tail_logp"),
        )
    # With truncated sampling TRL's log-probs do not serve: they are those of the whole vocabulary.
    proximal = packed("trustrl_proximal_logp")
    return RolloutTokens(
        advantage=where.of_rows(inputs["advantages"]),
        in_loss=where.of(in_loss),
        behavior_logp=packed("trustrl_behavior_logp"),
        proximal_logp=packed(TRAINERS) if proximal is None and not sampling.truncated else proximal,
        token_ids=where.of(inputs["completion_ids"]),
        sequence_ids=where.row,
        topk=topk,
        version=where.of(inputs["trustrl_version"]),
        turn=packed("trustrl_turn"),
        position=where.column,
        replica=where.of_rows(inputs[REPLICA]) if REPLICA in inputs else None,
        kept_ids=inputs.get("trustrl_kept_ids"),
        experts=packed("trustrl_experts"),
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
