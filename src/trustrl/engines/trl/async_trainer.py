"""TRL's experimental `AsyncGRPOTrainer` with a region on the sampled token.

Seams:    `compute_loss(model, inputs)`, `get_train_dataloader()` and `_sync_weight()`, which all call super();
          `rollout_queue`, wrapped so that each sample's version stays with it
Borrowed: everything else. TRL's own `compute_loss` runs for its forward pass, its metrics and its accounting. Its loss
          is replaced by the region's, with TRL's factor on each token: 1 / (a rank's share of the batch's tokens) /
          (accumulated steps)
Version:  TRL numbers weights by its syncs, and stamps a sample when its group's first request starts. Tokens that were
          drawn after a sync in between are younger than their stamp. Their log-probs are those of the weights that drew
          them
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.experimental.async_grpo import AsyncGRPOTrainer

from trustrl.config.axes import Region
from trustrl.config.terms import TokenMean, TokenWeights
from trustrl.core.clean import OnNonFinite
from trustrl.core.diagnostics import rates
from trustrl.core.metrics import Choice, check_choice, chosen
from trustrl.core.policy_loss import policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.step_check import MAX_DROPPED_SHARE, StepCheck, check_first_loss
from trustrl.engines.common.step_metrics import CLIP, clip_shares
from trustrl.engines.common.step_sums import StepSums, share_of_one_rank
from trustrl.engines.common.vocabulary_forward import ModelProxy, unrounded
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import ASYNC
from trustrl.errors import ConfigError, EngineError

VERSION = "trustrl_version"
NEEDED_INPUTS = ("token_index", "old_log_probs", "advantages", "segment_id", "global_n_tokens")


class TrustRegionAsyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's `AsyncGRPOTrainer` with a trust region instead of the clip.

    Example::

        trainer = TrustRegionAsyncGRPOTrainer(
            model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=dataset, args=AsyncGRPOConfig(...),
            region=trustrl.preset("dppo-binary-tv-capped", max_staleness=2),
        )
    """

    def __init__(
        self,
        *args: Any,
        region: Region,
        startup_checks: bool = True,
        on_nonfinite: OnNonFinite = "drop",
        max_dropped_share: float = MAX_DROPPED_SHARE,
        metrics: Choice = "core",
        **kwargs: Any,
    ) -> None:
        """Creates a trainer with a region.

        Args:
            *args: Positional arguments of `AsyncGRPOTrainer`.
            region: A region on the sampled token, anchored on the sampler.
            startup_checks: Whether to raise if the policy and the sampler disagree before the first step.
            on_nonfinite: See `trustrl.policy_loss`.
            max_dropped_share: Largest share of a step's tokens that may be dropped for faults; above it the step
                raises. 1 never raises.
            metrics: The metrics to log: "core" for about eight, "all" for every one. See `trustrl metrics`.
            **kwargs: Keyword arguments of `AsyncGRPOTrainer`.

        Raises:
            ConfigError: If the region or a setting is refused; names the fix.
            EngineError: If the adapter does not support the installed TRL.
        """
        if not isinstance(region, Region):
            raise ConfigError(
                f"region must be a trustrl region, got {region!r}. Try trustrl.preset('dppo-binary-tv-capped')."
            )
        check_choice(metrics)
        theirs = ("self", "model", "inputs", "return_outputs", "num_items_in_batch")
        seam.require_parameters(AsyncGRPOTrainer, "compute_loss", theirs)
        settings = kwargs.get("args", args[2] if len(args) > 2 else None)
        if settings is not None:  # before the model is loaded
            rows.check(ASYNC, rows.reader(settings), region)
        super().__init__(*args, **kwargs)
        rows.check(ASYNC, rows.reader(self.args), region)
        self.region = region
        self._on_nonfinite: OnNonFinite = on_nonfinite
        self._first_loss = startup_checks
        self._logged: Choice = metrics
        self._weights_version = self.model_version
        self._region_sums = StepSums()
        main = self.accelerator.is_main_process
        self._region_check = StepCheck(
            region, max_dropped_share=max_dropped_share, setting="max_dropped_share", warns=main
        )
        if main:
            self.rollout_queue = _VersionedQueue(self.rollout_queue)

    def get_train_dataloader(self) -> Any:
        """Returns TRL's own loader, whose batches also carry the version of each token's weights."""
        loader = super().get_train_dataloader()
        if self.accelerator.is_main_process:
            read_by = getattr(loader, "base_dataloader", loader)  # accelerate's loader wraps the one that collates
            read_by.collate_fn = _with_versions(read_by.collate_fn)
        return loader

    def _sync_weight(self) -> None:
        super()._sync_weight()
        # TRL counts versions on the first rank only.
        self._weights_version = broadcast_object_list([self.model_version], from_process=0)[0]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Runs TRL's own loss for its forward pass and metrics, and returns the region's loss.

        Raises:
            EngineError: If TRL's batch lacks data, or the first ratios are not 1.
            NonFiniteError: If the step dropped more tokens than allowed.
        """
        missing = [name for name in (*NEEDED_INPUTS, VERSION) if name not in inputs]
        if missing:
            raise EngineError(
                f"AsyncGRPOTrainer's batches lack {', '.join(missing)}. Install a TRL version "
                "listed in trustrl's documentation."
            )
        # TRL's loss makes the only forward pass. Its result is discarded; the region reads the pass's log-probs.
        seen = _CapturingModel(unrounded(model))
        theirs = {name: x for name, x in inputs.items() if name != VERSION}
        super().compute_loss(seen, theirs, return_outputs, num_items_in_batch)
        selected = inputs["token_index"] >= 0
        positions = inputs["token_index"][selected]
        policy = PolicyTokens(
            logp=seen.output.log_probs.flatten()[positions],
            entropy=seen.output.entropy.detach().flatten()[positions],
            version=self._weights_version,
        )
        rollout = RolloutTokens(
            behavior_logp=inputs["old_log_probs"][selected],
            advantage=inputs["advantages"][selected],
            in_loss=torch.ones_like(positions, dtype=torch.bool),
            sequence_ids=inputs["segment_id"][selected],
            version=inputs[VERSION][selected],
        )
        per_rank = (inputs["global_n_tokens"][0] / self.accelerator.num_processes).clamp(min=1.0)
        factor = 1 / per_rank / self.current_gradient_accumulation_steps
        weights = factor.to(torch.float32).expand(positions.shape)
        if self._first_loss:
            self._first_loss = not check_first_loss(policy, rollout, "behavior")
        out = policy_loss(
            policy,
            rollout,
            self.region,
            reduction=TokenWeights(weights, like=TokenMean),
            on_nonfinite=self._on_nonfinite,
        )
        self._region_sums.add(share_of_one_rank(out.sums, weights, self.accelerator.num_processes))
        self._log_region()
        if not self.aux_loss_enabled:
            return out.loss
        # TRL's own loss had this term, and it was discarded.
        balance = self.router_aux_loss_coef * seen.output.aux_loss
        return out.loss + balance / self.current_gradient_accumulation_steps

    def _log_region(self) -> None:
        """Removes TRL's shares of clipped tokens, which nothing clips, and logs the region's at the end of a step."""
        metrics = self._metrics["train"]
        for name in [name for name in metrics if name.startswith(CLIP)]:
            metrics[name].pop()
            if not metrics[name]:
                del metrics[name]
        if not self.accelerator.sync_gradients:
            return
        total, self._region_sums = self._region_sums.total(None), StepSums()
        assert total is not None  # this micro-batch is in it
        region_metrics = rates(total)
        self._region_check.check(region_metrics, total)
        for name, value in {**chosen(region_metrics, self._logged), **clip_shares(total)}.items():
            metrics[name].append(value)


class _CapturingModel(ModelProxy):
    """Model proxy that keeps the output of its one forward pass."""

    output: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self._model(*args, **kwargs)
        return self.output


class _Versioned(np.ndarray):
    """Log-probs of a sample that know the version of the weights. TRL passes this array, and not the version."""

    version: int


class _VersionedQueue:
    """Queue proxy that attaches each sample's version to its log-probs."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the next sample."""
        sample = self._queue.get(*args, **kwargs)
        logps = np.asarray(sample.old_log_probs).view(_Versioned)
        logps.version = sample.model_version
        sample.old_log_probs = logps
        return sample


def _with_versions(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
    """Adds the version of each token in the loss to a batch, in the order of TRL's `segment_id`."""

    def collated(examples: list[Any]) -> dict[str, Any]:
        batch = collate(examples)
        (packed,) = examples
        of_row = [torch.tensor([sample["old_log_probs"].version for sample in row.samples]) for row in packed]
        batch[VERSION] = torch.stack(
            [versions[segments] for versions, segments in zip(of_row, batch["segment_id"], strict=True)]
        )
        return batch

    return collated
