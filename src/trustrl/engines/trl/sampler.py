"""vLLM as TRL's sampler: its options, its weight sync, and the records that it makes while it decodes.

`SamplerCheck` measures the gap between decode and prefill: log-probs that vLLM recorded while it sampled, and those of
the finished sequence at the same weights. They differ by rounding, because vLLM runs other kernels for one new token
than for a whole sequence: about 0 in float32 on a CPU, and a few hundredths of a nat in bf16. This is why trustrl
records μ while vLLM decodes, and never scores again afterwards.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from trustrl.config.validators import whole
from trustrl.engines.common.replica_watch import OnStaleReplica, ReplicaWatch
from trustrl.engines.common.sampler_contract import Wanted
from trustrl.engines.common.sampler_fields import REPLICA
from trustrl.engines.refusals import rows
from trustrl.engines.refusals.trl import SERVER, truncated
from trustrl.engines.trl.anchors import RECORDED
from trustrl.engines.trl.sampled_rows import in_loss_of
from trustrl.engines.vllm.scoring import score_rollout
from trustrl.errors import ConfigError, EngineError, RecordError

VLLM_DEFAULT_MAX_LOGPROBS = 20


def is_truncated(settings: Any) -> bool:
    """Returns whether TRL's settings, or None, draw tokens from a part of the vocabulary."""
    return settings is not None and truncated(rows.reader(settings))


@contextmanager
def colocated_options(settings: Any, *, asked: Wanted, user_options: dict[str, Any] | None) -> Iterator[None]:
    """Makes TRL build a colocated vLLM with the options that the region and this machine need, while active.

    Args:
        settings: TRL's `GRPOConfig`, or None.
        asked: The data to record at each token.
        user_options: Options for vLLM that the user passes.

    Raises:
        ConfigError: If routed experts are wanted, and the sampler is not a colocated vLLM.
        EngineError: If a variable that vLLM reads on a CPU is not set.
    """
    if settings is None or not settings.use_vllm or settings.vllm_mode != "colocate":
        if asked.experts:
            raise ConfigError(
                "recording.experts must be False without a colocated vLLM, got True. A vLLM server does not send TRL "
                'its routing, and transformers does not record it. Set use_vllm=True and vllm_mode="colocate".'
            )
        yield
        return
    from trustrl.engines.vllm.options import cpu_options, extra_llm_options, missing_cpu_environment

    missing = missing_cpu_environment()
    if missing:
        prefix = " ".join(f"{name}={value}" for name, value in missing.items())
        raise EngineError(
            f"The environment does not set {', '.join(missing)}, which vLLM needs on a CPU before it is imported. "
            f"Start with `{prefix} python ...`."
        )
    options = {**cpu_options(), **(user_options or {})}
    most = max(asked.top_k, asked.max_kept + 1)
    if most > VLLM_DEFAULT_MAX_LOGPROBS:
        # vLLM refuses requests for more ids than this.
        options.setdefault("max_logprobs", most)
    if asked.experts:
        from trustrl.engines.vllm.routed_experts import routing_options

        options |= routing_options()
    if not options:
        yield
        return
    with extra_llm_options(**options):
        yield


def on_cpu() -> bool:
    """Returns whether vLLM is installed and runs on the CPU."""
    from trustrl.engines.vllm import options

    return find_spec("vllm") is not None and options.on_cpu()


def prepare(trainer: Any, asked: Wanted) -> None:
    """Makes the trainer's vLLM follow its weights, and record more than the sampled token while it decodes.

    Args:
        trainer: TRL's trainer.
        asked: The data to record at each token.

    Raises:
        ConfigError: If the vLLM server's settings do not work with a region, or the model has no experts to record.
    """
    if not trainer.use_vllm:
        return
    from trustrl.engines.vllm.weight_reload import install_sync

    generation, temperature = trainer.vllm_generation, trainer.temperature
    if generation.mode == "colocate":
        install_sync(generation)
    elif trainer.accelerator.is_main_process and (temperature != 1.0 or asked.top_k):
        mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        facts = {"The vLLM server's logprobs_mode": mode, "temperature": temperature}
        rows.check(SERVER, rows.reader(facts), trainer.region)
    if any(asked):
        record_while_decoding(generation, asked)
    if asked.experts:
        from trustrl.engines.vllm.routed_experts import record_routing

        record_routing(generation.llm)


def replica_watch(trainer: Any, on_stale: OnStaleReplica) -> ReplicaWatch:
    """Returns the check of the sampler's replicas. Every rank knows those of TRL itself: its colocated engines."""
    names = [str(number) for number in range(_own_replica(trainer.accelerator.num_processes - 1, trainer) + 1)]
    return ReplicaWatch(on_stale, warns=trainer.accelerator.is_main_process, names=names if trainer.use_vllm else ())


def replicas_of(trainer: Any, recorded: list[Any] | None, count: int) -> Sequence[str | None] | None:
    """Returns the replica that sampled each completion of this rank; None if transformers generates.

    Args:
        trainer: TRL's trainer.
        recorded: The replicas that a `rollout_func` returned, or None.
        count: The number of completions.

    Raises:
        RecordError: If a `rollout_func` returned another number of replicas.
    """
    if getattr(trainer, "rollout_func", None) is None:
        own = str(_own_replica(trainer.accelerator.process_index, trainer))
        return [own for _ in range(count)] if trainer.use_vllm else None
    if recorded is not None and len(recorded) != count:
        raise RecordError(f"{REPLICA} must have one entry per completion, got {len(recorded)} for {count}.")
    names = [None if name is None else str(name) for name in recorded or [None] * count]
    trainer._replicas.agree(names)  # one gather per rollout: only the function knows its servers
    return names


