"""The data that flows: what was sampled, and what the policy says about it now.

Tensors are (B, T), one row per sequence, or packed (N,) with `sequence_ids`. Shapes, dtypes and devices are checked
when a record is made; values are not (that would wait for the device): see `trustrl.check`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.checks import one_of
from trustrl.config.statistics import ANCHORS, Anchor
from trustrl.errors import RecordError
from trustrl.kernels.outputs import first_of_its_id
from trustrl.sampling import Sampling


def _must(ok: bool, what: str, rule: str, got: Any, advice: str) -> None:
    if not ok:
        raise RecordError(f"{what} must be {rule}, got {got}. {advice}")


def _floating(what: str, x: Any) -> None:
    _must(isinstance(x, Tensor), what, "a tensor", type(x).__name__, "Wrap it with torch.as_tensor.")
    _must(x.is_floating_point(), what, "floating point", x.dtype, "Log-probs and advantages are real numbers.")


def _integer(what: str, x: Any) -> None:
    _must(isinstance(x, Tensor), what, "a tensor", type(x).__name__, "Wrap it with torch.as_tensor.")
    whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    _must(whole, what, "an integer tensor", x.dtype, "Ids and versions are whole numbers: use .long().")


def _same(what: str, x: Tensor, like: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    _must(x.shape == shape, what, f"of shape {tuple(shape)}", tuple(x.shape), "Every token needs exactly one entry.")
    _must(x.device == like.device, what, f"on {like.device}", x.device, "Move it there with .to().")


@dataclass(frozen=True, slots=True)
class TopK:
    """Some ids of a distribution with their log-probs: usually the anchor's K most probable.

    Columns may stand in any order. An id below 0 marks an empty column (samplers return K or K + 1 ids); a repeated
    id counts once.

    Examples:
        >>> TopK(torch.tensor([[7, 7, -1]]), torch.tensor([[-0.1, -0.1, 0.0]])).valid
        tensor([[ True, False, False]])
    """

    ids: Int[Tensor, "*batch k"]
    """Vocabulary ids."""

    logp: Float[Tensor, "*batch k"]
    """Their log-probs."""

    of: Anchor = "behavior"
    """Whose distribution it is. A region refuses the top-K of another anchor than its own."""

    tail_logp: Float[Tensor, "*batch"] | None = None
    """log of the mass outside `ids` and the sampled token, if the recorder knows it (a masked log-sum-exp is exact
    where 1 − Σ is not). Used only when the policy's side has one too, so that both tails are made alike."""

    valid: Bool[Tensor, "*batch k"] = field(init=False, repr=False, compare=False)
    """True on the columns that count."""

    def __post_init__(self) -> None:
        _integer("TopK.ids", self.ids)
        _floating("TopK.logp", self.logp)
        _must(self.ids.ndim >= 2, "TopK.ids", "of shape (*batch, K)", tuple(self.ids.shape), "Add a last axis of ids.")
        _must(
            self.ids.shape[-1] >= 1, "TopK.ids", "at least one column wide", "K = 0", "K = 0 is the binary divergence."
        )
        _same("TopK.logp", self.logp, self.ids, self.ids.shape)
        one_of("TopK.of", self.of, ANCHORS)
        if self.tail_logp is not None:
            _floating("TopK.tail_logp", self.tail_logp)
            _same("TopK.tail_logp", self.tail_logp, self.ids, self.ids.shape[:-1])
        # A log-prob of −inf means the sampler's truncation removed the id: it holds no mass, so it is no cell. NaN
        # stays: it is a fault, and faults are counted, not hidden.
        present = (self.ids >= 0) & (self.logp != -torch.inf)
        object.__setattr__(self, "valid", present & first_of_its_id(self.ids))


