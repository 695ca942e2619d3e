"""verl's `main_ppo` on a machine without a GPU: a platform, two samplers, data files, and a command with the defaults.

    python -m trustrl.engines.verl_cpu data.train_files=... actor_rollout_ref.model.path=... \
        actor_rollout_ref.rollout.name=vllm_cpu ...

Nothing is imported here: the vLLM server runs in an environment that has no verl, and verl asks for its platform before
the losses in `trustrl.engines.verl` may be loaded.
"""
