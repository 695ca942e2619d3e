"""TRL: any region in `GRPOTrainer`, by one more argument.

Seams:    `_compute_loss(model, inputs)` and `_generate_and_score_completions(inputs)`, both calling super(); their
          parameters are checked when a trainer is made. `_calculate_rewards` is only looked at
Borrowed: everything else. TRL runs its own loss, with the advantages set to 0 and watched: what is left of it are its
          other terms (KL to the reference, entropy, router), and its derivative by the advantages is what it multiplies
          each token's loss with. The region's own terms are added with those coefficients, so TRL's reduction, its
          scaling for accumulation and ranks, and its other terms stay TRL's, in every release
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from trustrl.config.axes import Region
from trustrl.config.terms import TokenWeights
from trustrl.engines import seam
from trustrl.engines.forward import Head, VocabularyForward, Wanted, at_completions, refuse_adapted_head
from trustrl.engines.roles import by_trainer, sources
from trustrl.engines.settings import refuse
from trustrl.engines.step_check import MAX_DROPPED_SHARE, StepCheck, warn_if_it_cannot_act
from trustrl.engines.trl import invariants, metrics, sampler
from trustrl.engines.trl.anchors import AnchorRecorder, rollout_tokens
from trustrl.engines.trl.settings import REDUCTIONS, Behavior, check_settings
from trustrl.engines.trl.state import RegionState
from trustrl.engines.trl.watching import WatchedModel
from trustrl.errors import ConfigError, EngineError
from trustrl.objective import policy_loss
from trustrl.recording import Recorder, Recording, sequence_ids
from trustrl.records import FullDivergence, PolicyTokens, TopK
from trustrl.sampling import Sampling
from trustrl.tokens import OnNonFinite

OLDEST = (1, 15)
NEEDED_INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")


_Trainer: Any = (
    GRPOTrainer if TYPE_CHECKING else object
)  # a mixin, which type checkers should know belongs to a trainer


class TrustRegionMixin(_Trainer):
    """Gives a `GRPOTrainer` subclass a trust region: `class Mine(TrustRegionMixin, MyGRPOTrainer)`."""

    def __init__(
        self,
        *args: Any,
        region: Region,
        behavior: Behavior = "sampler",
        measure_mismatch: bool = False,
        startup_checks: bool = True,
        on_nonfinite: OnNonFinite = "drop",
        max_dropped_share: float = MAX_DROPPED_SHARE,
        recording: Recording | None = None,
        vllm_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """All other arguments are `GRPOTrainer`'s own.

        Args:
            *args: for `GRPOTrainer`.
            region: A region's settings, from `trustrl.preset` or built directly. With it, TRL's `loss_type` chooses the
                average alone.
            behavior: Who says what μ was: "sampler" (vLLM's recorded log-probs) or, where transformers generates,
                "trainer": one forward pass without gradient at the rollout weights.
            measure_mismatch: True records the trainer's own log-probs beside the sampler's, at the price of one more
                forward pass a rollout, so that `trustrl/mismatch_*` is logged. Free where TRL records them anyway.
            startup_checks: Whether to refuse to train when the policy and its anchor disagree before the first step, or
                vLLM does not follow the trainer's weights.
            on_nonfinite: See `trustrl.policy_loss`.
            max_dropped_share: Largest share of a step's tokens that may be dropped for faults; above it the step
                raises. 1 never raises.
            recording: Which tokens to write to disk, with both sides and the region's verdict; None writes nothing.
            vllm_options: More arguments for vLLM's `LLM` (colocate mode), which TRL has no settings for: `dtype`, ...
            **kwargs: for `GRPOTrainer`.

        Raises:
            ConfigError: a setting does not go with the region; says which, and what to do.
            EngineError: this TRL is not one the adapter was written for.
        """
        _check_seams(type(self))
        if not isinstance(region, Region):
            raise ConfigError(f"region must be a trustrl region, got {region!r}. Try trustrl.preset('dppo-binary-tv').")
        if recording is not None and not isinstance(recording, Recording):
            raise ConfigError(f"recording must be a trustrl.recording.Recording, got {recording!r}.")
        self.region = region
        self._needs = region.needs()
        self._on_nonfinite: OnNonFinite = on_nonfinite
        settings = kwargs.get("args", args[2] if len(args) > 2 else None)
        if settings is not None:  # before the model is loaded; TRL's defaults are checked below
            check_settings(settings, region, self._needs, behavior)
        rescoring = sources(self._needs, behavior, mismatch=False)[1] == "sampler"
        with sampler.colocated_options(settings, top_k=self._needs.topk if rescoring else 0, given=vllm_options):
            super().__init__(*args, **kwargs)
        check_settings(self.args, region, self._needs, behavior)
        base = _base_model(self.model)
        _check_model(self, base, needs_vocabulary=bool(self._needs.topk or self._needs.full))
        self._vocabulary = None
        self._rollout_heads: dict[bool, Head] = {}
        """The output layer that the rollout in use was sampled with, by whether it is for training."""
        if self._needs.topk or self._needs.full:
            self._vocabulary = VocabularyForward(base, float32_head=self.args.cast_lm_head_to_fp32)
        score = sampler.prepare(self, rescoring=rescoring)
        self._recorder = AnchorRecorder(
            self._needs, behavior, mismatch=measure_mismatch, temperature=self.temperature, score=score
        )
        self._sampling = Sampling(logprobs="processed", temperature=self.temperature, engine="TRL")
        rank = self.accelerator.process_index
        tokens = None if recording is None else Recorder(recording, region, rank=rank)
        self._names = None if recording is None else _SequenceNames(rank)
        updates = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        if by_trainer(self._needs, behavior) and self.accelerator.is_main_process:
            warn_if_it_cannot_act(
                region,
                updates_per_batch=updates,
                remedy="Set num_iterations above 1 or steps_per_generation above gradient_accumulation_steps, or use "
                "vLLM, whose recorded log-probs differ from the trainer's.",
            )
        check = StepCheck(
            region,
            max_dropped_share=max_dropped_share,
            setting="max_dropped_share",
            updates_per_batch=max(1, round(updates)),
            speaks=self.accelerator.is_main_process,
        )
        self._region_metrics = metrics.StepMetrics(check, startup_checks=startup_checks, recorder=tokens)
        self._first_loss = startup_checks
        self.add_callback(RegionState(region))
        if startup_checks and self.use_vllm:
            self.add_callback(invariants.FollowsTheTrainer(self))

    # ── seam 1: a rollout, and what the region needs beside it ──────────────────────────────────────────────────────

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        rollout = super()._generate_and_score_completions(inputs)
        _check_inputs(rollout)
        training = self.model.training
        rows = self.args.per_device_train_batch_size if training else self.args.per_device_eval_batch_size
        if self._needs.full:
            self._remember_head()
        added = self._recorder.record(
            self.model, rollout, version=self.state.global_step, rows=rows, autocast=self.accelerator.autocast
        )
        if training and self._names is not None:
            ids = rollout["completion_ids"]
            added["trustrl_sequence"] = self._names.of(self.state.global_step, len(ids)).to(ids.device)
        return {**rollout, **added}

    def _remember_head(self) -> None:
        """The output layer as it is now, for exact divergences from this rollout.

        TRL may evaluate while a training rollout is still in use, so that each of the two has a head of its own.
        """
        assert self._vocabulary is not None  # made where the region needs it
        if self.model.training:
            self._rollout_heads.clear()
        self._rollout_heads[self.model.training] = self._vocabulary.remember_head(_base_model(self.model))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL leaves completions without a reward out and warns; here their share is logged beside its other ones."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][metrics.UNSCORED].append(rewards.isnan().all(dim=1).double().mean().item())
        return rewards

    # ── seam 2: the loss ────────────────────────────────────────────────────────────────────────────────────────────

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        _check_inputs(inputs)
        in_loss = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            in_loss = in_loss & inputs["tool_mask"].bool()
        if self.use_vllm and self.vllm_importance_sampling_correction:
            inputs = _corrected(inputs, in_loss)
        if self._vocabulary is not None:
            self._vocabulary.rollout_head = self._rollout_heads.get(self.model.training)
        watched = WatchedModel(model, self._wanted(inputs))
        others, weights = self._their_loss(watched, inputs, in_loss)
        policy = self._policy_tokens(watched.output(), in_loss.shape[1])
        rollout = rollout_tokens(inputs, in_loss, self._needs, self._sampling)
        if self._first_loss and in_loss.any():  # TRL may mask out a whole micro-batch
            _check_weights(weights, in_loss)
            invariants.ratio_is_one(policy, rollout, self._needs.anchor, self._recorder.behavior)
            self._first_loss = False
        reduction = TokenWeights(weights, like=REDUCTIONS[self.args.loss_type])
        out = policy_loss(policy, rollout, self.region, reduction=reduction, on_nonfinite=self._on_nonfinite)
        self._region_metrics.add(self, out, policy, rollout, weights, inputs.get("trustrl_sequence"))
        return others + out.loss

    def _their_loss(self, model: WatchedModel, inputs: dict[str, Any], in_loss: Tensor) -> tuple[Tensor, Tensor]:
        """TRL's loss without its policy term, and what it would multiply each token's policy term with."""
        advantages = torch.zeros(in_loss.shape, device=in_loss.device, requires_grad=True)
        theirs = {**inputs, "advantages": advantages}
        # TRL weighs its KL term with the ratio to `old_per_token_logps`. Nobody else needs it here, and without it the
        # ratio is exactly 1.
        before = theirs.pop("old_per_token_logps", None)
        if self.beta == 0.0 or not getattr(self.args, "use_bias_correction_kl", False):
            before = None
        if before is not None:
            theirs["old_per_token_logps"] = before
        with torch.enable_grad():  # in evaluation too; the model itself runs as the caller had it
            others = super()._compute_loss(model, theirs)
            slope = None
            if others.requires_grad:
                (slope,) = torch.autograd.grad(others, advantages, retain_graph=True, allow_unused=True)
        if slope is None:
            raise EngineError(
                "TRL's loss must depend on `advantages`, and it does not. Install a TRL version listed in trustrl's "
                "documentation."
            )
        weights = -slope
        if before is not None:
            # With advantage 0 both branches of TRL's minimum are equal, and each passes on half of the gradient.
            logp = model.output().log_probs[:, -in_loss.shape[1] :].detach()
            ratio = torch.exp(torch.where(logp.isfinite(), logp, 0.0) - before)  # what TRL saw
            clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
            weights = torch.where(in_loss, weights / ((ratio + clipped) / 2), 0.0)
        return others, weights

    def _wanted(self, inputs: dict[str, Any]) -> Callable[[Tensor], Wanted] | None:
        if self._vocabulary is None:
            return None
        return functools.partial(
            at_completions,
            length=inputs["completion_ids"].shape[1],
            temperature=self.temperature,
            gather_ids=inputs["trustrl_topk_ids"] if self._needs.topk else None,
            top_k=self._needs.topk if self._needs.own_topk == "fill" else 0,
            entropy_gradient=bool(getattr(self, "_entropy_bonus_enabled", False)),
            anchor_hidden=inputs.get("trustrl_hidden"),
            anchor_logsumexp=inputs.get("trustrl_logsumexp"),
        )

    def _policy_tokens(self, out: Any, length: int) -> PolicyTokens:
        more: dict[str, Any] = {}
        if self._vocabulary is not None:
            if self._needs.topk:
                more = {"topk_logp": out.gathered_logp, "tail_logp": out.tail_logp}
            if out.topk_ids is not None:
                more["topk"] = TopK(out.topk_ids, out.topk_logp, of=self._needs.anchor)
            if self._needs.full:
                more["full_divergence"] = FullDivergence(tv=out.tv, kl=out.kl, of=self._needs.anchor)
        return PolicyTokens(
            logp=out.log_probs[:, -length:],
            entropy=out.entropy[:, -length:],
            version=self.state.global_step,
            sampling=self._sampling,
            **more,
        )


class TrustRegionGRPOTrainer(TrustRegionMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` with a trust region in place of the clip.

    Example::

        trainer = TrustRegionGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=dataset,
            args=GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=False),
            region=trustrl.preset("dppo-binary-tv"),
        )
    """


class _SequenceNames:
    """Numbers for the sequences of each rollout; a step may begin with several rollouts."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last = (-1, 0)

    def of(self, step: int, count: int) -> Tensor:
        before, num_rollouts = self._last
        self._last = (step, num_rollouts + 1 if step == before else 0)
        return sequence_ids(step=step, rollout=self._last[1], rank=self._rank, count=count)


def _base_model(model: Any) -> Any:
    """The model under a PEFT wrapper: the one whose forward TRL taught its fused head."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _corrected(inputs: dict[str, Any], in_loss: Tensor) -> dict[str, Any]:
    """TRL's factor on a mismatch, moved into the advantages: the policy term is linear in them, a penalty is not."""
    factor, advantages = inputs["importance_sampling_ratio"], inputs["advantages"]
    advantages = (advantages if advantages.ndim == 2 else advantages.unsqueeze(1)) * factor
    ones = torch.ones_like(factor)
    return {**inputs, "advantages": advantages.expand(in_loss.shape), "importance_sampling_ratio": ones}


def _check_seams(trainer: type) -> None:
    seam.require_version("trl", OLDEST, "its models have no fused output layer before")
    seam.require_parameters(GRPOTrainer, "_compute_loss", ("self", "model", "inputs"))
    seam.require_parameters(GRPOTrainer, "_generate_and_score_completions", ("self", "inputs"))
    if not issubclass(trainer, GRPOTrainer):
        raise ConfigError(
            f"TrustRegionMixin must stand before a GRPOTrainer, got {trainer.__name__}. "
            "Write `class Mine(TrustRegionMixin, MyGRPOTrainer)`."
        )


def _check_inputs(inputs: dict[str, Any]) -> None:
    missing = [name for name in NEEDED_INPUTS if inputs.get(name) is None]
    if missing:
        raise EngineError(
            f"TRL's rollout must carry {', '.join(missing)}, got {', '.join(sorted(inputs))}. "
            "Install a TRL version listed in trustrl's documentation."
        )
    if inputs.get("pixel_values") is not None:
        raise ConfigError("Rollouts must be text, got images. Regions on vision-language models are not built.")


def _check_weights(weights: Tensor, in_loss: Tensor) -> None:
    """The one look at what TRL's reduction gave; it waits for the device, so it is taken once."""
    outside, inside = weights[~in_loss], weights[in_loss]
    if outside.any() or not inside.isfinite().all() or (inside < 0).any() or not inside.any():
        raise EngineError(
            "TRL's loss must multiply tokens in the loss with numbers ≥ 0 and the others with 0, got "
            f"{inside.min().item() if inside.numel() else 0:g} to {inside.max().item() if inside.numel() else 0:g} "
            "inside. Install a TRL version listed in trustrl's documentation."
        )


def _check_model(trainer: Any, base: Any, *, needs_vocabulary: bool) -> None:
    if getattr(trainer, "_is_vlm", False):
        raise ConfigError("model must be a text model, got a vision-language model. Regions on images are not built.")
    refuse_adapted_head(base)
    if not needs_vocabulary:
        return
    kind = trainer.region.kind
    if getattr(trainer, "aux_loss_enabled", False):
        refuse("router_aux_loss_coef", "0", trainer.router_aux_loss_coef, f"{kind} does not compute router losses.")
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        refuse(
            "DeepSpeed's ZeRO stage",
            "below 3",
            3,
            f"{kind} reads the output layer, which stage 3 takes apart: use FSDP2.",
        )
