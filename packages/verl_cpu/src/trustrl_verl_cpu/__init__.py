"""verl's `main_ppo` on a machine without a GPU: a platform, two samplers, and a command with the defaults for a CPU.

    python -m trustrl_verl_cpu data.train_files=... actor_rollout_ref.model.path=... \
        actor_rollout_ref.rollout.name=vllm_cpu ...

This package does not import its modules: the vLLM server runs in an environment without verl, and verl must know its
platform before the losses in `trustrl.engines.verl` are loaded.
"""
