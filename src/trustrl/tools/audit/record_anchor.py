"""The policy that recorded tokens are measured from: the sampler, or the trainer at the rollout's weights."""

from collections.abc import Sequence

from trustrl.config.statistics import Anchor
from trustrl.errors import RecordError
from trustrl.recording import Piece, stream
from trustrl.recording.storage import Place

_NEEDED = ("step", "update", "sequence", "policy_logp", "behavior_logp", "proximal_logp")
_ANCHORS: dict[str, Anchor] = {"behavior_logp": "behavior", "proximal_logp": "proximal"}


def anchor_in(files: Sequence[Place], chosen: Anchor | None = None) -> Anchor:
    """Returns the chosen anchor; without a choice, the sampler's log-probs, or π' if the records have π' alone."""
    if chosen is not None:
        return chosen
    for file in files:  # nearly always the first one has an anchor
        for piece in stream([file], columns=_NEEDED):
            for column, anchor in _ANCHORS.items():
                if column in piece.columns:
                    return anchor
    return "behavior"


def measured_from(piece: Piece, anchor: Anchor) -> Piece:
    """Returns a piece in which μ is this anchor.

    Raises:
        RecordError: If the anchor is π' and the piece lacks it.
    """
    if anchor == "behavior":
        return piece
    if "proximal_logp" not in piece.columns:
        raise RecordError(
            "The records must have proximal_logp, the trainer's log-probs at the rollout weights, but it is null. Pass "
            "--anchor behavior."
        )
    return Piece({**piece.columns, "behavior_logp": piece.columns["proximal_logp"]}, piece.run, piece.region)


def anchor_note(anchor: Anchor) -> str:
    """Returns a sentence for π' as the anchor; empty for the sampler's log-probs."""
    if anchor == "behavior":
        return ""
    return "Measured from π' (proximal_logp), the trainer at the rollout's weights: the sampler's own gap is not in it."
