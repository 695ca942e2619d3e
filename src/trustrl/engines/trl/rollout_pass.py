"""TRL's own forward pass over a rollout, asked for the anchor's distribution, so that no second pass is needed.

TRL runs the pass for `old_per_token_logps` if several optimizer steps take one rollout.
"""

from typing import Any

from trustrl.engines.common.loss_seam import Score
from trustrl.engines.trl.anchors import TRAINERS, AnchorRecorder
from trustrl.engines.trl.asking_model import AskingModel


class RolloutPass:
    """The first forward pass of the policy while TRL makes a rollout.

    Args:
        model: The policy.
        recorder: The recorder, which knows what the region needs.
    """

    def __init__(self, model: Any, recorder: AnchorRecorder) -> None:
        self._model, self._recorder = model, recorder
        self._asking: AskingModel | None = None
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

    def outputs(self, rollout: dict[str, Any]) -> AskingModel | None:
        """Returns the outputs of the pass if it made TRL's `old_per_token_logps`, and not a reference's."""
        return self._asking if self._logp is not None and rollout.get(TRAINERS) is self._logp else None
