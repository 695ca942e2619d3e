"""ms-swift's `GRPOTrainer` with a region.

Seam:     `_compute_loss_and_metrics(model, model_inputs, grpo_batch)`, `_prepare_batch_inputs(samples)`, and
          `_get_per_token_logps_and_entropies(model, ...)`, which all call super(). For Top-K regions, also the model's
          `forward`, which takes one more keyword and returns the vocabulary with the logits
Switch:   `import trustrl.engines.swift` in a file for `--external_plugins`, and the variable `TRUSTRL_REGION`. The
          region's settings are environment variables, which ms-swift's YAML files set under `ENV`
Borrowed: everything else. `LossSeamMixin` runs ms-swift's own loss with advantages of 0 and a ratio of 1, so its
          reduction, its KL to the reference and its other terms stay ms-swift's
Added:    `trustrl_version` and, for Top-K regions, `trustrl_topk` and `trustrl_logp`, as attributes of a rollout's
          `GRPOBatch`. The K ids and the loss hold tokens in the loss only
Anchors:  μ is `rollout_per_token_logps`, which vLLM recorded; π' is `old_per_token_logps`, which ms-swift computes for
          every rollout. Top-K regions take π' and π from trustrl's read: ms-swift's have the dtype of the logits
"""

import dataclasses
import os
from typing import Any, NamedTuple, cast

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import TokenWeights
from trustrl.config.validators import one_of
from trustrl.core.metrics import Choice, check_choice
from trustrl.core.policy_loss import policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.core.sampling import Sampling
from trustrl.engines.common import seam
from trustrl.engines.common.loss_seam import Capture, LossSeamMixin, RegionState, require_seam
from trustrl.engines.common.region_needs import Behavior, sources
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.step_check import MAX_DROPPED_SHARE, check_first_loss, check_of_rollouts, check_recorded
from trustrl.engines.common.step_metrics import StepMetrics
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import AskingModel, LogitsForward
from trustrl.engines.common.vocabulary_read import Wanted, at_completions, read_by_policy
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.swift import OLDEST, REDUCTIONS, ROWS
from trustrl.errors import ConfigError, MissingDataError

PACKAGE = "ms-swift"

REGION, BEHAVIOR, METRICS = "TRUSTRL_REGION", "TRUSTRL_BEHAVIOR", "TRUSTRL_METRICS"
STARTUP_CHECKS, DROPPED = "TRUSTRL_STARTUP_CHECKS", "TRUSTRL_MAX_DROPPED_SHARE"


class Settings(NamedTuple):
    """The settings of one run."""

    region: Region
    behavior: Behavior = "sampler"
    """The source of μ: the log-probs that vLLM recorded, or, if transformers generates, those of the trainer."""

    metrics: Choice = "core"
    startup_checks: bool = True
    max_dropped_share: float = MAX_DROPPED_SHARE


def settings() -> Settings:
    """Returns the settings that the environment describes.

    Raises:
        ConfigError: If a variable is missing or invalid.
        UnknownNameError: If no preset has the name in `TRUSTRL_REGION`.
    """
    variables = os.environ
    if not variables.get(REGION):
        raise ConfigError(
            f"{REGION} must be set with `import trustrl.engines.swift`, got nothing. Set it to a preset's name, such "
            "as dppo-binary-tv-capped, in the environment or under ENV in ms-swift's YAML file."
        )
    behavior, metrics = variables.get(BEHAVIOR) or "sampler", variables.get(METRICS) or "core"
    one_of(BEHAVIOR, behavior, ("sampler", "trainer"))
    check_choice(metrics, METRICS)
    checks = variables.get(STARTUP_CHECKS) or "on"
    one_of(STARTUP_CHECKS, checks, ("on", "off"))
    share = variables.get(DROPPED) or str(MAX_DROPPED_SHARE)
    try:
        number = float(share)
    except ValueError:
        raise ConfigError(f"{DROPPED} must be a share in (0, 1], got {share!r}.") from None
    return Settings(
        region_given(variables[REGION], REGION), cast(Behavior, behavior), cast(Choice, metrics), checks == "on", number
    )


