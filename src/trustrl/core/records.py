"""Records of sampled tokens and of the policy's log-probs on them.

Tensors are (B, T) with one row per sequence, or packed (N,) with `sequence_ids`. A record checks shapes, dtypes and
devices when it is made. It does not check values, which would wait for the device; `trustrl.check` does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.statistics import ANCHORS, Anchor
from trustrl.config.validators import one_of
from trustrl.core.sampling import Sampling
from trustrl.errors import RecordError
from trustrl.kernels.derivatives import once
from trustrl.kernels.id_columns import first_of_its_id


def _must(ok: bool, what: str, rule: str, got: Any, advice: str) -> None:
    if not ok:
        raise RecordError(f"{what} must be {rule}, got {got}. {advice}")


def _floating(what: str, x: Any) -> None:
    _must(isinstance(x, Tensor), what, "a tensor", type(x).__name__, "Wrap it with torch.as_tensor.")
    _must(x.is_floating_point(), what, "floating point", x.dtype, "Pass log-probs and advantages as floating point.")


def _integer(what: str, x: Any) -> None:
    _must(isinstance(x, Tensor), what, "a tensor", type(x).__name__, "Wrap it with torch.as_tensor.")
    whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    _must(whole, what, "an integer tensor", x.dtype, "Convert it with .long().")


def _same(what: str, x: Tensor, like: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    _must(x.shape == shape, what, f"of shape {tuple(shape)}", tuple(x.shape), "Pass exactly one entry per token.")
    _must(x.device == like.device, what, f"on {like.device}", x.device, "Move it there with .to().")


def _fields(
    record: Any, names: tuple[str, ...], kind: Callable[[str, Any], None], like: Tensor, *, wide: bool = False
) -> None:
    """Checks the fields that are not None against the tokens in `like`. `wide` fields have one more axis."""
    for name in names:
        x = getattr(record, name)
        if x is not None:
            what = f"{type(record).__name__}.{name}"
            kind(what, x)
            _same(what, x, like, (*like.shape, x.shape[-1]) if wide else like.shape)


@dataclass(frozen=True, slots=True)
class TopK:
    """Ids of a distribution with their log-probs, usually the anchor's K most probable ones.

    Columns may be in any order. An id below 0 marks an empty column (samplers return K or K + 1 ids). A repeated id
    counts once.

    Examples:
        >>> TopK(torch.tensor([[7, 7, -1]]), torch.tensor([[-0.1, -0.1, 0.0]])).valid
        tensor([[ True, False, False]])
    """

    ids: Int[Tensor, "*batch k"]
    """Vocabulary ids."""

    logp: Float[Tensor, "*batch k"]
    """Log-probs at `ids`."""

    of: Anchor = "behavior"
    """Policy the log-probs belong to. A region raises if it is not the region's anchor."""

    tail_logp: Float[Tensor, "*batch"] | None = None
    """Log of the mass outside `ids` and the sampled token, if recorded. A masked log-sum-exp is exact where 1 − Σ is
    not. Used only if `PolicyTokens.tail_logp` is given too, so that both tails are computed alike."""

    valid: Bool[Tensor, "*batch k"] = field(init=False, repr=False, compare=False)
    """True on columns that hold a distinct id with mass."""

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
        # A log-prob of −inf means that the sampler's truncation removed the id: it has no mass and no cell. NaN stays
        # valid, because it is a fault, and faults are counted.
        present = (self.ids >= 0) & (self.logp != -torch.inf)
        object.__setattr__(self, "valid", present & first_of_its_id(self.ids))


