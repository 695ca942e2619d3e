"""What `main_ppo` needs on a CPU, as overrides that any of the user's own replaces."""

from collections.abc import Collection, Sequence
from pathlib import Path

from trustrl.engines.verl_data import PLAIN_CHAT, REWARD

PLUGIN = "trustrl.engines.verl_cpu.plugin"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # More threads than cores make small models ten times slower, and every rank is a process.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts an idle Python for every CPU it is promised; none of them fits verl's environment, and each costs
    # seconds.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's own way to say that there is one machine only: it listens on the loopback address alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Read by verl, torch and Ray in every process."""

_ENGINES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
_ENGINE_CONFIGS = {
    "actor_rollout_ref.actor": "fsdp_config",
    "actor_rollout_ref.ref": "fsdp_config",
    "critic": "fsdp",
}
_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"

_REPLAY = {
    "trainer.v1.sampler.custom_sampler.path": str(Path(__file__).with_name("replay.py")),
    "trainer.v1.sampler.custom_sampler.name": "QuickReplayBuffer",
}
_DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"
_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size", "critic.ppo_micro_batch_size",
)  # fmt: skip
UNLESS: dict[tuple[str, ...], Collection[str]] = {
    # verl hands these to its own replay buffers alone.
    ("algorithm.filter_groups", "trainer.v1.sampler", "trainer.v1.trainer_mode"): _REPLAY.keys(),
    _MICRO_BATCHES: [_DYNAMIC],
}
"""Defaults that contradict what a user may ask for: beginnings of settings, and the defaults these take back."""

PLAIN_PROMPTS = f'actor_rollout_ref.model.custom_chat_template="{PLAIN_CHAT}"'
"""For prompts that are texts: the model reads a message's content and nothing around it."""

DEFAULTS: dict[str, str] = {
    # One rank, and one server for all ranks: see `rollout`.
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": "1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "${trainer.n_gpus_per_node}",
    # A Ray of our own, even where one is running.
    "+ray_kwargs.ray_init.address": "local",
    # verl asks for three CPUs a rank, and one for each of its own actors; Ray's CPUs are not cores.
    "ray_kwargs.ray_init.num_cpus": "32",
    "+ray_kwargs.ray_init.num_gpus": "${trainer.n_gpus_per_node}",
    "+ray_kwargs.ray_init.include_dashboard": "False",
    "+ray_kwargs.ray_init.object_store_memory": "268435456",
    # Kernels that are for GPUs, and half precision, which a CPU emulates.
    **{f"{engine}.strategy": "fsdp2" for engine in _ENGINES},
    **{f"{engine}.{config}.use_torch_compile": "False" for engine, config in _ENGINE_CONFIGS.items()},
    **{f"+{engine}.{config}.mixed_precision": _FP32 for engine, config in _ENGINE_CONFIGS.items()},
    "actor_rollout_ref.actor.use_torch_compile": "False",
    "actor_rollout_ref.ref.use_torch_compile": "False",
    "actor_rollout_ref.model.use_remove_padding": "False",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "False",
    "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
    "critic.model.use_remove_padding": "False",
    "critic.model.enable_gradient_checkpointing": "False",
    "+critic.model.override_config.attn_implementation": "eager",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.enforce_eager": "True",
    "actor_rollout_ref.rollout.free_cache_engine": "False",
    # Every process costs seconds of start-up.
    "actor_rollout_ref.rollout.agent.num_workers": "1",
    "reward.num_workers": "1",
    "data.dataloader_num_workers": "0",
    **_REPLAY,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
    # GRPO on one of our tasks, as small as a development run is.
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.calculate_log_probs": "True",
    # Micro-batches by their tokens: no size to choose that divides every batch on every number of ranks.
    _DYNAMIC: "True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "4096",
    "critic.ppo_max_token_len_per_gpu": "4096",
    "reward.custom_reward_function.path": REWARD["path"],
    "reward.custom_reward_function.name": REWARD["name"],
    "trainer.logger": "[console]",
    "trainer.val_before_train": "False",
    "trainer.resume_mode": "disable",
}
"""Setting and value; a plus where verl's configuration has no such key."""


def with_defaults(given: Sequence[str]) -> list[str]:
    """The user's arguments after the defaults that they do not name themselves."""
    named = {_key(one) for one in given}
    for beginnings, taken_back in UNLESS.items():
        if any(one.startswith(beginnings) for one in named):
            named |= set(taken_back)
    kept = [f"{name}={value}" for name, value in DEFAULTS.items() if not _named(_key(name), named)]
    return [*kept, *given]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _named(key: str, named: set[str]) -> bool:
    """True also where the user gives the whole group that holds the key."""
    return any(key == one or key.startswith(f"{one}.") for one in named)
