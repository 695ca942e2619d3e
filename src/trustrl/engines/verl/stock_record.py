"""Token records of a run with one of verl's own losses, which stays the same bit for bit.

    VERL_USE_EXTERNAL_MODULES=trustrl.engines.verl TRUSTRL_RECORD=records python -m verl.trainer.main_ppo ...

`RegionWorker` calls verl's loss with verl's arguments, and records what it was called with.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.config.axes import Region
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.stock_tokens import StockTokens
from trustrl.engines.verl import anchors
from trustrl.engines.verl.batch_rows import SEQUENCE
from trustrl.engines.verl.response_layout import every_response_token, taken
from trustrl.recording import Recorder

VERSION = "trustrl_sequence_version"
"""The field added to a batch: the version of the weights that drew each sequence."""


class StockRecord:
    """The record of a worker whose loss is verl's own.

    Args:
        recorder: The recorder of this rank.
        region: A region to observe, or None.
    """

    def __init__(self, recorder: Recorder, region: Region | None) -> None:
        self._tokens = StockTokens(recorder, region)
        self._step = self._updates = 0
        self._bypass = False

    def begin(self, step: int, data: Any, sent: Mapping[int, int]) -> None:
        """Begins a training step.

        Args:
            step: The training step.
            data: This rank's part of the batch.
            sent: The worker's training steps before each version of the weights was sent to the sampler.
        """
        self._step, self._updates = step, 0
        self._bypass = anchors.bypassed(data)
        versions = anchors.sequence_versions(data, sent)
        if versions is not None:
            data[VERSION] = versions

    def begin_update(self) -> None:
        """Begins an optimizer step."""
        self._updates += 1

    def end(self) -> None:
        """Ends the training step."""
        self._tokens.end_step(self._step)

    def loss(self, theirs: Any, *, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        """Runs verl's loss of one micro-batch, and records what it got."""
        result = theirs(model_output=model_output, data=data, dp_group=dp_group)
        if SEQUENCE in data.keys() and "log_probs" in model_output:  # noqa: SIM118 - a TensorDict
            self._add(model_output, data)
        return result

    def _add(self, model_output: Any, data: Any) -> None:
        tokens = every_response_token(data)
        entropy, version = model_output.get("entropy", None), data.get(VERSION, None)
        advantages, weights = taken(data["advantages"], tokens), data.get("rollout_is_weights", None)
        if weights is not None:
            advantages = advantages * taken(weights, tokens)
        policy = PolicyTokens(
            logp=tokens.of(no_padding_2_padding(model_output["log_probs"].detach(), data)),
            entropy=None if entropy is None else tokens.of(no_padding_2_padding(entropy.detach(), data)),
            version=self._step,
        )
        known: dict[str, Any] = anchors.logps(data, tokens, bypass=self._bypass, truncated=False)
        rollout = RolloutTokens(
            advantage=advantages,
            in_loss=taken(data["response_mask"], tokens).bool(),
            token_ids=taken(data["responses"], tokens),
            sequence_ids=tokens.row,
            version=None if version is None else tokens.of_rows(version),
            position=tokens.column,
            **known,
        )
        sequences, update = tokens.of_rows(data[SEQUENCE]), max(self._updates - 1, 0)
        self._tokens.add(policy, rollout, sequences=sequences, step=self._step, update=update)