def _own_replica(rank: int, trainer: Any) -> int:
    """Returns the number of the vLLM engine that samples for a rank. A server is one replica."""
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None or generation.mode != "colocate":
        return 0
    return rank // generation.tensor_parallel_size


def record_while_decoding(generation: Any, asked: Wanted) -> None:
    """Makes TRL's `VLLMGeneration` return the sampled token's log-prob as a `RecordedLogprob`, with μ's records.

    Colocated, vLLM keeps the numbers as arrays. A server returns them as JSON, about 30 bytes per number.
    """
    from trustrl.engines.vllm.decode_record import DecodedLogprobs, install, recording

    k, kwargs = asked.top_k, generation.generation_kwargs or {}
    max_kept = asked.max_kept
    if max_kept and generation.mode == "colocate":
        # Requests ask for one id more than may be kept, and the vocabulary must have it.
        max_kept = min(max_kept, generation.llm.llm_engine.model_config.get_vocab_size() - 1)
    parameters = recording(k, max_kept=max_kept, more=kwargs.get("extra_args"))
    generation.logprobs = parameters["logprobs"]
    if generation.mode == "colocate":
        install()
        generation.generation_kwargs = {**kwargs, "extra_args": parameters["extra_args"]}
        return
    generate = generation.generate

    def recorded(*args: Any, **more: Any) -> Any:
        prompts, completions, logp, ids = generate(*args, **more)
        rows = zip(completions, ids, logp, strict=True)
        sources = [DecodedLogprobs.from_lists(*row, k) for row in rows]
        # One entry at each position: TRL takes the first, which would be the most probable id and not the sampled one.
        values = [[[position] for position in source.values()] for source in sources]
        own = [[[token] for token in completion] for completion in completions]
        return prompts, completions, values, own

    generation.generate = recorded


GAP = "trustrl/decode_prefill_gap"
"""Mean |log μ while decoding − log μ by prefill| at sampled tokens, in nats. `_max` is the largest."""

LONGEST = 512
"""The number of ids that are scored. vLLM holds this many rows of float32 logits for a moment."""


class SamplerCheck:
    """Scores the beginning of one sequence per rank with the colocated vLLM, in some rollouts, and logs the gap.

    Cost: one prefill of at most `LONGEST` ids per rank, and one gather of three numbers.

    Args:
        every: The number of rollouts from one check to the next; 0 never checks.
    """

    def __init__(self, every: int) -> None:
        whole("check_sampler_every", every, low=0)
        self._every = every
        self._rollouts = 0

    def run(self, trainer: Any, rollout: dict[str, Any]) -> None:
        """Checks a training rollout, if it is this one's turn. Call it on every rank."""
        turn, self._rollouts = self._rollouts, self._rollouts + 1
        if not self._every or turn % self._every or not _comparable(trainer) or rollout.get(RECORDED) is None:
            return
        longest = trainer.vllm_generation.llm.model_config.max_model_len - 1  # vLLM samples one more token
        sequences, lengths, place = _beginning(rollout, turn // self._every, min(LONGEST, longest))
        gap = torch.zeros(0)
        if sequences or trainer.vllm_generation.tensor_parallel_size > 1:
            scores = score_rollout(trainer.vllm_generation, sequences, lengths, 0)
            gap = _gap(rollout, place, scores.logp[0][scores.valid[0]]) if sequences else gap
        mine = torch.tensor(
            [gap.sum(), gap.numel(), gap.max() if gap.numel() else 0.0], device=trainer.accelerator.device
        )
        total, tokens, largest = trainer.accelerator.gather(mine).view(-1, 3).unbind(-1)
        if tokens.sum() > 0:
            trainer._metrics["train"][GAP].append((total.sum() / tokens.sum()).item())
            trainer._metrics["train"][f"{GAP}_max"].append(largest.max().item())


def _comparable(trainer: Any) -> bool:
    """Returns whether prefill scores the distribution that was drawn from: vLLM scores ids, before temperature."""
    if getattr(trainer, "_is_vlm", False):  # on every rank alike, with or without images in its rows
        return False
    if not trainer.use_vllm or getattr(trainer, "rollout_func", None) is not None:
        return False
    generation = trainer.vllm_generation
    if generation.mode != "colocate" or generation.enable_sleep_mode:  # a sleeping sampler cannot score
        return False
    return (
        not truncated(functools.partial(getattr, trainer)) and trainer.temperature == trainer.repetition_penalty == 1.0
    )


def _beginning(rollout: dict[str, Any], turn: int, room: int) -> tuple[list[list[int]], list[int], int]:
    """Returns the first ids of one sequence whose answer has room, its prompt's length, and its row; or no sequence."""
    prompts, answers = (rollout[f"{part}_mask"].sum(-1).tolist() for part in ("prompt", "completion"))
    fitting = [
        row for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)) if prompt < room and answer
    ]
    if not fitting:
        return [], [], -1
    row = fitting[turn % len(fitting)]
    prompt = rollout["prompt_ids"][row][rollout["prompt_mask"][row].bool()].tolist()
    answer = rollout["completion_ids"][row][: answers[row]].tolist()
    return [(prompt + answer)[:room]], [len(prompt)], row


def _gap(rollout: dict[str, Any], row: int, scored: torch.Tensor) -> torch.Tensor:
    mask = in_loss_of(rollout)[row, : len(scored)].cpu()
    return (rollout[RECORDED][row][: len(scored)].cpu() - scored).abs()[mask]
