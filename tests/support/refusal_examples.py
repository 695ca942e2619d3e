"""An example of each refused setting: settings that the row refuses, and no other row of the engine does.

Each line has the row's setting, the example's settings relative to settings that work, a preset, and overrides of it.
The lines of an engine are in the order of its rows.
"""

from typing import Any, NamedTuple

from trustrl.engines.refusals.rows import Refusal

T, S = "trainer.algorithm", "generator.sampling_params"
ORIGINAL = "ray_kwargs.ray_init.runtime_env.env_vars.SGLANG_RETURN_ORIGINAL_LOGPROB"
A, R, C = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": False, "behavior": "sampler"}
SWIFT_VLLM = {"use_vllm": True, "top_k": -1, "TRUSTRL_BEHAVIOR": "sampler"}

AXOLOTL = (
    ("rl", {"rl": "dpo"}),
    ("trainer_cls", {"trainer_cls": None}),
    ("trust_region", {}, "dppo-full-tv"),
    ("trl.async_prefetch", {"trl.async_prefetch": True}),
    ("trl.use_data_producer", {"trl.use_data_producer": True}),
    ("context_parallel_size", {"context_parallel_size": 2}),
    ("nemo_gym_enabled", {"nemo_gym_enabled": True}),
)

NEMO_RL = (
    ("loss_fn.trustrl_region", {}, "dppo-binary-tv", {"max_staleness": 2}),
    ("loss_fn.ratio_clip_min", {"loss_fn.ratio_clip_min": 0.1}),
    ("loss_fn.ratio_clip_max", {"loss_fn.ratio_clip_max": 0.28}),
    ("loss_fn.ratio_clip_c", {"loss_fn.ratio_clip_c": 3.0}),
    ("loss_fn.disable_ppo_ratio", {"loss_fn.disable_ppo_ratio": True}),
    ("loss_fn.use_cispo", {"loss_fn.use_cispo": True}),
    ("loss_fn.sequence_level_importance_ratios", {"loss_fn.sequence_level_importance_ratios": True}),
    ("loss_fn.force_on_policy_ratio", {"loss_fn.force_on_policy_ratio": True}),
    ("loss_fn.truncated_importance_sampling_type", {"loss_fn.truncated_importance_sampling_type": "tis"}),
    (
        "loss_fn.use_importance_sampling_correction",
        {"loss_fn.use_importance_sampling_correction": True},
        "ppo",
        {"anchor": "proximal"},
    ),
    ("loss_fn.token_level_loss", {"loss_fn.token_level_loss": True}, "gspo"),
    ("policy.generation.top_p", {"policy.generation.top_p": 0.9}),
    ("policy.generation.top_k", {"policy.generation.top_k": 50}),
)

ON_TRAINER = {"anchor": "proximal"}
OPENRLHF = (
    ("--trustrl.region", {}, "dppo-full-tv"),
    ("--ds.zero_stage", {"--ds.zero_stage": 3}, "dppo-topk-tv", ON_TRAINER),
    ("--ds.packing_samples", {"--ds.packing_samples": True}, "dppo-topk-tv", ON_TRAINER),
    ("--ds.ring_attn_size", {"--ds.ring_attn_size": 2}, "troll"),
    ("--ds.tensor_parallel_size", {"--ds.tensor_parallel_size": 2}, "troll"),
    ("--ds.deepcompile", {"--ds.deepcompile": True}, "dppo-topk-tv", ON_TRAINER),
    ("--data.max_images_per_prompt", {"--data.max_images_per_prompt": 1}, "dppo-topk-tv", ON_TRAINER),
    ("--data.max_images_per_prompt", {"--data.max_images_per_prompt": 1}, "dppo-binary-tv", {"max_staleness": 2}),
    ("--algo.advantage.is_correction_level", {"--algo.advantage.is_correction_level": "off"}),
    (
        "--algo.advantage.is_correction_level",
        {"--algo.advantage.is_correction_level": "token"},
        "ppo",
        {"anchor": "proximal"},
    ),
    ("--actor.eps_clip", {"--actor.eps_clip": 0.3}),
    ("--actor.eps_clip_low_high", {"--actor.eps_clip_low_high": (0.2, 0.28)}),
    ("--actor.dual_clip", {"--actor.dual_clip": 3.0}),
    ("--actor.policy_loss_type", {"--actor.policy_loss_type": "gspo"}),
    ("--algo.advantage.is_correction_mode", {"--algo.advantage.is_correction_mode": "clip"}),
    ("--algo.advantage.is_correction_gating", {"--algo.advantage.is_correction_gating": "tv"}),
    ("--algo.advantage.is_correction_threshold", {"--algo.advantage.is_correction_threshold": (0.9, 1.1)}),
    ("--actor.loss_agg_mode", {"--actor.loss_agg_mode": "token-mean"}, "gspo"),
    ("--train.async_enable", {"--train.async_enable": True}, "minirl"),
)

