"""Settings of verl's `main_ppo` on a CPU, which the package `trustrl_verl_cpu` sets unless the user names them.

They are here so that a plan checks a CPU recipe without that package. `DEFAULTS` names modules of it as text.
"""

from trustrl.world.verl_dataset import PLAIN_CHAT, REWARD

PACKAGE = "trustrl_verl_cpu"
PLUGIN = f"{PACKAGE}.plugin"
RAY_ENGINE = f"{PACKAGE}.ray_checkpoint_engine"

ENGINES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
_ENGINE_CONFIGS = {
    "actor_rollout_ref.actor": "fsdp_config",
    "actor_rollout_ref.ref": "fsdp_config",
    "critic": "fsdp",
}
_FP32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
FSDP = {
    **{f"{engine}.strategy": "fsdp2" for engine in ENGINES},
    **{f"{engine}.{config}.use_torch_compile": "False" for engine, config in _ENGINE_CONFIGS.items()},
    **{f"+{engine}.{config}.mixed_precision": _FP32 for engine, config in _ENGINE_CONFIGS.items()},
    "actor_rollout_ref.model.use_remove_padding": "False",
    "critic.model.use_remove_padding": "False",
}

REPLAY = {
    "trainer.v1.sampler.custom_sampler.path": f"pkg://{PLUGIN}",
    "trainer.v1.sampler.custom_sampler.name": "quick_replay_buffer",
}
DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"

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
    **FSDP,
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
    **REPLAY,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
    # GRPO on one of trustrl's tasks, at the size of a development run.
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.calculate_log_probs": "True",
    # Micro-batches by token count: a fixed size would have to divide every batch on every number of ranks.
    DYNAMIC: "True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "4096",
    "critic.ppo_max_token_len_per_gpu": "4096",
    "reward.custom_reward_function.path": REWARD["path"],
    "reward.custom_reward_function.name": REWARD["name"],
    "trainer.logger": "[console]",
    "trainer.val_before_train": "False",
    "trainer.resume_mode": "disable",
}
"""Settings and their values on FSDP; a plus marks keys that verl's configuration does not have."""
