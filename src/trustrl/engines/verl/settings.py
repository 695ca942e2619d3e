"""Which of verl's settings go with a region, and a sentence for each that does not."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from trustrl.config.axes import Needs, Region
from trustrl.engines.settings import PENALISED, TRUNCATED, refuse
from trustrl.engines.verl.agent_loop import RECORDING, sampled_topk
from trustrl.engines.verl.losses import REDUCTIONS
from trustrl.engines.verl.region import recording_of, region_of

ACTOR, ROLLOUT, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
_BOUNDS = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_TEMPERATURES = {"tau_pos": 1.0, "tau_neg": 1.05}
VLLM_MAX_LOGPROBS = 20
"""How many ids vLLM returns unless it is told otherwise."""


def check_settings(config: Mapping[str, Any]) -> Region:
    """Refuses what would bypass the region, count the mismatch twice, or make a ratio of two different things.

    Args:
        config: verl's whole configuration, as `main_ppo` gets it.

    Returns:
        The region that the run will use.

    Raises:
        ConfigError: with the setting and what to do.
    """
    region = region_of(_at(config, f"{ACTOR}.policy_loss.loss_mode"), _at(config, f"{ACTOR}.policy_loss"))
    recording_of(_at(config, f"{ACTOR}.policy_loss"))
    needs = region.needs()
    _check_trainer(config)
    _check_loss(config, region, needs)
    if "behavior" in needs.anchors:
        _check_behavior(config, region)
    _check_bypass(config)
    if needs.topk or needs.full:
        _check_vocabulary(config, region, needs)
    _check_sampling(config)
    return region


def fill_in(config: Any) -> dict[str, Any]:
    """Settings that the region needs and the user left at verl's defaults: set, and returned for the record.

    Args:
        config: verl's whole configuration; changed in place.
    """
    k = sampled_topk(config)
    if not k:
        return {}
    wanted: dict[str, Any] = {}
    loop = _at(config, f"{ROLLOUT}.agent.default_agent_loop")
    if loop in RECORDING:
        wanted[f"{ROLLOUT}.agent.default_agent_loop"] = RECORDING[loop]
    most = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
    if _at(config, f"{ROLLOUT}.name") == "vllm" and _at(config, most) is None and k > VLLM_MAX_LOGPROBS:
        wanted[most] = k
    for path, value in wanted.items():
        OmegaConf.update(config, path, value, force_add=True)
    return wanted


def _at(config: Any, path: str, default: Any = None) -> Any:
    for name in path.split("."):
        config = config.get(name, None) if config is not None else None
    return default if config is None else config


def _check_trainer(config: Any) -> None:
    if not _at(config, "trainer.use_v1", True):
        refuse(
            "trainer.use_v1",
            "True",
            False,
            "verl's old trainer replaces loss_mode in bypass mode, and the region would not act.",
        )


def _check_loss(config: Any, region: Region, needs: Needs) -> None:
    mode = _at(config, f"{ACTOR}.loss_agg_mode", "token-mean")
    if needs.reduction is not None and REDUCTIONS.get(mode) is not needs.reduction:
        fitting = [name for name, reduction in REDUCTIONS.items() if reduction is needs.reduction]
        refuse(
            f"{ACTOR}.loss_agg_mode", " or ".join(fitting), mode, f"{region.kind}'s gradient is defined per sequence."
        )
    for name, default in (_BOUNDS | _TEMPERATURES).items():
        value = _at(config, f"{ACTOR}.{name}", default)
        if value != default:
            refuse(
                f"{ACTOR}.{name}", f"left at {default}", value,
                "It belongs to verl's own losses; a region's bounds are in policy_loss.region.",
            )  # fmt: skip


def _check_behavior(config: Any, region: Region) -> None:
    is_weights = _at(config, f"{CORRECTION}.rollout_is")
    if is_weights is not None:
        refuse(
            f"{CORRECTION}.rollout_is", "null", is_weights,
            f"{region.kind} is anchored on the sampler: its ratio already contains π'/μ. "
            "A region with anchor=proximal may keep verl's correction.",
        )  # fmt: skip
    if not _at(config, f"{ROLLOUT}.calculate_log_probs", False):
        refuse(f"{ROLLOUT}.calculate_log_probs", "True", False, "Without it the sampler records no log-probs.")
    mode, temperature = _at(config, f"{ROLLOUT}.logprobs_mode"), _at(config, f"{ROLLOUT}.temperature", 1.0)
    if mode not in (None, "processed_logprobs") and temperature != 1.0:
        refuse(
            f"{ROLLOUT}.logprobs_mode", "processed_logprobs", mode,
            f"Raw log-probs are not what was sampled from at temperature {temperature:g}.",
        )  # fmt: skip


def _check_bypass(config: Any) -> None:
    """verl's trainer corrects and rejects in decoupled mode; in bypass mode it leaves both to a loss of its own."""
    if not _at(config, f"{CORRECTION}.bypass_mode", False):
        return
    for name, done in (("rollout_is", "corrected"), ("rollout_rs", "rejected")):
        value = _at(config, f"{CORRECTION}.{name}")
        if value is not None:
            refuse(
                f"{CORRECTION}.{name}", "null in bypass mode", value,
                f"There verl applies it in its own loss alone, so nothing would be {done}. "
                f"Set {CORRECTION}.bypass_mode=False to keep it.",
            )  # fmt: skip