SKYRL = (
    (f"{T}.policy_loss_type", {}, "dppo-full-tv"),
    (f"{T}.policy_loss_type", {}, "dppo-topk-tv"),
    (f"{T}.policy_loss_type", {}, "dppo-binary-tv", {"max_staleness": 2}),
    (f"{T}.off_policy_correction", {f"{T}.off_policy_correction.tis_ratio_type": "token"}),
    (f"{T}.loss_reduction", {f"{T}.loss_reduction": "token_mean"}, "gspo"),
    (f"{T}.eps_clip_low", {f"{T}.eps_clip_low": 0.77}),
    (f"{T}.eps_clip_high", {f"{T}.eps_clip_high": 0.77}),
    (f"{T}.clip_ratio_c", {f"{T}.clip_ratio_c": 0.77}),
    (f"{T}.sapo", {f"{T}.sapo.tau_neg": 0.77}),
    (f"{T}.cispo", {f"{T}.cispo.cispo_eps_clip_high": 0.77}),
    (f"{T}.dppo", {f"{T}.dppo.delta_low": 0.77}),
    (f"{T}.clip_cov", {f"{T}.clip_cov.clip_ratio": 0.77}),
    (f"{T}.kl_cov", {f"{T}.kl_cov.kl_cov_frac": 0.77}),
    ("trainer.strategy", {"trainer.strategy": "megatron"}, "troll"),
    ("trainer.policy.sequence_parallel_size", {"trainer.policy.sequence_parallel_size": 2}, "troll"),
    ("generator.step_wise_trajectories", {"generator.step_wise_trajectories": True}, "troll"),
    (f"{S}.logprobs", {f"{S}.logprobs": None}),
    ("generator.inference_engine.engine_init_kwargs.logprobs_mode", {f"{S}.temperature": 0.8}),
    ("trainer.fully_async.enabled", {"trainer.fully_async.enabled": True}, "minirl"),
    (f"{T}.temperature", {f"{T}.temperature": 0.8}),
    (f"{S}.top_p", {f"{S}.top_p": 0.9}),
    (f"{S}.top_k", {f"{S}.top_k": 50}),
    (f"{S}.min_p", {f"{S}.min_p": 0.1}),
    (f"{S}.repetition_penalty", {f"{S}.repetition_penalty": 1.1}),
)

SLIME = (
    ("--loss-type", {"--loss-type": "policy_loss"}),
    ("--eps-clip", {"--eps-clip": 0.3}),
    ("--eps-clip-high", {"--eps-clip-high": 0.28}),
    ("--eps-clip-c", {"--eps-clip-c": 3.0}),
    ("--use-tis", {"--use-tis": True}),
    ("--use-opsm", {"--use-opsm": True}),
    ("--advantage-estimator", {"--advantage-estimator": "gspo"}),
    ("--use-unbiased-kl", {"--use-unbiased-kl": True}),
    ("--custom-pg-loss-reducer-function-path", {"--custom-pg-loss-reducer-function-path": "my.reducer"}),
    ("--rollout-top-p", {"--rollout-top-p": 0.9}),
    ("--rollout-top-k", {"--rollout-top-k": 50}),
    ("--calculate-per-token-loss", {"--calculate-per-token-loss": True}, "gspo"),
    ("--context-parallel-size", {"--context-parallel-size": 2}, "gspo"),
)

