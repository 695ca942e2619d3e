"""Token records of a stock `GRPOTrainer`: `record(trainer)` after the trainer is created.

Seams: `_generate_and_score_completions`, `_calculate_rewards`, `_compute_loss` and
       `_get_per_token_logps_and_entropies`, replaced on this one trainer. Each replacement calls the original once with
       the same arguments and returns its result; a rollout also gets the tensors of the record
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from trl import GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from trustrl.config.axes import Needs, Region
from trustrl.core.sampling import Sampling
from trustrl.engines.common import seam
from trustrl.engines.common.loss_seam import Seen
from trustrl.engines.common.stock_tokens import StockTokens, default_sample, observable
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.refusals.trl import OLDEST
from trustrl.engines.trl import sampled_rows, sampler
from trustrl.engines.trl.anchors import RECORDED, TRAINERS, corrected, rollout_tokens
from trustrl.engines.trl.policy_side import policy_tokens
from trustrl.engines.trl.rollout_rows import SEQUENCE, RecordEnd, RolloutRows, about
from trustrl.engines.trl.trainer import TrustRegionMixin
from trustrl.errors import ConfigError, TrustRLWarning
from trustrl.recording import Recorder, Recording

SCORED = ("self", "inputs", "prompts", "completions", "completion_ids_list")


def record(
    trainer: Any,
    folder: str | os.PathLike[str] | None = None,
    *,
    region: Region | str | None = None,
    **settings: Any,
) -> Recorder:
    """Records the tokens of a stock `GRPOTrainer`. Loss, gradients and random numbers stay the same bit for bit.

    Example::

        trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=reward, train_dataset=dataset)
        record(trainer)
        trainer.train()

    Args:
        trainer: TRL's trainer, before `train()`. Subclasses that call TRL's own loss work too.
        folder: Directory or address of the record; `<output_dir>/records` if None.
        region: A region, or the name of a preset, whose decisions are recorded without any effect on the loss. None
            leaves the columns of decisions empty. Only regions on the sampled token.
        **settings: Further settings of `trustrl.recording.Recording`. `sample` is the share of sequences to write;
            by default about 32 of each rollout on each rank, and at least 1%.

    Returns:
        The recorder of this rank.

    Raises:
        ConfigError: If the trainer is not a `GRPOTrainer`, already records, or a setting is invalid.
        EngineError: If the adapter does not support the installed TRL.
        MissingPackageError: If pyarrow is not installed.
    """
    _check(trainer)
    observed = observable(region)
    if observed is not None:
        _check_observed(trainer, observed)
    if folder is None:
        folder = os.path.join(trainer.args.output_dir, "records")
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    recording = Recording.of({"folder": folder, "sample": default_sample(rows), **settings})
    rank, size = trainer.accelerator.process_index, trainer.accelerator.num_processes
    described = about(trainer, observed=observed is not None) if rank == 0 else None
    recorder = Recorder(recording, observed, rank=rank, about=described, world_size=size)
    StockRecord(trainer, recorder, observed).attach()
    return recorder


class StockRecord:
    """The record of one trainer: calls the trainer's own methods and passes what they compute to the recorder."""

    def __init__(self, trainer: Any, recorder: Recorder, region: Region | None) -> None:
        self._trainer = trainer
        self.recorder = recorder
        self._tokens = StockTokens(recorder, region)
        self._rows = RolloutRows(trainer, recorder)
        truncated = sampler.is_truncated(trainer.args)
        self._sampling = Sampling(
            logprobs="processed", temperature=trainer.temperature, truncated=truncated, engine="TRL"
        )
        self._model: Any = None
        """The policy of the running loss, or None outside a loss."""
        self._seen: list[Seen] = []
        self.num_losses = 0

    def attach(self) -> None:
        """Replaces the trainer's methods, and adds a check after the first step."""
        replacements = {
            "_generate_and_score_completions": self._rollout, "_calculate_rewards": self._rewards,
            "_compute_loss": self._loss, "_get_per_token_logps_and_entropies": self._logps,
        }  # fmt: skip
        # On this trainer alone, so that TRL's class and other trainers stay as they are.
        for name, replacement in replacements.items():
            theirs = getattr(self._trainer, name)
            setattr(self._trainer, name, functools.wraps(theirs)(functools.partial(replacement, theirs)))
        self._trainer.add_callback(_Recorded(self))

    def _rollout(self, theirs: Callable[..., dict[str, Any]], inputs: Any) -> dict[str, Any]:
        rollout = theirs(inputs)
        if not self._trainer.model.training:
            return rollout
        ids = rollout["completion_ids"]
        added: dict[str, Any] = self._rows.name(rollout)
        added["trustrl_version"] = sampled_rows.version_tensor(
            sampled_rows.NOT_RECORDED, ids, self._trainer.state.global_step
        )
        return {**rollout, **added}

    def _rewards(self, theirs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        rewards = theirs(*args, **kwargs)
        self._rows.score(rewards, *args, **kwargs)
        return rewards

    def _loss(self, theirs: Callable[..., Tensor], model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self._trainer.model.training or SEQUENCE not in inputs:
            return theirs(model, inputs)
        self._model, self._seen = model, []
        try:
            loss = theirs(model, inputs)
        finally:
            self._model = None
        if self._seen:  # otherwise the callback warns
            self._add(inputs, self._seen.pop())
        return loss

    def _logps(self, theirs: Callable[..., tuple[Any, ...]], model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        result = theirs(model, *args, **kwargs)
        if model is self._model:  # not the reference model, and not a rollout
            logp, entropy = result[0].detach(), result[1]
            self._seen.append(Seen(logp, None if entropy is None else entropy.detach(), None))
        return result

    def _add(self, inputs: dict[str, Any], seen: Seen) -> None:
        """Adds one micro-batch, and ends the step with its last one."""
        step, sampling = self._trainer.state.global_step, self._sampling
        in_loss = sampled_rows.in_loss_of(inputs)
        both = {"trustrl_behavior_logp": inputs.get(RECORDED), "trustrl_proximal_logp": inputs.get(TRAINERS)}
        inputs = {**inputs, **{name: x for name, x in both.items() if x is not None}}
        # A subclass may change the masks until the loss reads them, so turns and places are those of the loss.
        inputs["trustrl_turn"] = sampled_rows.turn_tensor(inputs)
        if "importance_sampling_ratio" in inputs:
            inputs = corrected(inputs, in_loss)
        where = TokenPlaces.everywhere(in_loss)  # the recorder drops padding on the host
        rollout = rollout_tokens(inputs, in_loss, where, Needs(), sampling)
        policy = policy_tokens(Needs(), seen, where, rollout, step)
        self._tokens.add(policy, rollout, sequences=where.of_rows(inputs[SEQUENCE]), step=step)
        self.num_losses += 1
        if self._trainer.accelerator.sync_gradients:
            self._tokens.end_step(step)


class _Recorded(RecordEnd):
    """Warning after the first step if nothing was recorded, and the end of the record."""

    def __init__(self, record: StockRecord) -> None:
        super().__init__(record.recorder)
        self._record = record
        self._checked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warns once."""
        super().on_step_end(args, state, control, **kwargs)
        if not self._checked and not self._record.num_losses:
            warnings.warn(
                "trustrl recorded no token in the first step: the trainer's loss does not call TRL's `_compute_loss` "
                "and `_get_per_token_logps_and_entropies`. Set use_liger_kernel=False if it is on. Training continues.",
                TrustRLWarning,
                stacklevel=2,
            )
        self._checked = True


def _check_observed(trainer: Any, region: Region) -> None:
    """Raises if the run does not compute the log-probs that the region compares."""
    if sampler.is_truncated(trainer.args):
        raise ConfigError(
            "region must be None with top_p, top_k, or min_p, got a region. TRL's log-probs are those of the whole "
            "vocabulary, so their ratio to the sampler's would be wrong. Train with TrustRegionGRPOTrainer instead."
        )
    recorded = trainer.use_vllm or getattr(trainer, "rollout_func", None) is not None
    if "behavior" in region.needs().anchors and not recorded:
        raise ConfigError(
            f"region must be anchored on the trainer's log-probs when transformers generates, got {region.kind} "
            "anchored on the sampler's, which transformers does not record. Set anchor='proximal' on the region, or "
            "use_vllm=True."
        )


def _check(trainer: Any) -> None:
    seam.require_version("trl", OLDEST, "trustrl was not tested with older versions")
    if not isinstance(trainer, GRPOTrainer):
        raise ConfigError(f"trainer must be a TRL GRPOTrainer, got {type(trainer).__name__}. No other is supported.")
    if isinstance(trainer, TrustRegionMixin):
        raise ConfigError(
            f"trainer must be a stock GRPOTrainer, got {type(trainer).__name__}, which has a region. Pass "
            "recording=trustrl.recording.Recording(...) when you create it."
        )
    if "_compute_loss" in vars(trainer):
        raise ConfigError("trainer must not be recorded already, got a second call of record().")
    seam.require_parameters(GRPOTrainer, "_compute_loss", ("self", "model", "inputs"))
    seam.require_parameters(GRPOTrainer, "_generate_and_score_completions", ("self", "inputs"))
    seam.require_parameters(GRPOTrainer, "_calculate_rewards", SCORED)