def _check_vocabulary(config: Any, region: Region, needs: Needs) -> None:
    """What reading more of the vocabulary than the sampled token asks of verl."""
    check_engine(
        region,
        strategy=_at(config, f"{ACTOR}.strategy", "fsdp"),
        sequence_parallel=_at(config, f"{ACTOR}.ulysses_sequence_parallel_size", 1),
        fused_kernels=_at(config, "actor_rollout_ref.model.use_fused_kernels", False),
    )
    if _at(config, "distillation.enabled", False):
        refuse("distillation.enabled", "False", True, "It uses the fields that carry the sampler's distribution.")
    if needs.topk and needs.anchor == "behavior":
        _check_recording(config, needs.topk)


def check_engine(region: Region, *, strategy: str, sequence_parallel: int, fused_kernels: bool) -> None:
    """Refuses where the model's last states and its output layer cannot be reached as a whole.

    Raises:
        ConfigError: with what to set.
    """
    needs = region.needs()
    if strategy not in ("fsdp2", "fsdp"):
        refuse(
            f"{ACTOR}.strategy", "fsdp2 or fsdp", strategy,
            f"{region.kind} reads the model's last states and its whole output layer; for Megatron's split vocabulary "
            "and pipelines this is not built (trustrl.token_logprobs(shard=...) is the part that exists).",
        )  # fmt: skip
    if needs.full and needs.anchor == "behavior":
        refuse(
            "region.anchor", "proximal", "behavior",
            f"{region.kind} needs the anchor's whole distribution, and a sampler records some ids of it at most.",
        )  # fmt: skip
    if needs.full and strategy == "fsdp":
        refuse(f"{ACTOR}.strategy", "fsdp2", strategy, f"{region.kind} keeps a copy of the whole output layer.")
    if sequence_parallel > 1:
        refuse(
            f"{ACTOR}.ulysses_sequence_parallel_size", "1", sequence_parallel,
            f"{region.kind} would see a part of the tokens on each rank.",
        )  # fmt: skip
    if fused_kernels:
        refuse(
            "actor_rollout_ref.model.use_fused_kernels", "False", True,
            f"{region.kind} brings a fused pass of its own, and verl's would take its place.",
        )  # fmt: skip


def _check_recording(config: Any, k: int) -> None:
    """Whether the sampler will be asked for its top-K, and can answer."""
    loop = _at(config, f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    if loop in RECORDING:
        refuse(
            f"{ROLLOUT}.agent.default_agent_loop", RECORDING[loop], loop,
            f"verl's own loop does not record the sampler's {k} most probable ids; region.anchor=proximal takes the "
            "trainer's own instead.",
        )  # fmt: skip
    longest = _at(config, f"{ROLLOUT}.prompt_length", 0) + _at(config, f"{ROLLOUT}.response_length", 0)
    room = _at(config, f"{ROLLOUT}.max_model_len")
    if room is not None and room <= longest:
        refuse(
            f"{ROLLOUT}.max_model_len", f"at least {longest + 1}", room,
            "The longest sequence is scored by the sampler once more, which takes room for one token.",
        )  # fmt: skip
    if _at(config, f"{ROLLOUT}.name") == "vllm":
        most = _at(config, f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs", VLLM_MAX_LOGPROBS)
        if 0 <= most < k:
            refuse(
                f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs", f"at least {k}", most,
                "vLLM returns no more ids than it was started for: add "
                f"+{ROLLOUT}.engine_kwargs.vllm.max_logprobs={k}.",
            )  # fmt: skip


def _check_sampling(config: Any) -> None:
    top_p, top_k = _at(config, f"{ROLLOUT}.top_p", 1.0), _at(config, f"{ROLLOUT}.top_k", -1)
    if top_p < 1.0:
        refuse(f"{ROLLOUT}.top_p", "1.0", top_p, TRUNCATED)
    if top_k > 0:
        refuse(f"{ROLLOUT}.top_k", "-1", top_k, TRUNCATED)
    penalty = _at(config, f"{ROLLOUT}.repetition_penalty", 1.0)
    if penalty != 1.0:
        refuse(f"{ROLLOUT}.repetition_penalty", "1.0", penalty, PENALISED)
