"""TRL's `GRPOTrainer` with a region, chosen by one more argument.

Seams:    `_compute_loss(model, inputs)`, `_generate_and_score_completions(inputs)`, and
          `_get_per_token_logps_and_entropies(model, ...)`, which all call super(). The trainer checks their parameters
          when it is created. `_generate` and `_calculate_rewards` are overridden only to read their results
Borrowed: everything else. `LossSeamMixin` runs TRL's own loss with advantages of 0 and captures the log-probs where TRL
          computes them. The adapter adds the region's own terms with TRL's factor on each token. So TRL's reduction,
          its scaling for accumulation and ranks, and its other terms stay TRL's, in every release
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from trustrl.config.axes import Needs, Region
from trustrl.config.terms import TokenWeights
from trustrl.core.clean import OnNonFinite
from trustrl.core.metrics import Choice, check_choice
from trustrl.core.policy_loss import policy_loss
from trustrl.core.sampling import Sampling
from trustrl.engines.common import seam
from trustrl.engines.common.loss_seam import Capture, LossParts, LossSeamMixin, RegionState, require_seam
from trustrl.engines.common.region_needs import Behavior, sources
from trustrl.engines.common.replica_watch import OnStaleReplica
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.common.sampler_fields import MAX_KEPT, REPLICA
from trustrl.engines.common.step_check import MAX_DROPPED_SHARE, check_first_loss, check_of_rollouts
from trustrl.engines.common.step_metrics import UNSCORED, StepMetrics, TrlMetrics
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import adapted_head
from trustrl.engines.common.vocabulary_read import Head, packed_kept
from trustrl.engines.refusals.trl import OLDEST, OLDEST_FUSED, OLDEST_VOCABULARY, REDUCTIONS
from trustrl.engines.trl import sampled_rows, sampler, trainer_checks
from trustrl.engines.trl.anchors import (
    AnchorRecorder,
    AskingTrlModel,
    ReadingForward,
    RolloutPass,
    corrected,
    places_of,
    rollout_tokens,
)
from trustrl.engines.trl.policy_side import policy_tokens, wanted_of
from trustrl.engines.trl.rollout_rows import SEQUENCE, RecordEnd, RolloutRows, about
from trustrl.engines.trl.sampler import SamplerCheck
from trustrl.engines.trl.trainer_checks import (
    FollowsTheTrainer,
    RegionActs,
    check_model,
    check_settings,
)
from trustrl.errors import ConfigError, EngineError
from trustrl.recording import Recorder, Recording

ARGUMENTS = list(inspect.signature(GRPOTrainer.__init__).parameters)[1:]
"""The arguments of `GRPOTrainer` in order."""

NEEDED_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


class TrustRegionMixin(LossSeamMixin):
    """Mixin that adds a trust region to a `GRPOTrainer` subclass: `class Mine(TrustRegionMixin, MyGRPOTrainer)`."""

    _sampled = sampled_rows.NOT_RECORDED
    """The sampler's records of the last rollout."""

    _rollout_pass: RolloutPass | None = None
    """TRL's own pass over the rollout that is being made, or None outside one."""

    _rows: RolloutRows | None = None
    """Records the sequences of each rollout; None if nothing is recorded."""

    def __init__(
        self,
        *args: Any,
        region: Region,
        behavior: Behavior = "sampler",
        measure_mismatch: bool = False,
        startup_checks: bool = True,
        on_nonfinite: OnNonFinite = "drop",
        max_dropped_share: float = MAX_DROPPED_SHARE,
        on_stale_replica: OnStaleReplica = "warn",
        metrics: Choice = "core",
        recording: Recording | None = None,
        vllm_options: dict[str, Any] | None = None,
        max_kept: int = MAX_KEPT,
        check_sampler_every: int = 10,
        **kwargs: Any,
    ) -> None:
        """Creates a trainer with a region.

        Args:
            *args: Positional arguments of `GRPOTrainer`.
            region: A region's settings, from `trustrl.preset` or built directly. With a region, TRL's `loss_type`
                chooses only the average.
            behavior: The source of μ: "sampler" (the log-probs that vLLM or a `rollout_func` recorded) or, if
                transformers generates, "trainer": one forward pass without gradient at the rollout weights.
            measure_mismatch: Whether to record the trainer's log-probs in addition to the sampler's, and to log
                `trustrl/mismatch_*`. Costs one more forward pass per rollout, unless TRL already records them.
            startup_checks: Whether to raise if the policy and its anchor disagree before the first step, or if vLLM
                does not follow the trainer's weights.
            on_nonfinite: See `trustrl.policy_loss`.
            max_dropped_share: Largest share of a step's tokens that may be dropped for faults; above it the step
                raises. 1 never raises.
            on_stale_replica: What to do about a replica of the sampler that does not follow the trainer's weights:
                "warn", "raise", or "ignore". A replica is a colocated engine, or a server that a `rollout_func` names.
            metrics: The metrics to log: "core" for about eight, "all" for every one. See `trustrl metrics`.
            recording: The tokens to write to disk, with both sides and the region's decision; None writes nothing.
            vllm_options: Arguments for vLLM's `LLM` (colocate mode) that TRL has no setting for, such as `dtype`.
            max_kept: The largest number of ids that top-p, top-k, or min-p may keep at a token. More are an error.
            check_sampler_every: The number of rollouts from one measurement of `trustrl/decode_prefill_gap` to the
                next (colocate mode, temperature 1); 0 for none. Costs one prefill of up to 512 ids per rank.
            **kwargs: Keyword arguments of `GRPOTrainer`.

        Raises:
            ConfigError: If a setting does not work with the region; names the setting and the fix.
            EngineError: If the adapter does not support the installed TRL.
        """
        _check_arguments(region, recording, metrics)
        _check_seams(type(self), region.needs())
        self.region, self._needs = region, region.needs()
        self._on_nonfinite: OnNonFinite = on_nonfinite
        settings = _given("args", args, kwargs)
        more = {
            "rollout_func": _given("rollout_func", args, kwargs) is not None,
            "own_generation": _generates_itself(type(self)),
            "vllm_options": vllm_options,
        }
        if settings is not None:  # before the model is loaded; TRL's defaults are checked below
            check_settings(settings, region, behavior, **more)
        by_sampler = sources(self._needs, behavior, mismatch=False)[1] == "sampler"
        truncated = sampler.is_truncated(settings)
        self._asked = Wanted(
            top_k=self._needs.topk if by_sampler else 0,
            max_kept=max_kept if truncated else 0,
            experts=recording is not None and recording.experts,
        )
        with sampler.colocated_options(settings, asked=self._asked, user_options=vllm_options):
            super().__init__(*args, **kwargs)
        check_settings(self.args, region, behavior, **more)
        base = _base_model(self.model)
        check_model(self, region, output_layer=adapted_head(base))
        self._vocabulary, self._replicas = None, sampler.replica_watch(self, on_stale_replica)
        self._rollout_heads: dict[bool, Head] = {}
        """The output layer at the weights of the current rollout; True for training, False for evaluation."""
        if self._needs.topk or self._needs.full or truncated:
            self._vocabulary = ReadingForward(base, float32_head=self.args.cast_lm_head_to_fp32)
        sampler.prepare(self, self._asked)
        self._sampler_check = SamplerCheck(check_sampler_every)
        self._sampling = Sampling(
            logprobs="processed", temperature=self.temperature, truncated=truncated, kept_known=truncated, engine="TRL"
        )
        self._recorder = AnchorRecorder(
            self._needs, behavior, mismatch=measure_mismatch, sampling=self._sampling,
            logps=super()._get_per_token_logps_and_entropies,
        )  # fmt: skip
        self._region_metrics = StepMetrics(
            check_of_rollouts(self, behavior, max_dropped_share, "max_dropped_share"), metrics,
            startup_checks=startup_checks, recorder=self._tokens_recorder(recording), replicas=self._replicas,
        )  # fmt: skip
        self._trl_metrics, self._first_loss, self._num_losses = TrlMetrics(), startup_checks, 0
        self._add_callbacks(startup_checks=startup_checks)

    def _tokens_recorder(self, recording: Recording | None) -> Recorder | None:
        """Returns the recorder of this rank, and prepares the rows of its sequences; None if nothing is recorded."""
        if recording is None:
            return None
        rank, size = self.accelerator.process_index, self.accelerator.num_processes
        recorder = Recorder(
            recording, self.region, rank=rank, about=about(self) if rank == 0 else None, world_size=size
        )
        self._rows = RolloutRows(self, recorder)
        self.add_callback(RecordEnd(recorder))
        return recorder

    def _add_callbacks(self, *, startup_checks: bool) -> None:
        self.add_callback(RegionState(self.region))
        self.add_callback(RegionActs(self, trainer_checks.hides_the_region(type(self), TrustRegionMixin)))
        if startup_checks and self.use_vllm:
            self.add_callback(FollowsTheTrainer(self))

    # ── seam 1: the rollout, with the tensors that the region needs ─────────────────────────────────────────────────

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs TRL's own method, and keeps the sampler's records, which TRL's tensors have no place for."""
        generated = super()._generate(*args, **kwargs)
        self._sampled = sampled_rows.take(generated)
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        # TRL may score the rollout with the policy itself. That pass then returns the anchor's distribution too.
        self._rollout_pass = RolloutPass(self.model, self._recorder)
        try:
            rollout = super()._generate_and_score_completions(inputs)
        finally:
            shared, self._rollout_pass = self._rollout_pass, None
        _check_inputs(rollout, type(self))
        training = self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        if self._needs.full:
            self._remember_head()
        version = self.state.global_step
        added = self._recorder.record(
            self.model, rollout, version=version, rows=rows, sampled=self._sampled, shared=shared.outputs(rollout)
        )
        if training:
            self._sampler_check.run(self, rollout)
        replicas = (
            sampler.replicas_of(self, self._sampled.replica, len(rollout["completion_ids"])) if training else None
        )
        if replicas is not None:
            added[REPLICA] = self._replicas.numbers(replicas).to(rollout["completion_ids"].device)
        if training and self._rows is not None:
            added |= self._rows.name(rollout, replicas)
            if self._asked.experts:
                added["trustrl_experts"] = sampled_rows.expert_rows(self._sampled, rollout)
        return {**rollout, **added}

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Runs TRL's own method. In a rollout, its first pass of the policy returns the anchor's distribution too."""
        score = super()._get_per_token_logps_and_entropies
        if self._rollout_pass is None:
            return score(model, *args, **kwargs)
        return self._rollout_pass.run(score, model, *args, **kwargs)

    def _remember_head(self) -> None:
        """Keeps a copy of the current output layer, for exact divergences from this rollout.

        TRL may evaluate while a training rollout is still in use, so training and evaluation keep separate heads.
        """
        assert self._vocabulary is not None  # created if the region needs it
        if self.model.training:
            self._rollout_heads.clear()
        self._rollout_heads[self.model.training] = self._vocabulary.remember_head(_base_model(self.model))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs TRL's own method, and logs the share of completions without a reward. TRL skips those and only warns."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._rows is not None:
            self._rows.score(rewards, *args, **kwargs)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][UNSCORED].append(rewards.isnan().all(dim=1).double().mean().item())
        return rewards

    # ── seam 2: the loss ────────────────────────────────────────────────────────────────────────────────────────────

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._num_losses += 1
        _check_inputs(inputs, type(self))
        in_loss = sampled_rows.in_loss_of(inputs)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            inputs = corrected(inputs, in_loss)
        if self._vocabulary is not None:
            self._vocabulary.rollout_head = self._rollout_heads.get(self.model.training)
        if "trustrl_kept" in inputs:
            inputs = {**inputs, "trustrl_kept_ids": packed_kept(inputs["trustrl_kept"], in_loss.device)}
        where = places_of(inputs, in_loss)
        others, weights, seen = self._trl_loss_parts(model, inputs, in_loss, self._wanted(inputs, where))
        rollout = rollout_tokens(inputs, in_loss, where, self._needs, self._sampling)
        policy = policy_tokens(self._needs, seen, where, rollout, self.state.global_step)
        if self._first_loss and in_loss.any():  # TRL may mask out a whole micro-batch
            self._check_weights(weights, in_loss)
            check_first_loss(policy, rollout, self._needs.anchor, self._recorder.behavior)
            self._first_loss = False
        reduction = TokenWeights(where.of(weights), like=REDUCTIONS[self.args.loss_type])
        out = policy_loss(policy, rollout, self.region, reduction=reduction, on_nonfinite=self._on_nonfinite)
        self._trl_metrics.correct(self, out)
        sequences = where.of_rows(inputs[SEQUENCE]) if SEQUENCE in inputs else None
        self._region_metrics.add(self, out, policy, rollout, weights, sequences)
        return others + out.loss

    def _trl_loss_parts(
        self, model: Any, inputs: dict[str, Any], in_loss: Tensor, wanted: Callable[[Tensor], Any] | None
    ) -> LossParts:
        """Returns TRL's loss without its policy term, each token's factor in that term, and the captured pass."""
        # TRL weights its KL term by the ratio to `old_per_token_logps`. Nothing else reads them here. Without them the
        # ratio is exactly 1.
        theirs = dict(inputs)
        before = theirs.pop("old_per_token_logps", None)
        if self.beta == 0.0 or not getattr(self.args, "use_bias_correction_kl", False):
            before = None
        if before is not None:
            theirs["old_per_token_logps"] = before
        compute_loss = super()._compute_loss
        capture = Capture(model, None if wanted is None else functools.partial(AskingTrlModel, wanted=wanted))
        parts = self._loss_parts(lambda zero: compute_loss(model, {**theirs, "advantages": zero}), capture, in_loss)
        if before is not None:
            # With advantage 0 both branches of TRL's minimum are equal, and each passes half of the gradient.
            logp = parts.seen.logp.detach()
            ratio = torch.exp(torch.where(logp.isfinite(), logp, 0.0) - before)  # as in TRL's loss
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            parts = parts._replace(weights=torch.where(in_loss, parts.weights / ((ratio + clipped) / 2), 0.0))
        return parts

    def _broken_loss(self, rule: str, got: str) -> EngineError:
        cls = trainer_checks.provider(type(self), "_compute_loss", after=TrustRegionMixin)
        return trainer_checks.broken(cls, "_compute_loss", rule, got)

    def _wanted(self, inputs: dict[str, Any], where: TokenPlaces) -> Callable[[Tensor], Any] | None:
        if self._vocabulary is None:
            return None
        entropy = bool(getattr(self, "_entropy_bonus_enabled", False))
        return wanted_of(self._needs, inputs, where, temperature=self.temperature, entropy_gradient=entropy)


class TrustRegionGRPOTrainer(TrustRegionMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with a trust region instead of the clip.

    Example::

        trainer = TrustRegionGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=dataset,
            args=GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=False),
            region=trustrl.preset("dppo-binary-tv-capped"),
        )
    """