class TrustRegionGRPOTrainer(LossSeamMixin, GRPOTrainer):
    """ms-swift's `GRPOTrainer` with a trust region instead of the clip. `settings` reads the environment for it."""

    _advantages_name = "grpo_batch.advantages"
    _recording = False
    """True while ms-swift computes the log-probs of a rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Creates a trainer with the region that `TRUSTRL_REGION` names.

        Args:
            *args: Positional arguments of `GRPOTrainer`.
            **kwargs: Keyword arguments of `GRPOTrainer`.

        Raises:
            ConfigError: If a setting does not work with the region; names the setting and the fix.
            EngineError: If the adapter does not support the installed ms-swift.
        """
        _check_seams()
        self._settings = chosen = settings()
        self.region, self._needs = chosen.region, chosen.region.needs()
        model = kwargs["model"] if "model" in kwargs else args[0]
        check_settings(kwargs["args"], chosen, kwargs["template"], model)
        super().__init__(*args, **kwargs)
        self._reads_topk = sources(self._needs, chosen.behavior, mismatch=False)[1] == "trainer"
        if self._reads_topk:
            model = self.accelerator.unwrap_model(self.model)
            base = model.get_base_model() if hasattr(model, "get_base_model") else model
            LogitsForward(base, float32_head=False)
        self._sampling = Sampling(
            logprobs="processed", temperature=self.temperature, truncated=False, engine="ms-swift"
        )
        self._first_loss = chosen.startup_checks
        check = check_of_rollouts(self, chosen.behavior, chosen.max_dropped_share, DROPPED)
        self._region_metrics = StepMetrics(check, chosen.metrics, startup_checks=chosen.startup_checks)
        self.add_callback(RegionState(self.region))

    # ── seam 1: the rollout, with the anchors that the region needs ─────────────────────────────────────────────────

    def _prepare_batch_inputs(self, samples: Any) -> list[dict[str, Any]]:
        self._recording = self._reads_topk
        try:
            batches = super()._prepare_batch_inputs(samples)
        finally:
            self._recording = False
        for batch in batches:
            rollout = batch["grpo_batch"]
            if not self.args.async_generate:
                rollout.trustrl_version = self.state.global_step
            if self._settings.behavior == "sampler" and "behavior" in self._needs.anchors:
                _check_sampler(rollout)
        return batches

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs ms-swift's own method. The first call for a rollout's micro-batch also records the anchor's top K."""
        score = super()._get_per_token_logps_and_entropies
        if not self._recording or model is not self.model or hasattr(args[1], "trustrl_topk"):
            return score(model, *args, **kwargs)
        inputs, rollout = args
        where = TokenPlaces.of_mask(self._in_loss(rollout))
        asking = AskingModel(model, self._wanted(inputs, where, top_k=self._needs.topk))
        scores = score(asking, *args, **kwargs)
        (out,) = asking.outputs
        assert out.topk_ids is not None  # requested
        assert out.topk_logp is not None
        rollout.trustrl_logp = out.log_probs
        rollout.trustrl_topk = TopK(out.topk_ids, out.topk_logp, of=self._needs.anchor, tail_logp=out.topk_tail_logp)
        return scores

    # ── seam 2: the loss ────────────────────────────────────────────────────────────────────────────────────────────

    def _compute_loss_and_metrics(self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any) -> tuple[Any, ...]:
        in_loss = self._in_loss(grpo_batch)
        where = TokenPlaces.of_mask(in_loss)
        compute, swift_metrics = super()._compute_loss_and_metrics, {}

        def run(zero: Tensor) -> Tensor:
            # Without `old_per_token_logps`, ms-swift's ratio is exactly 1.
            loss, metrics = compute(
                model, model_inputs, dataclasses.replace(grpo_batch, advantages=zero, old_per_token_logps=None)
            )
            swift_metrics.update(metrics)
            return loss

        parts = self._loss_parts(run, Capture(model, self._asking(model_inputs, grpo_batch, where)), in_loss)
        policy = self._policy_tokens(parts.seen, where)
        rollout = self._rollout_tokens(model_inputs, grpo_batch, where)
        if self._first_loss and in_loss.any():
            self._check_weights(parts.weights, in_loss)
            switch = f"{STARTUP_CHECKS}=off"
            check_first_loss(policy, rollout, self._needs.anchor, self._settings.behavior, switch)
            self._first_loss = False
        # The trainer divides this loss by the accumulated micro-batches later. The metrics need the final factors.
        later = self.current_gradient_accumulation_steps if self.model.training else 1
        weights = parts.weights / later
        reduction = TokenWeights(where.of(weights), like=REDUCTIONS[self.loss_type])
        out = policy_loss(policy, rollout, self.region, reduction=reduction)
        swift_metrics.pop("clipping", None)  # computed from advantages of 0; the step's metrics have the region's
        self._region_metrics.add(self, out, policy, rollout, weights)
        return parts.others + out.loss * later, swift_metrics

    def _in_loss(self, batch: Any) -> Tensor:
        """Returns the (B, T) mask of the tokens in the loss."""
        in_loss = batch.completion_mask.bool()
        return in_loss & ~batch.truncated_mask.unsqueeze(1) if self.overlong_filter else in_loss

    def _policy_tokens(self, seen: Any, where: TokenPlaces) -> PolicyTokens:
        """Returns the policy's side of one micro-batch."""
        more = {"logp": where.of(seen.logp), "entropy": None if seen.entropy is None else where.of(seen.entropy)}
        if seen.output is not None:
            # ms-swift's own are rounded to the dtype of the logits, and would not fit those at the K ids.
            more |= {"logp": seen.output.log_probs, **read_by_policy(seen.output, self._needs)}
        return PolicyTokens(version=self.state.global_step, sampling=self._sampling, **more)

    def _rollout_tokens(self, inputs: dict[str, Any], batch: Any, where: TokenPlaces) -> RolloutTokens:
        """Returns the rollout's side of one micro-batch."""
        version = getattr(batch, "trustrl_version", None)
        recorded = (batch.rollout_per_token_logps, batch.old_per_token_logps)
        behavior, proximal = (None if logp is None else where.of(logp) for logp in recorded)
        proximal = getattr(batch, "trustrl_logp", proximal)
        if self._settings.behavior == "trainer":  # with both, the metrics would report a mismatch of 0
            behavior = proximal if "behavior" in self._needs.anchors else None
            proximal = proximal if "proximal" in self._needs.anchors else None
        return RolloutTokens(
            advantage=where.of_rows(batch.advantages),
            in_loss=torch.ones_like(where.row, dtype=torch.bool),
            behavior_logp=behavior,
            proximal_logp=proximal,
            token_ids=where.of(inputs["input_ids"][:, -where.shape[1] :]),
            sequence_ids=where.row,
            topk=getattr(batch, "trustrl_topk", None),
            version=None if version is None else torch.full_like(where.row, version),
            sampling=self._sampling,
        )

    def _asking(self, inputs: dict[str, Any], batch: Any, where: TokenPlaces) -> Any:
        """Returns a function that makes a proxy of the model, if the region reads more than the sampled token."""
        if not self._reads_topk:
            return None
        anchor = getattr(batch, "trustrl_topk", None)
        if anchor is None:
            raise MissingDataError(
                f"The rollout must carry the anchor's top K with {self.region.kind}, got None. Several turns with a "
                "changing number of samples lose it. Use a region on the sampled token, such as dppo-binary-tv-capped."
            )
        own = self._needs.topk if self._needs.fills else 0
        wanted = self._wanted(inputs, where, gather_ids=anchor.ids, top_k=own)
        return lambda model: AskingModel(model, wanted)

    def _wanted(self, inputs: dict[str, Any], where: TokenPlaces, **more: Any) -> Wanted:
        return at_completions(inputs["input_ids"], where, temperature=self.temperature, **more)


