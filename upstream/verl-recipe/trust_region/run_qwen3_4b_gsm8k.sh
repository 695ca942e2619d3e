#!/usr/bin/env bash
# GRPO on GSM8K with a trust region, Qwen3-4B on 8 GPUs: four updates on each rollout, sampled by vLLM in bf16.
set -xeuo pipefail

DATA=${DATA:-$HOME/data/gsm8k}
MODEL=${MODEL:-Qwen/Qwen3-4B}
LOSS_MODE=${LOSS_MODE:-trustrl-dppo-binary-tv-capped}

# 256 prompts in mini-batches of 64 are four updates. μ, the sampler's log-prob of each token, is the region's anchor.
python3 -m trustrl.engines.verl \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.policy_loss.loss_mode="$LOSS_MODE" \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.dtype=bfloat16 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.logger='[console]' \
    trainer.project_name=trust_region \
    trainer.experiment_name="qwen3-4b-gsm8k-$LOSS_MODE" \
    trainer.nnodes=1 \
    trainer.n_gpus_per_node=8 \
    trainer.val_before_train=True \
    trainer.test_freq=20 \
    trainer.save_freq=100 \
    trainer.total_epochs=10 \
    "$@"