def _base_model(model: Any) -> Any:
    """Returns the model inside a PEFT wrapper: the model to whose forward TRL added its fused head."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _given(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns an argument of `GRPOTrainer`, passed by name or by position, or None."""
    position = ARGUMENTS.index(name)
    return kwargs.get(name, args[position] if len(args) > position else None)


def _generates_itself(trainer: type) -> bool:
    """Returns whether a subclass replaces TRL's generation, and so may record log-probs."""
    methods = ("_generate", "_generate_single_turn", "_generate_and_score_completions")
    providers = [
        trainer_checks.provider(trainer, name, after=TrustRegionMixin) for name in methods if hasattr(trainer, name)
    ]
    return any(not trainer_checks.is_trls(cls) for cls in providers)


def _check_arguments(region: Any, recording: Any, metrics: Any) -> None:
    check_choice(metrics)
    if not isinstance(region, Region):
        raise ConfigError(
            f"region must be a trustrl region, got {region!r}. Try trustrl.preset('dppo-binary-tv-capped')."
        )
    if recording is not None and not isinstance(recording, Recording):
        raise ConfigError(f"recording must be a trustrl.recording.Recording, got {recording!r}.")


def _check_seams(trainer: type, needs: Needs) -> None:
    seam.require_version("trl", OLDEST, "trustrl was not tested with older versions")
    if needs.topk:
        seam.require_version("trl", OLDEST_VOCABULARY, "Top-K and TROLL were not tested with older versions")
    if needs.full:
        seam.require_version("trl", OLDEST_FUSED, "exact regions were not tested with older versions")
    if not issubclass(trainer, GRPOTrainer):
        raise ConfigError(
            f"TrustRegionMixin must come before a GRPOTrainer in a class's bases, got {trainer.__name__}. "
            "Write `class Mine(TrustRegionMixin, MyGRPOTrainer)`. For AsyncGRPOTrainer, which is not a GRPOTrainer, "
            "use TrustRegionAsyncGRPOTrainer from trustrl.engines.trl.async_trainer."
        )
    trainer_checks.require_unpatched(trainer, TrustRegionMixin)
    scored = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")
    # TRL has no registry of losses. Its private methods drift, so few are overridden and their parameters are checked.
    require_seam(GRPOTrainer, "_compute_loss", ("self", "model", "inputs"), scored)
    seam.require_parameters(GRPOTrainer, "_generate_and_score_completions", ("self", "inputs"))


def _check_inputs(inputs: dict[str, Any], trainer: type) -> None:
    missing = [name for name in NEEDED_INPUTS if inputs.get(name) is None]
    if missing:
        method = "_generate_and_score_completions"
        cls = trainer_checks.provider(trainer, method, after=TrustRegionMixin)
        raise trainer_checks.broken(cls, method, f"carry {', '.join(missing)}", f"got {', '.join(sorted(inputs))}")