@dataclass(frozen=True, slots=True)
class FullVocabulary:
    """The anchor's log-probs over the whole vocabulary: small vocabularies, tests and studies."""

    logp: Float[Tensor, "*batch v"]
    of: Anchor = "behavior"

    def __post_init__(self) -> None:
        _floating("FullVocabulary.logp", self.logp)
        one_of("FullVocabulary.of", self.of, ANCHORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullDivergence:
    """Exact divergences that were computed elsewhere, without either distribution being kept."""

    tv: Float[Tensor, "*batch"] | None = None
    kl: Float[Tensor, "*batch"] | None = None
    """KL(anchor‖policy), nats."""

    of: Anchor = "behavior"

    def __post_init__(self) -> None:
        one_of("FullDivergence.of", self.of, ANCHORS)
        for name in ("tv", "kl"):
            if getattr(self, name) is not None:
                _floating(f"FullDivergence.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTokens:
    """Sampled tokens with everything fixed at sampling time; nothing here carries a gradient."""

    advantage: Float[Tensor, "*per_token_or_sequence"]
    """A_t, already centred and scaled by whoever computed it: (B,), (B, 1) or (B, T); (N,) when packed."""

    in_loss: Bool[Tensor, "*batch"]
    """True on tokens the policy produced; False on prompt, tool output and padding. These count nowhere."""

    behavior_logp: Float[Tensor, "*batch"] | None = None
    """log μ(a_t | s_t) as the inference engine recorded it."""

    proximal_logp: Float[Tensor, "*batch"] | None = None
    """log π'(a_t | s_t): the trainer's own forward pass at the rollout weights."""

    reference_logp: Float[Tensor, "*batch"] | None = None
    """log π_ref(a_t | s_t), for a KL penalty."""

    token_ids: Int[Tensor, "*batch"] | None = None
    """a_t. Needed where the sampled token must be found among other ids."""

    sequence_ids: Int[Tensor, "*batch"] | None = None
    """Which sequence a token belongs to; any integers. Rows are sequences when it is not given."""

    topk: TopK | None = None
    """The anchor's log-probs at its most probable ids."""

    full: FullVocabulary | None = None
    """The anchor's log-probs at every id."""

    version: Int[Tensor, "*batch"] | None = None
    """Which version of the weights sampled the token, for staleness."""

    sampling: Sampling | None = None
    """How the sampler made its log-probs; checked against the policy's side where both are given."""

    def __post_init__(self) -> None:
        mask = self.in_loss
        _must(
            isinstance(mask, Tensor), "RolloutTokens.in_loss", "a tensor", type(mask).__name__, "Use torch.as_tensor."
        )
        _must(
            mask.dtype == torch.bool,
            "RolloutTokens.in_loss",
            "boolean",
            mask.dtype,
            "A 0/1 mask converts with .bool().",
        )
        _must(
            mask.ndim in (1, 2),
            "RolloutTokens.in_loss",
            "(B, T) or packed (N,)",
            tuple(mask.shape),
            "Reshape the batch.",
        )
        for name in ("behavior_logp", "proximal_logp", "reference_logp"):
            if getattr(self, name) is not None:
                _floating(f"RolloutTokens.{name}", getattr(self, name))
                _same(f"RolloutTokens.{name}", getattr(self, name), mask, mask.shape)
        for name in ("token_ids", "sequence_ids", "version"):
            if getattr(self, name) is not None:
                _integer(f"RolloutTokens.{name}", getattr(self, name))
                _same(f"RolloutTokens.{name}", getattr(self, name), mask, mask.shape)
        _floating("RolloutTokens.advantage", self.advantage)
        allowed = {tuple(mask.shape)} | ({(mask.shape[0],), (mask.shape[0], 1)} if mask.ndim == 2 else set())
        _must(
            tuple(self.advantage.shape) in allowed,
            "RolloutTokens.advantage",
            f"of a shape in {sorted(allowed)}",
            tuple(self.advantage.shape),
            "Packed tokens take one advantage each: advantage_per_sequence[sequence_ids].",
        )
        _must(
            self.advantage.device == mask.device,
            "RolloutTokens.advantage",
            f"on {mask.device}",
            self.advantage.device,
            "Move it.",
        )
        if self.topk is not None:
            _same("RolloutTokens.topk.ids", self.topk.ids, mask, (*mask.shape, self.topk.ids.shape[-1]))
        if self.full is not None:
            _same("RolloutTokens.full.logp", self.full.logp, mask, (*mask.shape, self.full.logp.shape[-1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """What the network being trained says about the sampled tokens now; its tensors carry the gradient."""

    logp: Float[Tensor, "*batch"]
    """log π(a_t | s_t)."""

    topk_logp: Float[Tensor, "*batch k"] | None = None
    """log π at the ids of `RolloutTokens.topk`, column by column."""

    tail_logp: Float[Tensor, "*batch"] | None = None
    """log of π's mass outside those ids and the sampled token, best by a masked log-sum-exp. Derived when missing."""

    topk: TopK | None = None
    """π's own most probable ids. TROLL adds them as cells where the anchor's log-prob there is known."""

    topk_anchor_logp: Float[Tensor, "*batch j"] | None = None
    """The anchor's log-probs at the ids of `topk`, column by column."""

    full_logp: Float[Tensor, "*batch v"] | None = None
    """log π at every id, beside `RolloutTokens.full`."""

    full_divergence: FullDivergence | None = None
    """Exact divergences from the anchor, made by a fused pass; used instead of `full_logp` where given."""

    entropy: Float[Tensor, "*batch"] | None = None
    """Entropy of π at each position, nats."""

    version: int | None = None
    """The version of the weights being trained now; staleness is this minus `RolloutTokens.version`."""

    sampling: Sampling | None = None
    """How these log-probs were made (temperature, truncation)."""

    def __post_init__(self) -> None:
        _floating("PolicyTokens.logp", self.logp)
        shape = self.logp.shape
        for name in ("tail_logp", "entropy"):
            if getattr(self, name) is not None:
                _floating(f"PolicyTokens.{name}", getattr(self, name))
                _same(f"PolicyTokens.{name}", getattr(self, name), self.logp, shape)
        for name in ("topk_logp", "topk_anchor_logp", "full_logp"):
            x = getattr(self, name)
            if x is not None:
                _floating(f"PolicyTokens.{name}", x)
                _must(
                    x.ndim == self.logp.ndim + 1,
                    f"PolicyTokens.{name}",
                    "one axis longer than logp",
                    tuple(x.shape),
                    "",
                )
                _same(f"PolicyTokens.{name}", x, self.logp, (*shape, x.shape[-1]))
        if self.topk is not None:
            _same("PolicyTokens.topk.ids", self.topk.ids, self.logp, (*shape, self.topk.ids.shape[-1]))
            if self.topk_anchor_logp is not None:
                _same("PolicyTokens.topk_anchor_logp", self.topk_anchor_logp, self.logp, self.topk.ids.shape)
        if self.full_divergence is not None:
            for name in ("tv", "kl"):
                x = getattr(self.full_divergence, name)
                if x is not None:
                    _same(f"PolicyTokens.full_divergence.{name}", x, self.logp, shape)


def check_pair(policy: PolicyTokens, rollout: RolloutTokens) -> None:
    """Raises if two records do not describe the same tokens.

    Raises:
        RecordError: one is not a record, or shapes or devices differ.
        IncompatibleSamplingError: the two sides' log-probs are not of the same kind of distribution.
    """
    for name, given, kind in (("policy", policy, PolicyTokens), ("rollout", rollout, RolloutTokens)):
        made = f"Wrap your tensors: trustrl.{kind.__name__}(...)."
        _must(isinstance(given, kind), name, f"a trustrl.{kind.__name__}", f"a {type(given).__name__}", made)
    _same("PolicyTokens.logp", policy.logp, rollout.in_loss, rollout.in_loss.shape)
    if rollout.topk is not None and policy.topk_logp is not None:
        _same("PolicyTokens.topk_logp", policy.topk_logp, rollout.in_loss, rollout.topk.ids.shape)
    if rollout.full is not None and policy.full_logp is not None:
        _same("PolicyTokens.full_logp", policy.full_logp, rollout.in_loss, rollout.full.logp.shape)
    if rollout.sampling is not None and policy.sampling is not None:
        rollout.sampling.must_match(policy.sampling)
