"""OpenRLHF's experience maker, which passes the sampler's record and π' on to the update.

Seam:     `RemoteExperienceMaker.make_experience`, `_dispatch_forward` and `_flatten_results`, which all call super()
Added:    `Experience.mm_train_inputs`; see `anchor_rows` and `sampled_rows`

Importing this module replaces the class in `openrlhf.trainer.ppo_utils.experience_maker`.
"""

import os
from typing import Any

from openrlhf.trainer.ppo_utils import experience_maker
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.openrlhf.anchor_rows import CARRIED, RecordedLogp, carry, is_read_in_a_rollout
from trustrl.engines.openrlhf.launcher import OPTION, VARIABLE, is_truncated
from trustrl.engines.openrlhf.sampled_rows import KEPT, SAMPLED, SampledRow, is_recorded, require_rows, sampled_rows
from trustrl.errors import MissingDataError

DISPATCHED_WITH = ("self", "group", "sync_condition", "kwargs")


class RegionExperienceMaker(RemoteExperienceMaker):
    """`RemoteExperienceMaker` that keeps what the region reads of the sampler and of π'.

    Raises:
        EngineError: If OpenRLHF's experience maker differs from the one that this adapter was written for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seam.require_parameters(RemoteExperienceMaker, "make_experience", ("self", "samples_list"))
        seam.require_parameters(RemoteExperienceMaker, "_dispatch_forward", DISPATCHED_WITH)
        seam.require_parameters(RemoteExperienceMaker, "_flatten_results", ("self", "refs", "duplicate_factor"))
        super().__init__(*args, **kwargs)
        region = region_given(os.environ.get(VARIABLE), OPTION)
        self._truncated = is_truncated(self.args)
        self._is_recorded = is_recorded(region, truncated=self._truncated)
        self._is_read = is_read_in_a_rollout(region, truncated=self._truncated)
        self._recorded: list[RecordedLogp] = []
        self._sampled: list[list[SampledRow]] = []

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """Runs OpenRLHF's method, and adds the sampler's record and π' to each experience.

        Raises:
            MissingDataError: If the sampler's record or π' is missing.
            EngineError: If an agent truncates its requests, and the run's settings do not.
        """
        rows = [sampled_rows(samples) for samples in samples_list]
        if self._is_recorded or any(row is not None for part in rows for row in part):
            self._sampled = [
                require_rows(part, samples.action_mask.bool(), truncated=self._truncated)
                for part, samples in zip(rows, samples_list, strict=True)
            ]
        self._recorded = []
        experiences = super().make_experience(samples_list)
        anchors = self._anchors(len(experiences)) if self._is_read else None
        sampled, self._sampled, self._recorded = self._sampled, [], []
        for number, experience in enumerate(experiences):
            held = {CARRIED: anchors[number].rows if anchors else None, SAMPLED: sampled[number] if sampled else None}
            if any(held.values()):
                carry(experience, **held)
        return experiences

    def _anchors(self, count: int) -> list[RecordedLogp]:
        if len(self._recorded) != count:
            raise MissingDataError(
                f"OpenRLHF's actor must return π' for {count} micro-batches, got {len(self._recorded)}. Check that "
                "every node has the same trustrl and OpenRLHF."
            )
        return self._recorded

    def _dispatch_forward(self, group: Any, sync_condition: Any, **kwargs: Any) -> Any:
        """Sends the actor the kept ids, and the sampler's record to no model: only the update reads it."""
        if self._sampled:
            kwargs.pop("mm_train_inputs_list", None)
            if self._truncated and group is self.actor_model_group:
                kwargs["mm_train_inputs_list"] = [[{KEPT: row.kept} for row in rows] for rows in self._sampled]
        return super()._dispatch_forward(group, sync_condition, **kwargs)

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        """Returns the log-probs of all micro-batches, and keeps the anchor's rows that came with them."""
        results = super()._flatten_results(refs, duplicate_factor)
        recorded = [result for result in results if isinstance(result, RecordedLogp)]
        self._recorded += recorded
        return [result.logp for result in recorded] or results


experience_maker.RemoteExperienceMaker = RegionExperienceMaker