@dataclass(frozen=True, slots=True)
class FullVocabulary:
    """The anchor's log-probs over the whole vocabulary, for small vocabularies, tests and studies."""

    logp: Float[Tensor, "*batch v"]
    of: Anchor = "behavior"

    def __post_init__(self) -> None:
        _floating("FullVocabulary.logp", self.logp)
        one_of("FullVocabulary.of", self.of, ANCHORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class FullDivergence:
    """Exact divergences computed by a fused pass that keeps neither distribution."""

    tv: Float[Tensor, "*batch"] | None = None
    kl: Float[Tensor, "*batch"] | None = None
    """KL(anchor‖policy) in nats."""

    of: Anchor = "behavior"

    def __post_init__(self) -> None:
        one_of("FullDivergence.of", self.of, ANCHORS)
        for name in ("tv", "kl"):
            if getattr(self, name) is not None:
                _floating(f"FullDivergence.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTokens:
    """Sampled tokens with all data fixed at sampling time. No field carries a gradient."""

    advantage: Float[Tensor, "*per_token_or_sequence"]
    """A_t, already centered and scaled by the trainer: (B,), (B, 1) or (B, T); (N,) if packed."""

    in_loss: Bool[Tensor, "*batch"]
    """True on tokens that the policy produced. False on prompts, tool output and padding, which never count."""

    behavior_logp: Float[Tensor, "*batch"] | None = None
    """log μ(a_t | s_t) as the inference engine recorded it."""

    proximal_logp: Float[Tensor, "*batch"] | None = None
    """log π'(a_t | s_t) from the trainer's forward pass at the rollout weights."""

    reference_logp: Float[Tensor, "*batch"] | None = None
    """log π_ref(a_t | s_t), for a KL penalty."""

    token_ids: Int[Tensor, "*batch"] | None = None
    """a_t. Required if the region reads more ids than the sampled one."""

    sequence_ids: Int[Tensor, "*batch"] | None = None
    """Sequence of each token, as any integers. By default rows are sequences."""

    topk: TopK | None = None
    """Log-probs of the anchor at its most probable ids."""

    full: FullVocabulary | None = None
    """Log-probs of the anchor at every id."""

    version: Int[Tensor, "*batch"] | None = None
    """Version of the weights that sampled each token, for staleness metrics."""

    turn: Int[Tensor, "*batch"] | None = None
    """Number of the request that sampled each token, from 0: one per turn of a tool loop."""

    position: Int[Tensor, "*batch"] | None = None
    """Position of each token in its response, for the token record. By default tokens are counted."""

    kept_ids: Int[Tensor, "*batch kept"] | None = None
    """Ids that top-p, top-k or min-p left to sample from; below 0 for padding. None without truncation."""

    experts: Int[Tensor, "*batch e"] | None = None
    """Experts that a sampler with a mixture of experts used for `behavior_logp`, layer by layer. Only recorded: no
    region reads them."""

    replica: Int[Tensor, "*rows"] | None = None
    """Number of the sampler's replica behind each sequence, (B,), or of each packed token; below 0 if unknown."""

    sampling: Sampling | None = None
    """Sampling settings behind the recorded log-probs, compared with `PolicyTokens.sampling` if both are given."""

    def __post_init__(self) -> None:
        mask = self.in_loss
        is_tensor = isinstance(mask, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]: callers may run unchecked
        _must(is_tensor, "RolloutTokens.in_loss", "a tensor", type(mask).__name__, "Use torch.as_tensor.")
        where, shape = "RolloutTokens.in_loss", tuple(mask.shape)
        _must(mask.dtype == torch.bool, where, "boolean", mask.dtype, "Convert a 0/1 mask with .bool().")
        _must(mask.ndim in (1, 2), where, "(B, T) or packed (N,)", shape, "Reshape the batch.")
        _fields(self, ("behavior_logp", "proximal_logp", "reference_logp"), _floating, mask)
        _fields(self, ("token_ids", "sequence_ids", "version", "turn", "position"), _integer, mask)
        where, advantage = "RolloutTokens.advantage", self.advantage
        _floating(where, advantage)
        allowed: set[tuple[int, ...]] = {shape}
        allowed |= {(mask.shape[0],), (mask.shape[0], 1)} if mask.ndim == 2 else set()
        advice = "Pass one advantage per packed token: advantage_per_sequence[sequence_ids]."
        fits = tuple(advantage.shape) in allowed
        _must(fits, where, f"of a shape in {sorted(allowed)}", tuple(advantage.shape), advice)
        _same(where, advantage, mask, advantage.shape)  # the device
        _fields(self, ("kept_ids", "experts"), _integer, mask, wide=True)
        if self.topk is not None:
            _same("RolloutTokens.topk.ids", self.topk.ids, mask, (*mask.shape, self.topk.ids.shape[-1]))
        if self.full is not None:
            _same("RolloutTokens.full.logp", self.full.logp, mask, (*mask.shape, self.full.logp.shape[-1]))
        if self.replica is not None:
            _integer("RolloutTokens.replica", self.replica)
            _same("RolloutTokens.replica", self.replica, mask, mask.shape[:1])


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTokens:
    """Log-probs of the policy being trained on the sampled tokens, with gradient."""

    logp: Float[Tensor, "*batch"]
    """log π(a_t | s_t)."""

    topk_logp: Float[Tensor, "*batch k"] | None = None
    """log π at the ids of `RolloutTokens.topk`, column by column."""

    tail_logp: Float[Tensor, "*batch"] | None = None
    """Log of π's mass outside those ids and the sampled token, best from a masked log-sum-exp. Derived if None."""

    topk: TopK | None = None
    """Most probable ids of π. TROLL adds them as cells where the anchor's log-prob is known."""

    topk_anchor_logp: Float[Tensor, "*batch j"] | None = None
    """Log-probs of the anchor at the ids of `topk`, column by column."""

    full_logp: Float[Tensor, "*batch v"] | None = None
    """log π at every id, with `RolloutTokens.full`."""

    full_divergence: FullDivergence | None = None
    """Exact divergences from the anchor, computed by a fused pass. Used instead of `full_logp` if given."""

    entropy: Float[Tensor, "*batch"] | None = None
    """Entropy of π at each position, in nats."""

    version: int | None = None
    """Version of the weights being trained. Staleness is this minus `RolloutTokens.version`."""

    sampling: Sampling | None = None
    """Sampling settings behind these log-probs (temperature, truncation)."""

    def __post_init__(self) -> None:
        _floating("PolicyTokens.logp", self.logp)
        shape = self.logp.shape

        def longer(what: str, x: Any) -> None:
            _floating(what, x)
            _must(x.ndim == len(shape) + 1, what, "one axis longer than logp", tuple(x.shape), "")

        _fields(self, ("tail_logp", "entropy"), _floating, self.logp)
        _fields(self, ("topk_logp", "topk_anchor_logp", "full_logp"), longer, self.logp, wide=True)
        if self.topk is not None:
            _same("PolicyTokens.topk.ids", self.topk.ids, self.logp, (*shape, self.topk.ids.shape[-1]))
            if self.topk_anchor_logp is not None:
                _same("PolicyTokens.topk_anchor_logp", self.topk_anchor_logp, self.logp, self.topk.ids.shape)
        if self.full_divergence is not None:
            for name in ("tv", "kl"):
                x = getattr(self.full_divergence, name)
                if x is not None:
                    _same(f"PolicyTokens.full_divergence.{name}", x, self.logp, shape)


def differentiable_once(policy: PolicyTokens) -> PolicyTokens:
    """Returns the record with log-probs whose gradient raises if it is differentiated."""
    names = ("logp", "topk_logp", "tail_logp", "full_logp")
    values = {name: getattr(policy, name, None) for name in names}  # callers may pass anything until `check_pair`
    guarded = {name: once(x) for name, x in values.items() if isinstance(x, Tensor) and x.requires_grad}
    return replace(policy, **guarded) if guarded else policy


def check_pair(policy: PolicyTokens, rollout: RolloutTokens) -> None:
    """Raises if two records do not describe the same tokens.

    Raises:
        RecordError: If one is not a record, or if shapes or devices differ.
        IncompatibleSamplingError: If the two records hold log-probs of differently processed distributions.
    """
    for name, record, kind in (("policy", policy, PolicyTokens), ("rollout", rollout, RolloutTokens)):
        made = f"Wrap your tensors: trustrl.{kind.__name__}(...)."
        fits = isinstance(record, kind)  # pyright: ignore[reportUnnecessaryIsInstance]: callers may run unchecked
        _must(fits, name, f"a trustrl.{kind.__name__}", f"a {type(record).__name__}", made)
    _same("PolicyTokens.logp", policy.logp, rollout.in_loss, rollout.in_loss.shape)
    if rollout.topk is not None and policy.topk_logp is not None:
        _same("PolicyTokens.topk_logp", policy.topk_logp, rollout.in_loss, rollout.topk.ids.shape)
    if rollout.full is not None and policy.full_logp is not None:
        _same("PolicyTokens.full_logp", policy.full_logp, rollout.in_loss, rollout.full.logp.shape)
    if rollout.sampling is not None and policy.sampling is not None:
        rollout.sampling.must_match(policy.sampling)
