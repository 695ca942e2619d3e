"""Tables [advantage], [loss] and [lora] of a recipe: the algorithm around the region, on any engine."""

from dataclasses import dataclass
from typing import Any, Literal

from trustrl.config import validators
from trustrl.engines.refusals.verl_settings import ACTOR
from trustrl.errors import ConfigError

ESTIMATORS = ("group", "rloo", "gae")
REDUCTIONS = ("token", "sequence", "constant")
VERL_ESTIMATORS = {"group": "grpo", "rloo": "rloo", "gae": "gae"}
VERL_REDUCTIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
TRL_REDUCTIONS = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}

MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """[advantage]: the estimate of each token's advantage from the rewards."""

    estimator: Literal["group", "rloo", "gae"] = "group"
    """"group" subtracts the mean reward of the prompt's completions, "rloo" the mean of the others, "gae" a critic's
    value. TRL has "group" only."""

    divide_by_std: bool = True
    """True if "group" divides by the standard deviation in the group, as GRPO does. Dr. GRPO does not."""

    gamma: float = 1.0
    """Discount of "gae"."""

    lam: float = 1.0
    """λ of "gae"."""

    critic_learning_rate: float | None = None
    """Learning rate of the critic of "gae". Defaults to verl's."""

    def __post_init__(self) -> None:
        validators.one_of("advantage.estimator", self.estimator, ESTIMATORS)
        validators.truth("advantage.divide_by_std", self.divide_by_std)
        for name in ("gamma", "lam"):
            validators.real(f"advantage.{name}", getattr(self, name), rule="a number in (0, 1]", low=0.0, high=1.0)
        if self.critic_learning_rate is not None:
            value = self.critic_learning_rate
            validators.real("advantage.critic_learning_rate", value, rule="a number > 0", low=0.0)

    def verl_settings(self, model: str, prompts_per_step: int) -> dict[str, Any]:
        """Returns verl's settings, with a critic that starts from `model` if there is one."""
        settings: dict[str, Any] = {"algorithm.adv_estimator": VERL_ESTIMATORS[self.estimator]}
        if self.estimator == "group":
            return settings if self.divide_by_std else settings | {"algorithm.norm_adv_by_std_in_grpo": False}
        if self.estimator == "gae":
            settings |= {
                "algorithm.gamma": self.gamma, "algorithm.lam": self.lam, "critic.model.path": model,
                "critic.ppo_mini_batch_size": prompts_per_step,
            }  # fmt: skip
            if self.critic_learning_rate is not None:
                settings["critic.optim.lr"] = self.critic_learning_rate
        return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """[loss]: the average over tokens, and terms next to the region's."""

    reduction: Literal["token", "sequence", "constant"] | None = None
    """Average of the loss: over all tokens, over sequences of their means, or over sequences of sums divided by the
    largest length (Dr. GRPO). Defaults to the region's own, otherwise to "token"."""

    kl: float = 0.0
    """Coefficient of the engine's KL penalty to the initial model, estimated by k3. 0 loads no reference model."""

    entropy: float = 0.0
    """Coefficient of verl's entropy bonus. TRL has none."""

    def __post_init__(self) -> None:
        if self.reduction is not None:
            validators.one_of("loss.reduction", self.reduction, REDUCTIONS)
        validators.non_negative("loss.kl", self.kl)
        validators.non_negative("loss.entropy", self.entropy)

    def chosen(self, own: object | None) -> str:
        """Returns the average: the recipe's, or that of a region which has its `own`, which is per sequence."""
        return self.reduction or ("token" if own is None else "sequence")

    def verl_settings(self, own: object | None, max_completion_tokens: int) -> dict[str, Any]:
        """Returns verl's settings for a region with its `own` average, or None."""
        reduction = self.chosen(own)
        settings: dict[str, Any] = {f"{ACTOR}.loss_agg_mode": VERL_REDUCTIONS[reduction]}
        if reduction == "constant":
            settings[f"{ACTOR}.loss_scale_factor"] = max_completion_tokens
        if self.kl:
            settings |= {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": self.kl}
        if self.entropy:
            settings[f"{ACTOR}.entropy_coeff"] = self.entropy
        return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRA:
    """[lora]: low-rank adapters, which are trained instead of the model's weights."""

    rank: int
    """Rank of the adapters."""

    alpha: int | None = None
    """Scale of the adapters, divided by the rank. Defaults to twice the rank."""

    targets: str | tuple[str, ...] = "all-linear"
    """Layers that get adapters: "all-linear", or names of modules."""

    def __post_init__(self) -> None:
        validators.whole("lora.rank", self.rank, low=1)
        if self.alpha is not None:
            validators.whole("lora.alpha", self.alpha, low=1)
        targets = self.targets
        if not isinstance(targets, str):
            targets = validators.several("lora.targets", targets, "modules, or 'all-linear'")
            object.__setattr__(self, "targets", targets)
        if not targets or not all(isinstance(name, str) for name in targets):
            raise ConfigError(f"lora.targets must be 'all-linear' or names of modules, got {targets!r}.")

    @property
    def scale(self) -> int:
        """`alpha`, or its default."""
        return self.alpha or 2 * self.rank

    def parameters(self, others: int, hidden_size: int) -> int:
        """Estimates the adapters' parameters from the model's parameters outside the vocabulary.

        A layer of a transformer has about 12 D² weights, and its matrices about 19 D rows and columns.
        """
        return round(self.rank * others * 19 / (12 * hidden_size))

    def verl_settings(self, *, merged: bool = False) -> dict[str, Any]:
        """Returns verl's settings. verl syncs adapters to a sampler that loaded the base model, or merged weights."""
        return {
            **({f"{MODEL}.lora.merge": True} if merged else {}),
            f"{MODEL}.lora_rank": self.rank, f"{MODEL}.lora_alpha": self.scale,
            f"{MODEL}.target_modules": self.targets, "actor_rollout_ref.rollout.load_format": "safetensors",
        }  # fmt: skip
