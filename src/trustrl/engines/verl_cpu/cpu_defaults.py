"""Default settings of `main_ppo` on a CPU. The user's own settings replace them."""

from collections.abc import Collection, Sequence

from trustrl.world.verl_dataset import PLAIN_CHAT, REWARD

PLUGIN = "trustrl.engines.verl_cpu.plugin"
MEGATRON_PLUGIN = "trustrl.engines.verl_cpu.megatron_plugin"
RAY_ENGINE = "trustrl.engines.verl_cpu.ray_checkpoint_engine"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    # Every rank is a process, and more threads than cores make small models ten times slower.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts an idle Python for every CPU that it is given. verl's environment cannot use them, and each one costs
    # seconds.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's own switch for a single machine: it listens only on the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment variables that verl, torch, and Ray read in every process."""

_ENGINES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
_ENGINE_CONFIGS = {
    "actor_rollout_ref.actor": "fsdp_config",
    "actor_rollout_ref.ref": "fsdp_config",
    "critic": "fsdp",
}
_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
_FSDP = {
    **{f"{engine}.strategy": "fsdp2" for engine in _ENGINES},
    **{f"{engine}.{config}.use_torch_compile": "False" for engine, config in _ENGINE_CONFIGS.items()},
    **{f"+{engine}.{config}.mixed_precision": _FP32 for engine, config in _ENGINE_CONFIGS.items()},
    "actor_rollout_ref.model.use_remove_padding": "False",
    "critic.model.use_remove_padding": "False",
}

_MEGATRON = {
    # verl's group of settings for Megatron, for the actor, the reference and the critic.
    "model_engine": "megatron",
    **{f"{engine}.megatron.dtype": "float32" for engine in _ENGINES},
    # verl's other bridge builds transformer-engine's layers only.
    **{f"{engine}.megatron.vanilla_mbridge": "True" for engine in _ENGINES},
}
_CHOOSES_MEGATRON = {"model_engine": "megatron", "actor_rollout_ref.actor.strategy": "megatron"}

_REPLAY = {
    "trainer.v1.sampler.custom_sampler.path": f"pkg://{PLUGIN}",
    "trainer.v1.sampler.custom_sampler.name": "quick_replay_buffer",
}
_DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"
_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size", "critic.ppo_micro_batch_size",
)  # fmt: skip
UNLESS: dict[tuple[str, ...], Collection[str]] = {
    # verl passes these only to its own replay buffers.
    ("algorithm.filter_groups", "trainer.v1.sampler"): _REPLAY.keys(),
    _MICRO_BATCHES: [_DYNAMIC],
}
"""Defaults that contradict settings of the user: prefixes of such settings, and the defaults that they remove."""

PLAIN_PROMPTS = f'actor_rollout_ref.model.custom_chat_template="{PLAIN_CHAT}"'
"""Setting for plain-text prompts: the model reads only a message's content, without a chat template."""

DEFAULTS: dict[str, str] = {
    # One rank, and one server for all ranks: see `replicas`.
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": "1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "${trainer.n_gpus_per_node}",
    # A new Ray cluster, even if one is running.
    "+ray_kwargs.ray_init.address": "local",
    # verl requests three CPUs per rank, and one for each of its own actors; Ray's CPUs are not cores.
    "ray_kwargs.ray_init.num_cpus": "32",
    "+ray_kwargs.ray_init.num_gpus": "${trainer.n_gpus_per_node}",
    "+ray_kwargs.ray_init.include_dashboard": "False",
    "+ray_kwargs.ray_init.object_store_memory": "268435456",
    # No kernels for GPUs, and no half precision, which a CPU emulates.
    **_FSDP,
    "actor_rollout_ref.actor.use_torch_compile": "False",
    "actor_rollout_ref.ref.use_torch_compile": "False",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "False",
    "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
    "critic.model.enable_gradient_checkpointing": "False",
    "+critic.model.override_config.attn_implementation": "eager",
    "actor_rollout_ref.rollout.dtype": "float32",
    # Used only by trainers with separate samplers; the others always pass weights directly.
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "ray_cpu",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": RAY_ENGINE,
    "actor_rollout_ref.rollout.enforce_eager": "True",
    "actor_rollout_ref.rollout.free_cache_engine": "False",
    # Every process costs seconds of start-up.
    "actor_rollout_ref.rollout.agent.num_workers": "1",
    "reward.num_workers": "1",
    "data.dataloader_num_workers": "0",
    **_REPLAY,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
    # GRPO on one of trustrl's tasks, at the size of a development run.
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.calculate_log_probs": "True",
    # Micro-batches by token count: a fixed size would have to divide every batch on every number of ranks.
    _DYNAMIC: "True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "4096",
    "critic.ppo_max_token_len_per_gpu": "4096",
    "reward.custom_reward_function.path": REWARD["path"],
    "reward.custom_reward_function.name": REWARD["name"],
    "trainer.logger": "[console]",
    "trainer.val_before_train": "False",
    "trainer.resume_mode": "disable",
}
"""Settings and their values on FSDP; a plus marks keys that verl's configuration does not have."""

ON_MEGATRON: dict[str, str] = _MEGATRON | {key: value for key, value in DEFAULTS.items() if key not in _FSDP}
"""The same on Megatron."""


def chooses_megatron(given: Sequence[str]) -> bool:
    """Returns whether the user's arguments choose Megatron as the actor's engine."""
    chosen = {_key(one): one.partition("=")[2] for one in given}
    return any(chosen.get(key) == value for key, value in _CHOOSES_MEGATRON.items())


def with_defaults(given: Sequence[str]) -> list[str]:
    """Returns the user's arguments, preceded by the defaults of all settings that the user does not name."""
    named = {_key(one) for one in given}
    for beginnings, taken_back in UNLESS.items():
        if any(one.startswith(beginnings) for one in named):
            named |= set(taken_back)
    defaults = ON_MEGATRON if chooses_megatron(given) else DEFAULTS
    kept = [f"{name}={value}" for name, value in defaults.items() if not _named(_key(name), named)]
    return [*kept, *given]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _named(key: str, named: set[str]) -> bool:
    """Returns whether the user names the key, or a whole group that holds it."""
    return any(key == one or key.startswith(f"{one}.") for one in named)