def check_settings(args: Any, chosen: Settings, template: Any, model: Any) -> None:
    """Raises if a setting bypasses the region, counts the mismatch twice, or makes a ratio of unlike log-probs.

    Args:
        args: ms-swift's `GRPOConfig`.
        chosen: The region's settings.
        template: ms-swift's template, which holds the layout of batches.
        model: The model.

    Raises:
        ConfigError: If a setting is refused; names the setting and the fix.
    """
    facts = {
        BEHAVIOR: chosen.behavior,
        REGION: chosen.region,
        "padding_free": template.padding_free,
        "sequence_parallel_size": template.sequence_parallel_size,
        "model": "multimodal" if model.model_meta.is_multimodal else None,
        "vocab_size": model.config.get_text_config().vocab_size,
        "The model's generation_config": getattr(model, "generation_config", None),
    }
    rows.check(ROWS, rows.reader(args, **facts), chosen.region)


def _check_sampler(rollout: Any) -> None:
    """Raises if vLLM's log-probs are missing or not numbers."""
    recorded = rollout.rollout_per_token_logps
    if recorded is None:
        raise MissingDataError(
            "grpo_batch.rollout_per_token_logps must hold vLLM's log-probs, got None. ms-swift drops them if their "
            "number differs from that of the tokens in the loss, as a multi-turn scheduler may cause. Return "
            "`rollout_logprobs` for every token in the loss, or set anchor='proximal' on the region."
        )
    check_recorded(recorded, rollout.completion_mask.bool())


def _check_seams() -> None:
    seam.require_version(PACKAGE, OLDEST, "trustrl was not tested with older versions")
    loss = ("self", "model", "model_inputs", "grpo_batch")
    scored = ("self", "model", "model_inputs", "grpo_batch", "compute_entropy")
    require_seam(GRPOTrainer, "_compute_loss_and_metrics", loss, scored, package=PACKAGE)
    seam.require_parameters(GRPOTrainer, "_prepare_batch_inputs", ("self", "samples"), package=PACKAGE)
