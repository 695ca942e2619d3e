"""OpenRLHF's experience maker, which passes the top K of π' on to the update.

Seam:     `RemoteExperienceMaker.make_experience` and `_flatten_results`, which both call super()
Added:    `Experience.mm_train_inputs`; see `anchor_rows`

Importing this module replaces the class in `openrlhf.trainer.ppo_utils.experience_maker`.
"""

import os
from typing import Any

from openrlhf.trainer.ppo_utils import experience_maker
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.openrlhf.anchor_rows import RecordedLogp, carry
from trustrl.engines.openrlhf.launcher import OPTION, VARIABLE
from trustrl.errors import MissingDataError


class RegionExperienceMaker(RemoteExperienceMaker):
    """`RemoteExperienceMaker` that keeps the actor's top K if the region reads one.

    Raises:
        EngineError: If OpenRLHF's experience maker differs from the one that this adapter was written for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seam.require_parameters(RemoteExperienceMaker, "make_experience", ("self", "samples_list"))
        seam.require_parameters(RemoteExperienceMaker, "_flatten_results", ("self", "refs", "duplicate_factor"))
        super().__init__(*args, **kwargs)
        self._needs = region_given(os.environ.get(VARIABLE), OPTION).needs()
        self._recorded: list[RecordedLogp] = []

    def make_experience(self, samples_list: list[Any]) -> list[Any]:
        """Runs OpenRLHF's method, and adds the top K of π' to each experience.

        Raises:
            MissingDataError: If the region reads a top K and OpenRLHF's actor did not return it.
        """
        self._recorded = []
        experiences = super().make_experience(samples_list)
        if not self._needs.topk:
            return experiences
        if len(self._recorded) != len(experiences):
            raise MissingDataError(
                f"OpenRLHF's actor must return the top K of π' for {len(experiences)} micro-batches, got "
                f"{len(self._recorded)}. Check that every node has the same trustrl and OpenRLHF."
            )
        for experience, recorded in zip(experiences, self._recorded, strict=True):
            carry(experience, recorded.rows)
        self._recorded = []
        return experiences

    def _flatten_results(self, refs: Any, duplicate_factor: int) -> list[Any]:
        """Returns the log-probs of all micro-batches, and keeps the anchor's rows that came with them."""
        results = super()._flatten_results(refs, duplicate_factor)
        recorded = [result for result in results if isinstance(result, RecordedLogp)]
        self._recorded += recorded
        return [result.logp for result in recorded] or results


experience_maker.RemoteExperienceMaker = RegionExperienceMaker
