"""What stands beside a region: corrections of the sampler mismatch, penalties, and how tokens become one number."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from trustrl.config import checks
from trustrl.errors import ConfigError

# ── corrections on k = π'/μ, the mismatch between the trainer's and the sampler's numbers ───────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class TIS:
    """Truncated importance sampling: k becomes min(k, C)."""

    kind: ClassVar[str] = "tis"

    max_ratio: float = 2.0
    """C."""

    def __post_init__(self) -> None:
        checks.real("tis.max_ratio", self.max_ratio, rule="a ratio > 0", low=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePop:
    """Tokens whose k leaves [min_ratio, max_ratio] get weight 0; the others keep k."""

    kind: ClassVar[str] = "icepop"

    min_ratio: float = 0.5
    max_ratio: float = 5.0

    def __post_init__(self) -> None:
        _ordered("icepop", self.min_ratio, self.max_ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class MIS:
    """Masked importance sampling: as IcePop, per token or per sequence. No default bounds: they depend on the level."""

    kind: ClassVar[str] = "mis"

    min_ratio: float
    max_ratio: float
    level: Literal["token", "sequence"]
    """At sequence level k is the geometric mean over the sequence's tokens."""

    def __post_init__(self) -> None:
        _ordered("mis", self.min_ratio, self.max_ratio)
        checks.one_of("mis.level", self.level, ("token", "sequence"))


def _ordered(where: str, low: float, high: float) -> None:
    checks.non_negative(f"{where}.min_ratio", low)
    checks.real(f"{where}.max_ratio", high, rule="a ratio > 0", low=0.0)
    if not low <= 1 <= high or low == high:
        raise ConfigError(
            f"{where}.min_ratio and {where}.max_ratio must have 1 between them, got {low!r} and {high!r}. Where "
            "sampler and trainer agree k is 1, and such tokens would be left out."
        )


Correction = TIS | IcePop | MIS

# ── penalties: separate terms of the loss, logged separately ────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """coefficient × an estimate of KL(π‖π_ref) from the sampled token, r = π_ref/π."""

    kind: ClassVar[str] = "kl"

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = −log r, k2 = ½ log² r, k3 = r − 1 − log r."""

    gradient: Literal["pathwise", "score"] = "pathwise"
    """`pathwise` differentiates the estimator itself: ∂/∂log π is 1 for k1 (no information: it averages to 0
    on-policy), log π − log π_ref for k2 (the on-policy KL gradient) and 1 − π_ref/π for k3. `score` treats the
    estimate as a cost and uses sg(estimate)·∇log π."""

    only_kept: bool = False
    """True drops the penalty where the region stopped the token. Off by default: a penalty is its own term."""

    def __post_init__(self) -> None:
        checks.non_negative("kl.coefficient", self.coefficient)
        checks.one_of("kl.estimator", self.estimator, ("k1", "k2", "k3"))
        checks.one_of("kl.gradient", self.gradient, ("pathwise", "score"))
        checks.truth("kl.only_kept", self.only_kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBonus:
    """−coefficient × the policy's entropy, as the engine gives it in `PolicyTokens.entropy`."""

    kind: ClassVar[str] = "entropy"

    coefficient: float
    only_kept: bool = False
    """True drops the bonus where the region stopped the token."""

    def __post_init__(self) -> None:
        checks.non_negative("entropy.coefficient", self.coefficient)
        checks.truth("entropy.only_kept", self.only_kept)


Penalty = KLPenalty | EntropyBonus

# ── reductions: every count is global, so that the sum over ranks and micro-batches is the full batch ───────────────


def _count(where: str, value: Any) -> None:
    # A tensor count (from an all-reduce) is used as it is: looking at it would wait for the device.
    if isinstance(value, (bool, str, float)) or value is None or (isinstance(value, int) and value < 1):
        raise ConfigError(
            f"{where} must be a whole number ≥ 1 counted over the whole batch (all ranks and micro-batches), "
            f"got {value!r}. A step without tokens has no loss: skip it."
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
    """Tokens in the loss over all ranks and micro-batches of the step, stopped and dropped ones included."""

    def __post_init__(self) -> None:
        _count("token-mean.num_tokens", self.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceMeanTokenMean:
    """(1/num_sequences) Σ_i (1/T_i) Σ_t ℓ_it, T_i counted here: a sequence must be whole in its call."""

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
    """Σ_t ℓ_t / (num_sequences · length): every sequence is divided by the same length, long or short."""

    kind: ClassVar[str] = "fixed-length"

    length: int
    num_sequences: Any
    """Sequences over all ranks and micro-batches of the step."""

    def __post_init__(self) -> None:
        checks.whole("fixed-length.length", self.length, low=1)
        _count("fixed-length.num_sequences", self.num_sequences)


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Σ_t c_t ℓ_t with the coefficients of a trainer that has a reduction of its own."""

    kind: ClassVar[str] = "token-weights"

    weights: Any
    """c_t, in the batch's shape, without gradient: what the trainer multiplies a token's loss with."""

    like: type | None = None
    """Which of the other reductions these coefficients amount to, for regions that are defined with one only."""


Reduction = TokenSum | TokenMean | SequenceMeanTokenMean | SequenceMeanTokenSum | FixedLength | TokenWeights


def denominator(reduction: Reduction) -> Any:
    """The global count the token terms are divided by (1 for plain and weighted sums)."""
    match reduction:
        case TokenSum() | TokenWeights():
            return 1
        case TokenMean():
            return reduction.num_tokens
        case FixedLength():
            return reduction.num_sequences * reduction.length
        case _:
            return reduction.num_sequences
