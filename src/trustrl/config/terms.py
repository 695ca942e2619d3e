"""Settings next to a region: mismatch corrections, penalties and reductions."""

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trustrl.config import validators
from trustrl.config.statistics import BinaryKL, BinaryTV
from trustrl.errors import ConfigError

# ── corrections of k = π'/μ, the mismatch between trainer and sampler ───────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class TIS:
    """Truncated importance sampling: multiplies the weight by min(k, C)."""

    kind: ClassVar[str] = "tis"

    max_ratio: float = 2.0
    """C: 2, the value that is common with it."""

    level: Literal["token", "sequence-product"] = "token"
    """`sequence-product` uses the product of k over the sequence's tokens, for all of them."""

    def __post_init__(self) -> None:
        validators.real("tis.max_ratio", self.max_ratio, rule="a ratio > 0", low=0.0)
        validators.one_of("tis.level", self.level, ("token", "sequence-product"))


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePop:
    """IcePop: multiplies the weight by k, or by 0 if k is outside [min_ratio, max_ratio]."""

    kind: ClassVar[str] = "icepop"

    min_ratio: float = 0.5
    """Smallest k that is kept."""

    max_ratio: float = 5.0
    """Largest k that is kept."""

    def __post_init__(self) -> None:
        _ordered("icepop", self.min_ratio, self.max_ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class MIS:
    """Masked importance sampling: IcePop per token or per sequence. Bounds depend on the level and have no default."""

    kind: ClassVar[str] = "mis"

    min_ratio: float
    """Smallest k that is kept."""

    max_ratio: float
    """Largest k that is kept."""

    level: Literal["token", "sequence-mean", "sequence-product"]
    """`sequence-mean` uses the geometric mean of k over the sequence's tokens, `sequence-product` their product. Each
    is both the tested ratio and the factor."""

    def __post_init__(self) -> None:
        _ordered("mis", self.min_ratio, self.max_ratio)
        level: str = self.level
        if level == "sequence":
            warnings.warn(
                "mis.level='sequence' is now called 'sequence-mean', because other libraries mean the product by it. "
                "The old name will be removed in release 0.3.",
                DeprecationWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "level", "sequence-mean")
        validators.one_of("mis.level", self.level, ("token", "sequence-mean", "sequence-product"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceGate:
    """Divergence gate: multiplies the weight by k, or by 0 if the divergence of π' from μ exceeds its bound."""

    kind: ClassVar[str] = "divergence-gate"

    divergence: BinaryKL | BinaryTV = field(default_factory=lambda: BinaryKL(max_increase=3e-3))
    """Divergence of the sampled token under μ and π', and its bound. OpenRLHF's gate, whose bound has no default; 3e-3
    is the value of its own test, and one of FlashREINFORCE's."""

    level: Literal["token", "sequence"] = "sequence"
    """`sequence` compares the mean over the sequence's tokens; each kept token has its own k either way."""

    def __post_init__(self) -> None:
        validators.instance("divergence-gate.divergence", self.divergence, (BinaryKL, BinaryTV))
        validators.one_of("divergence-gate.level", self.level, ("token", "sequence"))
        if self.divergence.max_increase != self.divergence.max_decrease or self.divergence.act_on != "lower":
            raise ConfigError(
                "divergence-gate.divergence must have equal bounds and act_on='lower', because the gate compares the "
                f"divergence itself, got {self.divergence!r}. Give one bound."
            )


def _ordered(where: str, low: float, high: float) -> None:
    validators.non_negative(f"{where}.min_ratio", low)
    validators.real(f"{where}.max_ratio", high, rule="a ratio > 0", low=0.0)
    if not low <= 1 <= high or low == high:
        raise ConfigError(
            f"{where}.min_ratio and {where}.max_ratio must have 1 between them, got {low!r} and {high!r}. "
            "Where sampler and trainer agree, k is 1, and such tokens would be dropped."
        )


Correction = TIS | IcePop | MIS | DivergenceGate


def reads_sequences(correction: Correction | None) -> bool:
    """Returns whether a correction depends on whole sequences."""
    return getattr(correction, "level", "token") != "token"


# ── penalties: separate terms of the loss, logged separately ────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """coefficient × an estimate of KL(π‖π_ref) from the sampled token, r = π_ref/π."""

    kind: ClassVar[str] = "kl"

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = −log r, k2 = ½ log² r, k3 = r − 1 − log r."""

    gradient: Literal["pathwise", "score"] = "pathwise"
    """`pathwise` differentiates the estimator: ∂/∂log π is 1 for k1 (which averages to 0 on-policy), log π − log π_ref
    for k2 (the on-policy KL gradient) and 1 − π_ref/π for k3. `score` treats the estimate as a cost and uses
    sg(estimate)·∇log π."""

    only_kept: bool = False
    """True removes the penalty from masked tokens."""

    unbiased: bool = False
    """True multiplies the estimate by π/b, with gradient, where b is the region's anchor. If b sampled the tokens, k1
    and k3 are then unbiased for KL(π‖π_ref), and their pathwise gradients for its gradient. arXiv:2512.02556, eq. 7."""

    def __post_init__(self) -> None:
        validators.non_negative("kl.coefficient", self.coefficient)
        validators.one_of("kl.estimator", self.estimator, ("k1", "k2", "k3"))
        validators.one_of("kl.gradient", self.gradient, ("pathwise", "score"))
        validators.truth("kl.only_kept", self.only_kept)
        validators.truth("kl.unbiased", self.unbiased)
        if self.unbiased and self.gradient == "score":
            raise ConfigError(
                "kl.gradient must be 'pathwise' with unbiased=True, got 'score'. The weighted estimate has the exact "
                "gradient by itself. Remove one of the two."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus:
    """−coefficient × the entropy in `PolicyTokens.entropy`."""

    kind: ClassVar[str] = "entropy"

    coefficient: float
    only_kept: bool = False
    """True removes the bonus from masked tokens."""

    def __post_init__(self) -> None:
        validators.non_negative("entropy.coefficient", self.coefficient)
        validators.truth("entropy.only_kept", self.only_kept)


Penalty = KLPenalty | EntropyBonus

# ── reductions: counts are global, so that ranks and micro-batches add up to the full batch ─────────────────────────


def _count(where: str, value: Any) -> None:
    # A tensor count (from an all-reduce) is used as it is: reading it would wait for the device.
    if isinstance(value, (bool, str, float)) or value is None or (isinstance(value, int) and value < 1):
        raise ConfigError(
            f"{where} must be a whole number ≥ 1 counted over the whole batch (all ranks and micro-batches), "
            f"got {value!r}. Skip steps without tokens."
        )


@dataclass(frozen=True, slots=True)
class TokenSum:
    """Σ_t ℓ_t, for trainers that scale advantages or losses themselves."""

    kind: ClassVar[str] = "token-sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMean:
    """Σ_t ℓ_t / num_tokens."""

    kind: ClassVar[str] = "token-mean"

    num_tokens: Any
    """Tokens in the loss over all ranks and micro-batches of the step, including masked and dropped ones."""

    def __post_init__(self) -> None:
        _count("token-mean.num_tokens", self.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenMean:
    """(1/num_sequences) Σ_i (1/T_i) Σ_t ℓ_it, T_i counted in the call, so a sequence must not be split."""

    kind: ClassVar[str] = "sequence-mean-token-mean"

    num_sequences: Any
    """Sequences over all ranks and micro-batches of the step."""

    def __post_init__(self) -> None:
        _count("sequence-mean-token-mean.num_sequences", self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenSum:
    """Σ_t ℓ_t / num_sequences."""

    kind: ClassVar[str] = "sequence-mean-token-sum"

    num_sequences: Any
    """Sequences over all ranks and micro-batches of the step."""

    def __post_init__(self) -> None:
        _count("sequence-mean-token-sum.num_sequences", self.num_sequences)


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLength:
    """Σ_t ℓ_t / (num_sequences · length): every sequence is divided by the same length."""

    kind: ClassVar[str] = "fixed-length"

    length: int
    num_sequences: Any
    """Sequences over all ranks and micro-batches of the step."""

    def __post_init__(self) -> None:
        validators.whole("fixed-length.length", self.length, low=1)
        _count("fixed-length.num_sequences", self.num_sequences)


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Σ_t c_t ℓ_t with the coefficients of a trainer's own reduction."""

    kind: ClassVar[str] = "token-weights"

    weights: Any
    """c_t in the shape of the batch, without gradient: the trainer's factor on each token's loss."""

    like: type | None = None
    """Reduction class that these coefficients are equal to, for regions that require one."""


Reduction = TokenSum | TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | FixedLength | TokenWeights


def denominator(reduction: Reduction) -> Any:
    """Returns the global count that divides the token terms (1 for plain and weighted sums)."""
    match reduction:
        case TokenSum() | TokenWeights():
            return 1
        case TokenMean():
            return reduction.num_tokens
        case FixedLength():
            return reduction.num_sequences * reduction.length
        case _:
            return reduction.num_sequences
