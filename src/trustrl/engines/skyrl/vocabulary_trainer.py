"""SkyRL's trainer for regions that need more than SkyRL passes to a loss.

Seam:     `build_models`, `_execute_forward_pass`, `fwd_logprobs_values_reward` and `_normalize_advantages` of
          `RayPPOTrainer`, which all call super(), and `get_trainer` of `BasePPOExp`
Switch:   `python -m trustrl.engines.skyrl`, for regions that need it
Added:    the anchor's top K, which the policy workers read in SkyRL's pass for the old log-probs, and the factor by
          which SkyRL's average multiplies each token: what it makes of advantages of 1. Both are columns of the batch
"""

from typing import Any

import ray
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer

from trustrl.engines.common import seam
from trustrl.engines.skyrl.losses import ANCHOR, FACTOR
from trustrl.engines.skyrl.vocabulary_worker import RegionPolicyWorkerBase, joined

RegionPolicyWorker = ray.remote(num_gpus=1)(RegionPolicyWorkerBase)
NORMALIZED_WITH = ("self", "data", "mini_batch_boundaries", "prompt_boundaries")
PASSED_WITH = ("self", "model", "data_fwd_pass", "key", "mini_batch_boundaries")


class RegionTrainer(RayPPOTrainer):
    """SkyRL's trainer, whose batches carry the anchor's top K and the factor of each token."""

    policy_worker: Any = RegionPolicyWorker
    """The Ray actor that `build_models` starts as the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_seams()
        super().__init__(*args, **kwargs)
        self._rows: list[dict[str, Any]] = []

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Builds SkyRL's workers, with trustrl's as the policy."""
        super().build_models(self.policy_worker, CriticWorker, RefWorker)

    def _execute_forward_pass(self, model: str, *args: Any, **kwargs: Any) -> Any:
        if model != "policy":
            return super()._execute_forward_pass(model, *args, **kwargs)
        dispatch, self._rows = self.dispatch, []
        self.dispatch: Any = _KeepingDispatch(dispatch, self._rows)
        try:
            return super()._execute_forward_pass(model, *args, **kwargs)
        finally:
            self.dispatch = dispatch

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        """Runs SkyRL's passes, and puts the anchor's top K into the batch."""
        self._rows = []
        training_input = super().fwd_logprobs_values_reward(training_input)
        if self._rows and self._rows[0].keys() >= set(ANCHOR):
            training_input.update(joined(self._rows, len(training_input)))
            self._rows = []
        return training_input

    def _normalize_advantages(self, data: Any, mini_batch_boundaries: Any, prompt_boundaries: Any = None) -> Any:
        algorithm = self.cfg.trainer.algorithm
        ones = TrainingInputBatch(
            {
                "advantages": torch.ones_like(data["advantages"]),
                "loss_mask": data["loss_mask"],
                "response_mask": data["response_mask"],
            }
        )
        # Normalizing would subtract the mean. The factor is that of the average alone.
        normalizes, algorithm.advantage_batch_normalize = algorithm.advantage_batch_normalize, False
        try:
            factor = super()._normalize_advantages(ones, mini_batch_boundaries, prompt_boundaries)["advantages"]
        finally:
            algorithm.advantage_batch_normalize = normalizes
        data = super()._normalize_advantages(data, mini_batch_boundaries, prompt_boundaries)
        data[FACTOR] = factor
        return data


class _KeepingDispatch:
    """SkyRL's `WorkerDispatch`, which keeps each row of the passes it runs.

    SkyRL's trainer takes the log-probs out of the rows and drops what else the workers added to them.
    """

    def __init__(self, dispatch: Any, rows: list[dict[str, Any]]) -> None:
        self._dispatch, self._rows = dispatch, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(self._dispatch.forward(*args, **kwargs))

    def forward_from_staged(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(self._dispatch.forward_from_staged(*args, **kwargs))

    def _keep(self, output: Any) -> Any:
        self._rows += output.loss_fn_outputs
        return output


class RegionExp(BasePPOExp):
    """SkyRL's experiment with `RegionTrainer`."""

    def get_trainer(self, *args: Any, **kwargs: Any) -> RegionTrainer:
        """Returns the trainer."""
        return RegionTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def region_entrypoint(cfg: Any) -> None:
    """Runs the experiment away from the head node, as SkyRL's own entry point does."""
    RegionExp(cfg).run()


def _check_seams() -> None:
    seam.require_parameters(RayPPOTrainer, "build_models", ("self", "PolicyWorker", "CriticWorker", "RefWorker"))
    seam.require_parameters(RayPPOTrainer, "_execute_forward_pass", PASSED_WITH)
    seam.require_parameters(RayPPOTrainer, "fwd_logprobs_values_reward", ("self", "training_input"))
    seam.require_parameters(RayPPOTrainer, "_normalize_advantages", NORMALIZED_WITH)