SWIFT = (
    ("loss_type", {"loss_type": "cispo"}),
    ("loss_type", {"loss_type": "dapo"}, "gspo"),
    ("importance_sampling_level", {"importance_sampling_level": "sequence"}),
    ("epsilon", {"epsilon": 0.3}),
    ("epsilon_high", {"epsilon_high": 0.28}),
    ("delta", {"delta": 2.0}),
    ("rollout_importance_sampling_mode", {"rollout_importance_sampling_mode": "token_truncate"}),
    ("log_rollout_offpolicy_metrics", {"log_rollout_offpolicy_metrics": True}),
    ("off_policy_sequence_mask_delta", {"off_policy_sequence_mask_delta": 0.5}),
    ("top_entropy_quantile", {"top_entropy_quantile": 0.2}),
    ("use_liger_kernel", {"use_liger_kernel": True}),
    ("padding_free", {"padding_free": True}),
    ("sequence_parallel_size", {"sequence_parallel_size": 2}),
    ("model", {"model": "multimodal"}),
    ("TRUSTRL_BEHAVIOR", {**SWIFT_VLLM, "TRUSTRL_BEHAVIOR": "trainer"}),
    ("TRUSTRL_BEHAVIOR", {"TRUSTRL_BEHAVIOR": "sampler"}),
    ("async_generate", {**SWIFT_VLLM, "async_generate": True}, "minirl"),
    ("TRUSTRL_REGION", {}, "dppo-full-tv"),
    ("TRUSTRL_REGION", {**SWIFT_VLLM}, "dppo-topk-tv"),
    ("top_p", {"top_p": 0.9}),
    ("top_k", {"top_k": 50}),
    ("min_p", {"min_p": 0.1}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("The model's generation_config.{key}", {"The model's generation_config": {"typical_p": 0.9}}),
    ("structured_outputs_regex", {"structured_outputs_regex": "[0-9]+"}),
    ("vllm_engine_kwargs", {"vllm_engine_kwargs": {"logprobs_mode": "raw_logprobs"}}),
)

TRL = (
    ("loss_type", {"loss_type": "cispo"}),
    ("loss_type", {"loss_type": "sapo"}),
    ("loss_type", {"loss_type": "vespo"}),
    ("loss_type", {"loss_type": "mine"}),
    ("loss_type", {"loss_type": "luspo", "trl": (1, 9, 2)}),
    ("loss_type", {"loss_type": "dapo"}, "gspo"),
    ("importance_sampling_level", {"importance_sampling_level": "sequence"}),
    ("epsilon", {"epsilon": 0.3}),
    ("epsilon_high", {"epsilon_high": 0.28}),
    ("delta", {"delta": 2.0}),
    ("top_entropy_quantile", {"top_entropy_quantile": 0.2}),
    ("off_policy_mask_threshold", {"off_policy_mask_threshold": 0.5}),
    ("use_liger_kernel", {"use_liger_kernel": True}),
    ("use_liger_loss", {"use_liger_loss": True}),
    ("behavior", {**VLLM, "behavior": "trainer"}),
    ("vllm_importance_sampling_correction", {**VLLM, "vllm_importance_sampling_correction": True}),
    ("behavior", {"behavior": "sampler"}),
    ("region", {}, "troll", {"support": "full"}),
    ("region", {**VLLM}, "dppo-full-tv"),
    ("vllm_options", {"vllm_options": {"dtype": "bfloat16"}}),
    (
        "vllm_options['speculative_config']",
        {**VLLM, "vllm_on_cpu": True, "vllm_options": {"speculative_config": {"method": "ngram"}}},
    ),
    ("top_p", {"top_p": 0.9}),
    ("top_k", {"top_k": 50}),
    ("min_p", {"min_p": 0.1}),
    ("top_p, top_k and min_p", {**VLLM, "top_p": 0.9}, "dppo-full-tv", {"anchor": "proximal"}),
    (
        "vllm_importance_sampling_correction",
        {**VLLM, "vllm_importance_sampling_correction": True, "top_p": 0.9},
        "dppo-binary-tv",
        {"anchor": "proximal"},
    ),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("vllm_structured_outputs_regex", {"vllm_structured_outputs_regex": "[0-9]+"}),
    ("generation_kwargs[{key!r}]", {"generation_kwargs": {"suppress_tokens": [5]}}),
    ("The model's output layer", {"The model's output layer": "LoraLinear"}),
    ("router_aux_loss_coef", {"router_aux_loss_coef": 0.001}, "dppo-topk-tv"),
    ("DeepSpeed's ZeRO stage", {"DeepSpeed's ZeRO stage": 3}, "dppo-topk-tv"),
    ("The vLLM server's logprobs_mode", {"The vLLM server's logprobs_mode": "raw_logprobs", "temperature": 0.7}),
)

TRL_ASYNC = (
    ("region", {}, "dppo-topk-tv"),
    ("region.anchor", {}, "minirl"),
    ("region", {}, "gspo"),
    ("epsilon", {"epsilon": 0.3}),
    ("epsilon_high", {"epsilon_high": 0.28}),
    ("top_p", {"top_p": 0.9}),
    ("top_k", {"top_k": 50}),
    ("min_p", {"min_p": 0.1}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
)

VERL = (
    ("trainer.use_v1", {"trainer.use_v1": False}),
    ("async_training", {"async_training": {"partial_rollout": True}}),
    ("rollout", {"rollout": {"nnodes": 1}}),
    (f"{A}.loss_agg_mode", {f"{A}.loss_agg_mode": "token-mean"}, "gspo"),
    (f"{A}.clip_ratio", {f"{A}.clip_ratio": 0.4}),
    (f"{A}.clip_ratio_low", {f"{A}.clip_ratio_low": 0.4}),
    (f"{A}.clip_ratio_high", {f"{A}.clip_ratio_high": 0.4}),
    (f"{A}.clip_ratio_c", {f"{A}.clip_ratio_c": 6.0}),
    (f"{A}.tau_pos", {f"{A}.tau_pos": 2.0}),
    (f"{A}.tau_neg", {f"{A}.tau_neg": 2.1}),
    (f"{C}.rollout_is", {f"{C}.rollout_is": "token"}),
    (f"{R}.calculate_log_probs", {f"{R}.calculate_log_probs": False}),
    (f"{R}.logprobs_mode", {f"{R}.logprobs_mode": "raw_logprobs"}),
    (f"{R}.engine_kwargs.vllm.logprobs_mode", {f"{R}.engine_kwargs.vllm.logprobs_mode": "raw_logprobs"}),
    (
        f"{R}.engine_kwargs.sglang.rl_on_policy_target",
        {f"{R}.name": "sglang", f"{R}.engine_kwargs.sglang.rl_on_policy_target": "fsdp"},
    ),
    (
        f"{R}.engine_kwargs.sglang.enable_watermark",
        {f"{R}.name": "sglang", f"{R}.engine_kwargs.sglang.enable_watermark": True},
    ),
    (ORIGINAL, {f"{R}.name": "sglang", ORIGINAL: "1"}),
    (
        f"{C}.rollout_is",
        {f"{C}.bypass_mode": True, f"{C}.rollout_is": "token_k1"},
        "dppo-binary-tv",
        {"anchor": "proximal"},
    ),
    (
        f"{C}.rollout_rs",
        {f"{C}.bypass_mode": True, f"{C}.rollout_rs": "token_k1"},
        "dppo-binary-tv",
        {"anchor": "proximal"},
    ),
    (f"{A}.strategy", {f"{A}.strategy": "torchtitan"}, "troll"),
    (
        f"{A}.megatron.dynamic_context_parallel",
        {f"{A}.strategy": "megatron", f"{A}.megatron.dynamic_context_parallel": True},
    ),
    (
        f"{A}.megatron.use_megatron_fsdp",
        {f"{A}.strategy": "megatron", f"{A}.megatron.use_megatron_fsdp": True},
        "troll",
    ),
    (
        f"{A}.megatron.override_transformer_config.defer_embedding_wgrad_compute",
        {f"{A}.strategy": "megatron", f"{A}.megatron.override_transformer_config.defer_embedding_wgrad_compute": True},
        "troll",
    ),
    (
        "actor_rollout_ref.model.mtp.enable_train",
        {f"{A}.strategy": "megatron", "actor_rollout_ref.model.mtp.enable_train": True},
        "troll",
    ),
    (
        "actor_rollout_ref.model.lora.target_modules",
        {f"{A}.strategy": "megatron", "actor_rollout_ref.model.lora.target_modules": ["linear_qkv", "output_layer"]},
        "troll",
    ),
    ("region.anchor", {}, "dppo-full-tv"),
    (f"{A}.strategy", {f"{A}.strategy": "fsdp"}, "dppo-full-tv", {"anchor": "proximal"}),
    ("actor_rollout_ref.model.use_fused_kernels", {"actor_rollout_ref.model.use_fused_kernels": True}, "troll"),
    ("distillation.enabled", {"distillation.enabled": True}, "troll"),
    (f"{R}.agent.default_agent_loop", {f"{R}.agent.default_agent_loop": "tool_agent"}, "dppo-topk-tv"),
    (f"{R}.name", {f"{R}.name": "trtllm"}, "dppo-topk-tv"),
    (f"{R}.disaggregation.enabled", {f"{R}.disaggregation.enabled": True}, "dppo-topk-tv"),
    (
        f"{R}.engine_kwargs.vllm.max_logprobs",
        {f"{R}.name": "vllm", f"{R}.engine_kwargs.vllm.max_logprobs": 10},
        "dppo-topk-tv",
    ),
    (f"{R}.top_k", {f"{R}.name": "sglang", f"{R}.top_p": 0.9, f"{A}.policy_loss.max_kept": 1024}),
    (f"{A}.policy_loss.max_kept", {f"{R}.top_p": 0.9}),
    (f"{A}.policy_loss.max_kept", {f"{A}.policy_loss.max_kept": 1024}),
    (
        f"{A}.policy_loss.max_kept",
        {f"{A}.policy_loss.max_kept": 1024, f"{R}.top_p": 0.9},
        "dppo-full-tv",
        {"anchor": "proximal"},
    ),
    (
        f"{C}.rollout_is",
        {f"{C}.rollout_is": "token", f"{R}.top_p": 0.9, f"{A}.policy_loss.max_kept": 1024},
        "dppo-binary-tv",
        {"anchor": "proximal"},
    ),
    (
        f"{C}.rollout_rs",
        {f"{C}.rollout_rs": "token", f"{R}.top_p": 0.9, f"{A}.policy_loss.max_kept": 1024},
        "dppo-binary-tv",
        {"anchor": "proximal"},
    ),
    (f"{R}.repetition_penalty", {f"{R}.repetition_penalty": 1.1}),
    (
        f"{R}.engine_kwargs.vllm_cpu.speculative_config",
        {
            f"{R}.name": "vllm_cpu",
            f"{R}.engine_kwargs.vllm_cpu.speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        },
    ),
)


class Case(NamedTuple):
    """A row with its example."""

    row: Refusal
    settings: dict[str, Any] = {}
    preset: str = "dppo-binary-tv"
    region: dict[str, Any] = {}


def cases(rows, examples) -> list[Case]:
    """Returns the rows with their examples."""
    assert [row.setting for row in rows] == [example[0] for example in examples]
    return [Case(row, *example[1:]) for row, example in zip(rows, examples, strict=True)]
